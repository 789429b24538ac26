"""The device's side of Flower: a mod that trains every round in the power mode the plan assigned.

from wattfleet_flower.client.mod import power_mode_mod

app = ClientApp(mods=[power_mode_mod])

An app that trains by `for batch in until_deadline(loader)` stops in time for its round, and what it did until then is
kept and weighted as such. One that trains by `for batch in profiled(loader)` lets the agent measure other modes
meanwhile, in rounds in which some are still to be measured. Both: `until_deadline(profiled(loader))`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import grpc
from flwr.app import ConfigRecord, Context, Message, RecordDict

from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_flower.client.deadline import Deadline, length_of
from wattfleet_io.gpu import wait_for_gpu
from wattfleet_proto.assignment import (
    APP_WEIGHS_KEY,
    CUT_KEY,
    DEVICE_ID_KEY,
    IDENTIFY_KEY,
    RECORD_KEY,
    SHARE_KEY,
    RoundAssignment,
)
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.local_socket import DEFAULT_SOCKET
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc

Batch = TypeVar("Batch")

# Every report waits for the agent's answer, which takes about a millisecond.
_REPORT_EVERY_S = 0.5


class AgentUnreachableError(WattfleetError):
    """The device's agent cannot be reached or refused; without it no watts can be kept."""


def power_mode_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Apply the assigned mode, train, let the agent report what was observed; other messages pass untouched.

    Raises:
        InvalidInputError: the SuperNode has no `device-id`, or the assignment cannot be read.
        AgentUnreachableError: the agent's socket cannot be reached, or the agent refused.
    """
    if RECORD_KEY not in message.content:
        return call_next(message, context)
    record = message.content[RECORD_KEY]
    if IDENTIFY_KEY in record:
        identity = ConfigRecord({DEVICE_ID_KEY: _device_id(context)})
        return Message(RecordDict({RECORD_KEY: identity}), reply_to=message)

    assignment = RoundAssignment.from_record(record)
    # The app sees the message that its strategy wrote.
    del message.content[RECORD_KEY]
    socket = str(context.node_config.get("agent-socket", DEFAULT_SOCKET))
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        training = _Training(channel)
        try:
            training.start(assignment)
            deadline = training.until(Deadline(assignment.epochs, assignment.deadline_s))
            reply = None
            running = _running.set(training)
            try:
                reply = call_next(message, context)
            finally:
                _running.reset(running)
                training.finish(reply is None or reply.has_error(), deadline.epochs_done)
        except grpc.RpcError as error:
            raise AgentUnreachableError(
                f"{assignment.device_id}: the agent at {socket} answered {error.code().name}: {error.details()}"
            ) from error
    if deadline.used and not reply.has_error():
        done: dict[str, bool | float] = {CUT_KEY: deadline.cut, APP_WEIGHS_KEY: deadline.app_weighs}
        if deadline.share is not None:
            done[SHARE_KEY] = deadline.share
        reply.content[RECORD_KEY] = ConfigRecord(done)
    return reply


class _Batches(Generic[Batch]):
    """A loader's batches, as often as they are asked for, and as many."""

    def __init__(self, loader: Iterable[Batch], batches: Callable[[Iterable[Batch]], Iterator[Batch]]) -> None:
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(self._loader)

    def __len__(self) -> int:
        length = length_of(self._loader)
        if length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return length


def until_deadline(loader: Iterable[Batch], *, app_weighs: bool = False) -> Iterable[Batch]:
    """The batches of `loader` until the round's deadline; at least one, and none after the last that ends in time.

    How much of the assigned work was done goes into the reply, whose weight (`num-examples`, say) the server scales by
    it. Outside of a training that the mod has begun, and in rounds that have no deadline, these are the loader's
    batches and nothing else.

    Args:
        loader: yields minibatches; an epoch's, if it is to be known how much was done.
        app_weighs: whether the app's own weight counts only what was done, so that the server leaves it as it is.
    """

    def bounded(batches: Iterable[Batch]) -> Iterator[Batch]:
        training = _running.get()
        if training is None:
            return iter(batches)
        training.deadline.app_weighs |= app_weighs
        return training.deadline.bounded(batches)

    return _Batches(loader, bounded)


def profiled(loader: Iterable[Batch]) -> Iterable[Batch]:
    """The batches of `loader`; while the app trains on them, the agent measures modes that are still to be measured.

    Outside of a training that the mod has begun, and once nothing is left to be measured, these are the loader's
    batches and nothing else.

    Raises:
        grpc.RpcError: the agent is gone, or could not put a mode in force; the mod translates it.
    """
    return _Batches(loader, _measured)


def _measured(loader: Iterable[Batch]) -> Iterator[Batch]:
    training = _running.get()
    if training is None or not training.report([], paused=False):
        yield from loader
        return
    times: list[local_pb2.MinibatchTimes] = []
    batches, measuring, reported_s = iter(loader), True, time.perf_counter()
    try:
        while True:
            asked_s = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            fetched_s = time.perf_counter()
            yield batch
            if not measuring:
                continue
            wait_for_gpu()
            ended_s = time.perf_counter()
            times.append(
                local_pb2.MinibatchTimes(
                    fetch_stall_ms=(fetched_s - asked_s) * 1e3, compute_ms=(ended_s - fetched_s) * 1e3
                )
            )
            if ended_s - reported_s >= _REPORT_EVERY_S:
                measuring = training.report(times, paused=False)
                times, reported_s = [], time.perf_counter()
    finally:
        if measuring:
            training.report(times, paused=True)


class _Training:
    """One training on the agent's socket; if this process dies, the stream ends and the agent parks the device."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: SimpleQueue[local_pb2.TrainRequest | None] = SimpleQueue()
        self._answers: SimpleQueue[local_pb2.TrainResponse | Exception] = SimpleQueue()
        self.deadline = Deadline(1.0, None)
        self._is_stopped = False
        responses = local_pb2_grpc.LocalAgentServiceStub(channel).Train(iter(self._requests.get, None))
        # The agent may order to stop at any time, while the app computes.
        threading.Thread(target=self._listen, args=(responses,), daemon=True).start()

    def start(self, assignment: RoundAssignment) -> None:
        """Have the assigned mode put in force."""
        start = local_pb2.StartTraining(
            plan_id=assignment.plan_id,
            device_id=assignment.device_id,
            mode=mode_to_message(assignment.mode),
            epochs=assignment.epochs,
            power_limit_w=assignment.power_limit_w,
        )
        self._requests.put(local_pb2.TrainRequest(start=start))
        try:
            self._answer()
        except grpc.RpcError:
            self._requests.put(None)
            raise

    def until(self, deadline: Deadline) -> Deadline:
        """From now on the training has this deadline, or is to stop at once if the agent has said so already."""
        self.deadline = deadline
        if self._is_stopped:
            deadline.stop()
        return deadline

    def report(self, times: list[local_pb2.MinibatchTimes], paused: bool) -> bool:
        """Report minibatches; whether to go on reporting. The mode to train on in is in force when this returns."""
        trained = local_pb2.MinibatchesTrained(minibatches=times, paused=paused)
        self._requests.put(local_pb2.TrainRequest(minibatches=trained))
        return self._answer().noted.measuring

    def finish(self, failed: bool, epochs_done: float | None) -> None:
        """Have the device parked, and what was observed reported."""
        finish = local_pb2.FinishTraining(failed=failed, epochs_done=epochs_done)
        self._requests.put(local_pb2.TrainRequest(finish=finish))
        self._requests.put(None)
        self._answer()

    def _listen(self, responses: Any) -> None:
        try:
            for response in responses:
                if response.HasField("stop"):
                    self._is_stopped = True
                    self.deadline.stop()
                else:
                    self._answers.put(response)
        except grpc.RpcError as error:
            self._answers.put(error)
        else:
            self._answers.put(AgentUnreachableError("the agent ended the training: look at its log"))

    def _answer(self) -> local_pb2.TrainResponse:
        answer = self._answers.get()
        if isinstance(answer, Exception):
            self._answers.put(answer)  # nothing else will ever come
            raise answer
        return answer


_running: ContextVar[_Training | None] = ContextVar("training of this process that the agent watches", default=None)


def _device_id(context: Context) -> str:
    device_id = context.node_config.get(DEVICE_ID_KEY)
    if not device_id:
        raise InvalidInputError(
            f"this SuperNode has no {DEVICE_ID_KEY}: start it with --node-config '{DEVICE_ID_KEY}=\"...\"'"
        )
    return str(device_id)
