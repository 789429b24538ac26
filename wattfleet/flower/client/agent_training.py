"""A training that the device's agent runs in the assigned power mode, over the agent's local socket."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging import WARNING
from numbers import Integral
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import grpc
from flwr.common.logger import log

from wattfleet.common.version import wait_for_gpu
from wattfleet.common.wrapped_loader import length_of
from wattfleet.core.errors import WattfleetError
from wattfleet_proto.assignment import AssignedWork, RoundAssignment
from wattfleet_proto.convert import assignment_to_start
from wattfleet_proto.limits import LARGEST_COUNT, MAX_MINIBATCHES_PER_EPOCH
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc

# --- Loader facts -----------------------------------------------------------------------------------------------------
# Reads the batch size, the number of workers and the length of an app's data loader.


def facts_of(loader: Iterable[object]) -> local_pb2.LoaderSeen:
    """Return a loader's batch size, workers and length; unset where unknown or above the agent's limits.

    Args:
        loader: torch's DataLoader, or any iterable. The attributes of a DataLoader are read wherever they exist.
    """
    batch = getattr(loader, "batch_size", None)
    if batch is None:  # a DataLoader with a batch sampler
        batch = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return local_pb2.LoaderSeen(
        batch=_count(batch, 1, LARGEST_COUNT),
        loader_workers=_count(getattr(loader, "num_workers", None), 0, LARGEST_COUNT),
        minibatches_per_epoch=_count(length_of(loader), 1, MAX_MINIBATCHES_PER_EPOCH),
    )


def _count(value: object, least: int, most: int) -> int | None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        return None
    count = int(value)
    return count if least <= count <= most else None


# --- Deadline ---------------------------------------------------------------------------------------------------------
# Stops a training at its deadline and measures how much of its work was done.

Batch = TypeVar("Batch")

# The next minibatch is predicted to take the median time of the last 31, so that one stall does not end a training.
_WINDOW = 31
# A GPU works asynchronously. Near the deadline each minibatch is synchronized, so that only finished work counts.
_SYNCHRONIZE_LAST_S = 5.0


class TrainingDeadline:
    """One training's deadline, and how much of its work was done before it.

    Attributes:
        used: whether it limited any loader.
        cut: whether it ended the training early.
        app_weighs: whether the app's own weight counts only what was done.
    """

    def __init__(self, epochs: float, deadline_s: float | None, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start the training's clock.

        Args:
            epochs: local epochs assigned.
            deadline_s: seconds from now by which the training has to end; None for no deadline.
            now_s: returns the current time.
        """
        self._epochs = epochs
        self._now_s = now_s
        self._ends_s = float("inf") if deadline_s is None else now_s() + deadline_s
        self._durations_s: deque[float] = deque(maxlen=_WINDOW)
        self._done = 0
        self._epoch_length: int | None = None
        self.used = self.cut = self.app_weighs = False

    def bounded(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield minibatches of `loader` until the next one would end after the deadline.

        The training's first minibatch is always yielded. Once the deadline has ended the training, nothing is yielded.
        """
        self.used = True
        self._epoch_length = length_of(loader) or self._epoch_length
        batches = iter(loader)
        yielded = 0
        try:
            while True:
                started_s = self._now_s()
                if self._is_over(started_s):
                    self.cut |= yielded != self._epoch_length
                    return
                try:
                    batch = next(batches)
                except StopIteration:
                    # A loader without a length has shown it by its end.
                    self._epoch_length = yielded or self._epoch_length
                    return
                yield batch
                yielded += 1
                self._done += 1
                if self._ends_s - self._now_s() < _SYNCHRONIZE_LAST_S:
                    wait_for_gpu()
                self._durations_s.append(self._now_s() - started_s)
        finally:
            close = getattr(batches, "close", None)
            if close is not None:  # a measuring loader re-applies the assigned mode
                close()

    def stop(self) -> None:
        """End the training after the current minibatch, whatever the time."""
        self._ends_s = -float("inf")

    @property
    def epochs_done(self) -> float | None:
        """Local epochs trained: 0 if the training was cut and an epoch's length is unknown.

        None if the training was not cut, so that it did every epoch assigned.
        """
        if not self.cut:
            return None
        return min(self._epochs, self._done / self._epoch_length) if self._epoch_length else 0.0

    @property
    def share(self) -> float | None:
        """The share of the assigned work that was done, 0 to 1; None if unknown."""
        epochs_done = self.epochs_done
        if epochs_done is None:
            return 1.0
        return epochs_done / self._epochs if epochs_done else None

    def _is_over(self, now_s: float) -> bool:
        if self.cut or not self._done:
            return self.cut
        expected_s = statistics.median(self._durations_s) if self._durations_s else 0.0
        return now_s + expected_s > self._ends_s


# --- Agent training ---------------------------------------------------------------------------------------------------


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
        self.deadline = TrainingDeadline(1.0, None)
        self.optimizer_steps = 0
        self.has_reported = False
        self.short_pass: int | None = None
        self.work: AssignedWork | None = None
        self.taken_batch: int | None = None
        self.has_taken_epochs = self.measures = False
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
            self._answer()
        except grpc.RpcError:
            self._requests.put(None)
            raise

    def set_deadline(self, deadline: TrainingDeadline) -> TrainingDeadline:
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
        if self._has_reported_loader or self._is_finished:
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


# --- Simulated agent --------------------------------------------------------------------------------------------------


class AgentOfSimulation(Protocol):
    """A device's agent in the app's own process, for simulations with many devices: an app has no socket there.

    Attributes:
        channel: takes the place of the channel to the agent's socket.
    """

    channel: Any

    def deadline(self, assignment: RoundAssignment) -> TrainingDeadline:
        """Return the deadline of a training in the device's own time, which is not that of this process."""
        ...


SIMULATED_AGENT: ContextVar[AgentOfSimulation | None] = ContextVar("the agent of a simulated device", default=None)
"""Set by a simulation while it runs a ClientApp; None where an agent is reached at its socket."""
