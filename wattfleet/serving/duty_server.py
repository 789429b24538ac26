"""`DutyServer`: gathers requests into batches, and requests a turn from the device's agent for each batch."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotAnsweredError
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, TypeVar

from wattfleet.serving.agent_stream import AgentStream, RequestRefusedError, ServerClosedError
from wattfleet_proto.names import DEFAULT_SOCKET
from wattfleet_proto.v1 import duty_pb2, duty_pb2_grpc

Input = TypeVar("Input")
Output = TypeVar("Output")

_log = logging.getLogger(__name__)

_NO_LIMIT_S = 1.0
"""How long a batch waits for its turn if no duty states a limit, s."""

_LEAST_WAIT_S = 0.1
"""How long a batch waits for its turn even if its requests are already late, s."""

_UNKNOWN: Any = object()

_MAX_PROBLEM = 200


def _simulated_s(least_ms: Sequence[float], batch: int) -> float:
    """Return a simulated board's time for a batch, s, interpolated between the times of 1, 2, 4, ... requests."""
    known = len(least_ms) - 1
    lower = min(batch.bit_length() - 1, known)
    upper = min(lower + 1, known)
    beyond: float = batch / 2**lower - 1
    return (least_ms[lower] + (least_ms[upper] - least_ms[lower]) * beyond) / 1e3


def _pace(begun_s: float, least_ms: Sequence[float], batch: int) -> None:
    """Wait until a batch has taken as long as on the simulated board; on a real board, do not wait."""
    if least_ms:
        time.sleep(max(0.0, begun_s + _simulated_s(least_ms, batch) - time.monotonic()))


@dataclass
class _Request(Generic[Input, Output]):
    input: Input
    arrived_s: float = field(default_factory=time.monotonic)
    answer: Future[Output] = field(default_factory=Future)


def shape_of(request: object) -> Hashable:
    """Return the shape of an array or tensor; None for anything else."""
    shape = getattr(request, "shape", None)
    return None if shape is None else tuple(shape)


class DutyServer(Generic[Input, Output]):
    """Answers requests with the app's own model; close it at the end, or use it as a context manager.

    The model runs in one thread of this server, with one batch at a time. A batch consists of the requests that have
    arrived, up to `largest_batch` or, unless requests are late, up to a smaller batch size of the agent's plan. If the
    model raises an error for a batch, its requests are tried one by one, so that only the failing ones get an error.
    Without an agent, batches are answered at once. While the agent measures the device, the model also answers copies
    of the latest request; those answers are dropped.

    Args:
        model: maps a list of inputs to a list of the same number of outputs.
        largest_batch: maximum number of requests that the model accepts at once.
        agent_socket: path of the agent's unix socket.
        shape_of: returns the shape of an input; all requests must have the shape of the first answered one.
        max_waiting: maximum number of waiting requests; further ones are refused.

    Raises:
        ValueError: a number is below 1.
    """

    def __init__(
        self,
        model: Callable[[list[Input]], Sequence[Output]],
        *,
        largest_batch: int = 32,
        agent_socket: str = DEFAULT_SOCKET,
        shape_of: Callable[[Input], Hashable] = shape_of,
        max_waiting: int = 10_000,
    ) -> None:
        if largest_batch < 1 or max_waiting < 1:
            raise ValueError(f"largest_batch and max_waiting must be 1 or more, not {largest_batch} and {max_waiting}")
        self._model = model
        self._largest_batch = largest_batch
        self._shape_of = shape_of
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[_Request[Input, Output]] = deque()
        self._arrived = 0
        self._shape: Hashable = _UNKNOWN
        self._latest_input: Any = _UNKNOWN
        self._to_measure: duty_pb2.MeasureBatch | None = None
        self._batching = duty_pb2.Batching()
        self._asked = self._granted = 0
        self._least_ms: Sequence[float] = ()
        self._agent_answers = True
        self._has_warned = False
        self._is_closed = False
        self._stream: AgentStream[duty_pb2.ServeRequest] = AgentStream(
            agent_socket,
            lambda channel, requests: duty_pb2_grpc.DutyServiceStub(channel).Serve(requests),
            self._greeting,
            self._receive,
            self._lost,
            "requests are answered without turns",
        )
        self._thread = threading.Thread(target=self._serve, name="inference batches", daemon=True)
        self._thread.start()

    def __enter__(self) -> DutyServer[Input, Output]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def answer(self, request: Input) -> Output:
        """Answer one request, in asyncio. If the caller is cancelled before its batch begins, the request is dropped.

        Raises:
            RequestRefusedError: its shape differs from that of earlier requests, or too many requests are waiting.
            ServerClosedError: the server was closed before the request was answered.
            Exception: the model's own error for this request.
        """
        return await asyncio.wrap_future(self.submit(request))

    def answer_blocking(self, request: Input, timeout_s: float | None = None) -> Output:
        """Answer one request, in any thread; see `answer`.

        Args:
            request: an input of the model.
            timeout_s: how long to wait, s; None for no limit.

        Raises:
            TimeoutError: the request was not answered in time; it is dropped if its batch has not begun.
        """
        answer = self.submit(request)
        try:
            return answer.result(timeout_s)
        except NotAnsweredError:
            answer.cancel()
            raise

    def submit(self, request: Input) -> Future[Output]:
        """Queue one request, and return its future at once.

        Raises:
            RequestRefusedError: its shape differs from that of earlier requests, or too many requests are waiting.
            ServerClosedError: the server is closed.
        """
        shape = self._shape_of(request)
        with self._changed:
            if self._is_closed:
                raise ServerClosedError("the server is closed")
            if len(self._waiting) >= self._max_waiting:
                raise RequestRefusedError(f"{len(self._waiting):,} requests are already waiting: try again later")
            if self._shape is not _UNKNOWN and shape != self._shape:
                raise RequestRefusedError(f"the request has the shape {shape}, but this server answers {self._shape}")
            waiting = _Request[Input, Output](request)
            self._waiting.append(waiting)
            self._arrived += 1
            self._changed.notify_all()
        return waiting.answer

    def close(self) -> None:
        """Stop answering requests; the waiting ones get a `ServerClosedError`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._stream.close()
        while self._waiting:
            request = self._waiting.popleft()
            if request.answer.set_running_or_notify_cancel():
                request.answer.set_exception(ServerClosedError("the server was closed before it answered"))

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._wait()
                if self._is_closed:
                    return
                self._gather()
            self._wait_for_turn()
            with self._changed:
                if self._is_closed:
                    return
                batch = self._taken()
            began_s = time.monotonic()
            failed = self._answer_all(batch)
            self._report(batch, failed, time.monotonic() - began_s)

    def _gather(self) -> None:
        """Wait until it is time to answer a batch, as chosen by the agent."""
        while self._waiting and not self._is_closed:
            wait_s = self._batching.wait_ms / 1e3 if self._stream.is_open else 0.0
            left_s = self._waiting[0].arrived_s + wait_s - time.monotonic()
            if len(self._waiting) >= min(self._batching.batch or 1, self._largest_batch) or left_s <= 0:
                return
            self._stream.send(duty_pb2.ServeRequest(waiting=self._message()))
            self._wait(left_s)

    def _wait(self, timeout_s: float | None = None) -> None:
        """Wait for a change, with the lock held; meanwhile, answer the batches that the agent measures."""
        if self._to_measure is None:
            self._changed.wait(timeout_s)
        wanted, self._to_measure = self._to_measure, None
        if wanted is None:
            return
        self._changed.release()
        try:
            problem = self._why_not_measured(wanted.batch, wanted.least_ms)
        finally:
            self._changed.acquire()
        if self._waiting:  # first, so that the agent does not begin another batch that would make them late
            self._stream.send(duty_pb2.ServeRequest(waiting=self._message()))
        measured = duty_pb2.BatchMeasured(number=wanted.number, problem=problem)
        self._stream.send(duty_pb2.ServeRequest(measured=measured))

    def _why_not_measured(self, batch: int, least_ms: Sequence[float]) -> str:
        """Make the model answer copies of the latest request; return why it could not, or an empty text."""
        if self._latest_input is _UNKNOWN or not 1 <= batch <= self._largest_batch:
            return f"a batch of {batch} cannot be made of answered requests"
        begun_s = time.monotonic()
        try:
            self._model([self._latest_input] * batch)
            _pace(begun_s, least_ms, batch)
        except BaseException as error:  # as in `_answer_all`
            return f"{type(error).__name__}: {error}"[:_MAX_PROBLEM]
        return ""

    def _wait_for_turn(self) -> None:
        """Request a turn, and wait for it as long as the requests can wait, or until the agent is gone."""
        with self._changed:
            if not self._waiting:
                return
            self._asked += 1
            self._least_ms = ()
            limit_s = self._batching.latency_ms / 1e3 or _NO_LIMIT_S
            until_s = max(self._waiting[0].arrived_s + limit_s, time.monotonic() + _LEAST_WAIT_S)
            if not self._stream.send(duty_pb2.ServeRequest(waiting=self._message(wants_turn=True))):
                return
            while self._agent_answers and self._stream.is_open and self._granted != self._asked and not self._is_closed:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    if not self._has_warned:
                        _log.warning(
                            "the agent did not give a turn in time: requests are answered without turns until it does"
                        )
                    self._has_warned = True
                    self._agent_answers = False
                    return
                self._wait(left_s)
            self._has_warned &= self._granted != self._asked

    def _taken(self) -> list[_Request[Input, Output]]:
        """Return the requests of the next batch, without those of disconnected clients."""
        most = self._largest_batch
        if self._batching.batch and not self._is_late():
            most = min(most, self._batching.batch)
        taken: list[_Request[Input, Output]] = []
        while self._waiting and len(taken) < most:
            request = self._waiting.popleft()
            if request.answer.set_running_or_notify_cancel():
                taken.append(request)
        return taken

    def _is_late(self) -> bool:
        """Return whether the oldest request has missed the limit, since more arrive than planned for small batches.

        Without a limit, no request is late.
        """
        limit_s = self._batching.latency_ms / 1e3
        return bool(self._waiting and limit_s) and time.monotonic() - self._waiting[0].arrived_s > limit_s

    def _answer_all(self, batch: list[_Request[Input, Output]]) -> int:
        """Answer a batch, and return the number of its requests with an error."""
        try:
            outputs = self._outputs(batch)
        except BaseException as error:  # even an exit must not end the thread, which answers all other requests
            if len(batch) > 1:
                _log.warning("the model failed for a batch of %d; its requests are tried one by one", len(batch))
                return sum(self._answer_all([request]) for request in batch)
            batch[0].answer.set_exception(error)
            return 1
        if batch and self._shape is _UNKNOWN:
            with self._changed:
                self._shape = self._shape_of(batch[0].input)
        if batch:
            self._latest_input = batch[-1].input
        for request, output in zip(batch, outputs, strict=True):
            request.answer.set_result(output)
        return 0

    def _outputs(self, batch: list[_Request[Input, Output]]) -> list[Output]:
        if not batch:
            return []
        begun_s, least_ms = time.monotonic(), self._least_ms
        outputs = list(self._model([request.input for request in batch]))
        _pace(begun_s, least_ms, len(batch))
        if len(outputs) != len(batch):
            raise ValueError(f"the model returned {len(outputs)} outputs for {len(batch)} inputs")
        return outputs

    def _report(self, batch: list[_Request[Input, Output]], failed: int, took_s: float) -> None:
        now_s = time.monotonic()
        latencies_ms = [(now_s - request.arrived_s) * 1e3 for request in batch if request.answer.exception() is None]
        with self._changed:
            answered = duty_pb2.BatchAnswered(
                batch=len(batch),
                model_ms=took_s * 1e3,
                latency_ms=latencies_ms,
                failed=failed,
                arrived=self._arrived,
                waiting=self._message(),
            )
            self._arrived = 0
            self._stream.send(duty_pb2.ServeRequest(answered=answered))

    def _message(self, wants_turn: bool = False) -> duty_pb2.RequestsWaiting:
        oldest_ms = (time.monotonic() - self._waiting[0].arrived_s) * 1e3 if self._waiting else 0.0
        return duty_pb2.RequestsWaiting(
            count=len(self._waiting), oldest_ms=oldest_ms, wants_turn=wants_turn, number=self._asked
        )

    def _greeting(self) -> list[duty_pb2.ServeRequest]:
        return [duty_pb2.ServeRequest(hello=duty_pb2.ServerHello(largest_batch=self._largest_batch, measures=True))]

    def _receive(self, response: Any) -> None:
        with self._changed:
            if response.HasField("batching"):
                self._batching = response.batching
            elif response.HasField("measure"):
                self._to_measure = response.measure
            else:
                self._granted = response.turn.number
                self._least_ms = response.turn.least_ms
                self._agent_answers = True
            self._changed.notify_all()

    def _lost(self) -> None:
        with self._changed:
            self._to_measure = None
            self._changed.notify_all()
