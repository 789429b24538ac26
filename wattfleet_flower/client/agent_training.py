"""A training that the device's agent runs in the assigned power mode, over the agent's local socket."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging import WARNING
from queue import SimpleQueue
from typing import Any

import grpc
from flwr.common.logger import log

from wattfleet.errors import WattfleetError
from wattfleet_flower.client.deadline import Deadline
from wattfleet_flower.client.loader_facts import facts_of
from wattfleet_proto.assignment import AssignedWork, RoundAssignment
from wattfleet_proto.convert import assignment_to_start
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc
from wattfleet_proto.version import SHARING_MINOR


class AgentUnreachableError(WattfleetError):
    """The device's agent cannot be reached or refused the training, so the power limit cannot be kept."""


class MeasuredError(BaseException):
    """Ends an app's training that was run in order to measure. No app catches it by catching all `Exception`s."""


class AgentTraining:
    """One training on the agent's socket.

    If this process dies, the stream ends and the agent parks the device.

    Attributes:
        deadline: the training's deadline.
        optimizer_steps: steps of torch's optimizers so far; counted only with automatic profiling.
        has_reported: whether minibatches of a loader were reported.
        short_pass: minibatches of a loader whose passes are too short for automatic profiling; None if there is none.
        work: the batch size and epochs that the plan has chosen; None if it has chosen neither.
        taken_batch: the batch size that `planned_work` returned to the app; None if the app has not called it.
        has_taken_epochs: whether the app has passed its epochs to `planned_work`.
        measures: whether it is run in order to measure, so that it ends when nothing is left to measure.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        """Open the stream to the agent.

        Args:
            channel: a channel to the agent's socket.
        """
        self._requests: SimpleQueue[local_pb2.TrainRequest | None] = SimpleQueue()
        self._answers: SimpleQueue[local_pb2.TrainResponse | Exception] = SimpleQueue()
        self.deadline = Deadline(1.0, None)
        self.optimizer_steps = 0
        self.has_reported = False
        self.short_pass: int | None = None
        self.work: AssignedWork | None = None
        self.taken_batch: int | None = None
        self.has_taken_epochs = self.measures = False
        self._protocol_minor = 0
        self._has_reported_loader = self._is_stopped = self._is_finished = False
        self._profiled = threading.Lock()
        responses = local_pb2_grpc.LocalAgentServiceStub(channel).Train(iter(self._requests.get, None))
        # The agent may stop the training at any time, also while the app computes.
        threading.Thread(target=self._listen, args=(responses,), daemon=True).start()

    def start(self, assignment: RoundAssignment) -> None:
        """Have the agent apply the assigned mode; return once it is applied.

        Raises:
            grpc.RpcError: the agent cannot be reached or refused.
        """
        self.measures = assignment.measures
        self._requests.put(local_pb2.TrainRequest(start=assignment_to_start(assignment)))
        try:
            self._protocol_minor = self._answer().started.protocol_minor
        except grpc.RpcError:
            self._requests.put(None)
            raise

    def set_deadline(self, deadline: Deadline) -> Deadline:
        """Set the training's deadline; it has passed already if the agent stopped the training before."""
        self.deadline = deadline
        if self._is_stopped:
            deadline.stop()
        return deadline

    def report_loader(self, loader: Iterable[object], after_minibatch: bool = False) -> None:
        """Report the batch size, workers and length of the app's data loader to the agent.

        Args:
            loader: yields the app's minibatches.
            after_minibatch: whether the first of them has just been trained.
        """
        if self._protocol_minor < 1 or self._has_reported_loader or self._is_finished:
            return
        seen = facts_of(loader)
        if seen.ListFields():
            self._has_reported_loader = True
            if self.taken_batch is not None:
                if not seen.HasField("batch"):
                    seen.batch = self.taken_batch
                seen.takes_planned_batch = seen.batch == self.taken_batch
            seen.after_minibatch = after_minibatch
            self._requests.put(local_pb2.TrainRequest(loader=seen))

    @property
    def measures_over_passes(self) -> bool:
        """Whether the agent may measure one mode during several passes over a loader."""
        return self._protocol_minor >= SHARING_MINOR

    @property
    def is_profiled(self) -> bool:
        """Whether minibatches of a loader are being reported."""
        return self._profiled.locked()

    @contextmanager
    def profiling(self) -> Iterator[bool]:
        """Report minibatches within this context; yields False if those of another loader are reported already."""
        is_first = self._profiled.acquire(blocking=False)
        try:
            yield is_first
        finally:
            if is_first:
                self._profiled.release()

    def report(self, times: list[local_pb2.MinibatchTimes], paused: bool, is_pass_over: bool = False) -> bool:
        """Report trained minibatches; return once the mode for the next ones is applied.

        Args:
            times: the times of the minibatches since the last report.
            paused: whether the app has stopped reading the loader, so that the assigned mode has to be applied.
            is_pass_over: whether the loader has ended. A measurement may then go on in its next pass.

        Returns:
            Whether the agent wants further reports. False if the training is over but an iterator is still in use.
        """
        if self._is_finished:
            return False
        self.has_reported = True
        trained = local_pb2.MinibatchesTrained(minibatches=times, paused=paused, is_pass_over=is_pass_over)
        self._requests.put(local_pb2.TrainRequest(minibatches=trained))
        return self._answer().noted.measuring

    def finish(
        self, failed: bool, epochs_done: float | None, is_out_of_memory: bool = False
    ) -> local_pb2.TrainingFinished:
        """Have the agent park the device and report what it observed; return the observation.

        Args:
            failed: whether the training failed.
            epochs_done: local epochs trained; None for as many as were assigned, 0 if unknown.
            is_out_of_memory: whether it failed because its batch did not fit into memory.
        """
        self._is_finished = True
        finish = local_pb2.FinishTraining(failed=failed, epochs_done=epochs_done, is_out_of_memory=is_out_of_memory)
        self._requests.put(local_pb2.TrainRequest(finish=finish))
        self._requests.put(None)
        return self._answer().finished

    def _listen(self, responses: Any) -> None:
        try:
            for response in responses:
                if response.HasField("stop"):
                    log(WARNING, "the agent stops this training: %s", response.stop.reason)
                    self._stop()
                else:
                    self._answers.put(response)
        except grpc.RpcError as error:
            # The agent no longer limits the device's power.
            self._stop()
            self._answers.put(error)
        else:
            self._answers.put(AgentUnreachableError("the agent ended the training: see its log"))

    def _stop(self) -> None:
        """End the training after its current minibatch, if the app uses `until_deadline`."""
        self._is_stopped = True
        self.deadline.stop()

    def _answer(self) -> local_pb2.TrainResponse:
        answer = self._answers.get()
        if isinstance(answer, Exception):
            self._answers.put(answer)  # no other answer follows
            raise answer
        return answer


CURRENT_TRAINING: ContextVar[AgentTraining | None] = ContextVar("the training that this context runs", default=None)
"""Set by the mod while the app trains; None outside of it."""
