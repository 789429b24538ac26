"""The stream of one connected inference server."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator

from edge_agent.profiling.mode_measurement import MeasurementError
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.turns import TurnPace, TurnPurpose
from wattfleet.common.console import plain_text
from wattfleet.common.tasks import background_task
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet_proto.v1 import duty_pb2

_MAX_BATCH = 100_000
_MAX_LATENCY_MS = 1e9
_MAX_UNREAD = 100
"""Maximum of answers that wait until the server reads them; a server requests one turn at a time."""
_MEASURED_WITHIN_S = 30.0
_MAX_PROBLEM = 200


class ServerGoneError(WattfleetError):
    """No inference server can measure batches for the agent any longer."""


class ServerStream:
    """Processes the messages of one inference server, and queues the answers.

    Args:
        turns: the turns of the device.
        pace: the minimum times of turns, for a simulated board in real time.
        hello: the server's first message.

    Attributes:
        answers: the queue of answers to the server; None ends the stream.
        largest_batch: maximum number of requests that its model accepts at once.

    Raises:
        InvalidInputError: a number is out of range.
    """

    def __init__(self, turns: DeviceTurns, pace: TurnPace, hello: duty_pb2.ServerHello) -> None:
        self.largest_batch = _count("largest_batch", hello.largest_batch, least=1)
        self.answers: asyncio.Queue[duty_pb2.ServeResponse | None] = asyncio.Queue()
        self._turns = turns
        self._pace = pace
        self._waiting_count = 0
        self._server = turns.server_connected(self.largest_batch)
        self._taking: asyncio.Task[int] | None = None
        self._is_first = True
        self._measures = hello.measures
        self._has_answered = False
        self._measuring: tuple[int, asyncio.Future[None]] | None = None
        self._numbers = itertools.count(1)

    @property
    def can_measure(self) -> bool:
        """Whether `measured_ms` can be called: the server has answered a request, which it can repeat."""
        return self._measures and self._has_answered

    async def measured_ms(self, batch: int) -> float:
        """Make the model answer a batch of copies of an earlier request; return the time taken, ms.

        Raises:
            ServerGoneError: the server has disconnected, or does not answer.
            MeasurementError: its model has failed.
        """
        loop = asyncio.get_running_loop()
        number, begun_s = next(self._numbers), loop.time()
        ended: asyncio.Future[None] = loop.create_future()
        self._measuring = number, ended
        least_ms = self._paced(0, batch).least_ms
        measure = duty_pb2.MeasureBatch(number=number, batch=batch, least_ms=least_ms)
        self.answers.put_nowait(duty_pb2.ServeResponse(measure=measure))
        try:
            await asyncio.wait_for(ended, _MEASURED_WITHIN_S)
        except asyncio.TimeoutError:
            raise ServerGoneError(
                f"the inference server did not measure a batch within {_MEASURED_WITHIN_S:g} s"
            ) from None
        finally:
            self._measuring = None
            self._pace.end()
        return (loop.time() - begun_s) * 1e3

    def send_batching(self) -> None:
        """Tell the server how to gather requests."""
        duty, chosen = self._turns.duty, self._turns.batching
        latency_ms = 0.0 if duty is None else duty.latency_ms
        batching = duty_pb2.Batching(
            has_duty=duty is not None, latency_ms=latency_ms, batch=chosen.batch, wait_ms=chosen.wait_ms
        )
        self.answers.put_nowait(duty_pb2.ServeResponse(batching=batching))

    async def read(self, requests: AsyncIterator[duty_pb2.ServeRequest]) -> None:
        """Process the server's messages until it disconnects.

        Raises:
            InvalidInputError: a number is out of range, or the server does not read its answers.
        """
        async for request in requests:
            if self.answers.qsize() > _MAX_UNREAD:
                raise InvalidInputError("the inference server does not read its answers")
            if request.HasField("answered"):
                self._answered(request.answered)
            elif request.HasField("waiting"):
                self._waiting(request.waiting)
            elif request.HasField("measured"):
                self._measured(request.measured)

    def close(self) -> None:
        """Forget the server, and ignore its further messages."""
        self._end_turn(1, is_complete=False)
        if self._measuring is not None and not self._measuring[1].done():
            self._measuring[1].set_exception(ServerGoneError("the inference server has disconnected"))
        self._measures = False
        self._turns.server_gone(self._server)

    def _measured(self, measured: duty_pb2.BatchMeasured) -> None:
        number, ended = self._measuring or (None, None)
        if ended is None or number != measured.number or ended.done():
            return
        if measured.problem:
            problem = plain_text(measured.problem, _MAX_PROBLEM)
            ended.set_exception(MeasurementError(f"the model of the inference server has failed: {problem}"))
        else:
            ended.set_result(None)

    def _waiting(self, waiting: duty_pb2.RequestsWaiting) -> None:
        self._waiting_count = count = _count("count", waiting.count)
        self._turns.requests_waiting(self._server, count, _milliseconds("oldest_ms", waiting.oldest_ms))
        if waiting.wants_turn and self._taking is None:
            self._taking = background_task("turn of an inference server", self._take(waiting.number))

    async def _take(self, number: int) -> int:
        ticket = await self._turns.take(TurnPurpose.INFERENCE, self._is_first, self._server)
        self.answers.put_nowait(duty_pb2.ServeResponse(turn=self._paced(number, self._waiting_count)))
        return ticket

    def _paced(self, number: int, waiting: int) -> duty_pb2.Turn:
        duty = self._turns.duty
        return self._pace.batch(number, None if duty is None else duty.workload, waiting, self.largest_batch)

    def _answered(self, answered: duty_pb2.BatchAnswered) -> None:
        batch = _count("batch", answered.batch)
        latencies_ms = [_milliseconds("latency_ms", each) for each in answered.latency_ms]
        if len(latencies_ms) > _MAX_BATCH:
            raise InvalidInputError(f"a batch has at most {_MAX_BATCH:,} requests")
        failed = _count("failed", answered.failed)
        self._has_answered |= bool(latencies_ms)
        self._turns.batch_answered(_count("arrived", answered.arrived), latencies_ms, failed)
        # After an error, the server tries the requests of a batch one by one, which takes longer.
        self._end_turn(max(1, batch), is_complete=batch > 0 and not failed)
        self._waiting(answered.waiting)

    def _end_turn(self, batch: int, is_complete: bool) -> None:
        """End the turn, or withdraw the request for it if the server no longer waits for it."""
        taking, self._taking = self._taking, None
        if taking is None:
            return
        if taking.done() and not taking.cancelled():
            self._is_first = False
            self._pace.end()
            self._turns.give_back(taking.result(), batch, is_complete)
        else:
            taking.cancel()


def _count(what: str, value: int, least: int = 0) -> int:
    if not least <= value <= _MAX_BATCH:
        raise InvalidInputError(f"{what} must be {least} to {_MAX_BATCH:,}, not {value:,}")
    return value


def _milliseconds(what: str, value: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= _MAX_LATENCY_MS):
        raise InvalidInputError(f"{what} must be 0 to {_MAX_LATENCY_MS:g}, not {value:g}")
    return value
