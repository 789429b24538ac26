"""The agent's service for inference servers, for trainings that share the device, and for the duty's commands."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

from edge_agent.devices.device import Device
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_file import DutyFile
from edge_agent.serving.inference_rows import InferenceRows
from edge_agent.serving.turn_pace import TurnPace
from edge_agent.serving.turns import Kind
from wattfleet.duties import Duty
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_io.clock import VirtualClock
from wattfleet_io.tasks import background_task, stop_tasks
from wattfleet_proto.convert import batches_from_messages, kept_duty_to_message
from wattfleet_proto.v1 import duty_pb2, duty_pb2_grpc

_STILL_WAITING_S = 1.0
_MAX_BATCH = 100_000
_MAX_LATENCY_MS = 1e9
_MAX_UNREAD = 100
"""Answers that may wait until an inference server reads them; it asks for one turn at a time."""
_MAX_APPS = 16
"""Inference servers that are served at once, and so many trainings beside them."""


class TooManyAppsError(WattfleetError):
    """As many inference servers, or trainings, are connected as are served at once."""


class DutyServicer(duty_pb2_grpc.DutyServiceServicer):
    """Translates between the protocol and the turns of the device.

    Args:
        device: the board.
        turns: of the device.
        file: stores the duty.
        rows: stores what was measured of inference.
    """

    def __init__(self, device: Device, turns: DeviceTurns, file: DutyFile, rows: InferenceRows) -> None:
        self._device = device
        self._turns = turns
        self._file = file
        self._rows = rows
        self._pace = TurnPace(device)
        self._streams: set[_ServerStream] = set()
        self._trainings = 0
        turns.batching_changed = self._tell_batching

    async def Serve(  # noqa: N802 - named by the protocol
        self, request_iterator: AsyncIterator[duty_pb2.ServeRequest], context: Any
    ) -> AsyncIterator[duty_pb2.ServeResponse]:
        """Serve one inference server until it disconnects.

        Raises:
            InvalidInputError: a message is out of turn, or a number out of range.
            TooManyAppsError: 16 inference servers are connected already.
        """
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("hello"):
            raise InvalidInputError("the first message must be a ServerHello")
        _require_room("inference servers", len(self._streams))
        stream = _ServerStream(self._turns, self._pace, _count("largest_batch", first.hello.largest_batch, least=1))
        self._streams.add(stream)
        reading = asyncio.create_task(stream.read(request_iterator), name="requests of an inference server")
        try:
            stream.tell_batching()
            reading.add_done_callback(lambda _: stream.answers.put_nowait(None))
            while (answer := await stream.answers.get()) is not None:
                yield answer
            reading.result()
        finally:
            # At once, as gRPC may cancel this call again while it waits.
            self._streams.discard(stream)
            reading.cancel()
            stream.close()
            await stop_tasks(reading)

    async def Share(  # noqa: N802 - named by the protocol
        self, request_iterator: AsyncIterator[duty_pb2.ShareRequest], context: Any
    ) -> AsyncIterator[duty_pb2.ShareResponse]:
        """Serve one training until it disconnects.

        Raises:
            InvalidInputError: a message is out of turn.
            TooManyAppsError: 16 trainings are connected already.
        """
        _require_room("trainings", self._trainings)
        self._trainings += 1
        ticket: int | None = None
        is_first = True
        try:
            async for request in request_iterator:
                if request.HasField("ended"):
                    if ticket is None:
                        raise InvalidInputError("MinibatchEnded must follow a Turn")
                    self._pace.end()
                    self._turns.give_back(ticket, trained=True)
                    ticket = None
                elif request.HasField("wanted"):
                    if ticket is not None:
                        raise InvalidInputError("MinibatchEnded must follow a Turn")
                    taking = asyncio.ensure_future(self._turns.take(Kind.MINIBATCH, is_first))
                    try:
                        while not (await asyncio.wait([taking], timeout=_STILL_WAITING_S))[0]:
                            reason = self._turns.why_training_waits() or ""
                            yield duty_pb2.ShareResponse(waiting=duty_pb2.StillWaiting(reason=reason))
                    finally:
                        if taking.done():
                            ticket, is_first = taking.result(), False
                        else:
                            await stop_tasks(taking)
                    yield duty_pb2.ShareResponse(turn=self._pace.minibatch())
        finally:
            self._trainings -= 1
            if ticket is not None:
                self._pace.end()
                self._turns.give_back(ticket, is_complete=False)

    async def SetDuty(  # noqa: N802 - named by the protocol
        self, request: duty_pb2.SetDutyRequest, context: Any
    ) -> duty_pb2.SetDutyResponse:
        """Put a duty in force.

        Raises:
            InvalidInputError: it or a measured row is invalid, the device cannot keep one, or it cannot be stored.
        """
        duty, measured = Duty.from_json(request.duty), batches_from_messages(request.measured)
        require_live_time(self._device)
        if len(measured):
            self._rows.add(duty.workload, measured)
        self._file.write(duty)
        self._turns.duty = duty
        return duty_pb2.SetDutyResponse()

    async def ShowDuty(  # noqa: N802 - named by the protocol
        self, request: duty_pb2.ShowDutyRequest, context: Any
    ) -> duty_pb2.ShowDutyResponse:
        """Show the duty in force, and how it is kept."""
        duty, kept = self._turns.duty, self._turns.kept_duty()
        if duty is None or kept is None:
            return duty_pb2.ShowDutyResponse()
        return duty_pb2.ShowDutyResponse(duty=duty.to_json(), figures=kept_duty_to_message(kept))

    async def ClearDuty(  # noqa: N802 - named by the protocol
        self, request: duty_pb2.ClearDutyRequest, context: Any
    ) -> duty_pb2.ClearDutyResponse:
        """End the duty in force.

        Raises:
            InvalidInputError: its file cannot be removed.
        """
        was_set = self._turns.duty is not None
        self._file.write(None)
        self._turns.duty = None
        return duty_pb2.ClearDutyResponse(was_set=was_set)

    def _tell_batching(self) -> None:
        for stream in self._streams:
            stream.tell_batching()


class _ServerStream:
    """What one inference server says and is answered."""

    def __init__(self, turns: DeviceTurns, pace: TurnPace, largest_batch: int) -> None:
        self.answers: asyncio.Queue[duty_pb2.ServeResponse | None] = asyncio.Queue()
        self._turns = turns
        self._pace = pace
        self._largest_batch = largest_batch
        self._waiting_count = 0
        self._server = turns.server_connected(largest_batch)
        self._taking: asyncio.Task[int] | None = None
        self._is_first = True

    def tell_batching(self) -> None:
        """Tell the server how to gather requests."""
        duty, chosen = self._turns.duty, self._turns.batching
        latency_ms = 0.0 if duty is None else duty.latency_ms
        batching = duty_pb2.Batching(
            has_duty=duty is not None, latency_ms=latency_ms, batch=chosen.batch, wait_ms=chosen.wait_ms
        )
        self.answers.put_nowait(duty_pb2.ServeResponse(batching=batching))

    async def read(self, requests: AsyncIterator[duty_pb2.ServeRequest]) -> None:
        """Follow the server's messages until it disconnects.

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

    def close(self) -> None:
        """Forget the server; nothing that it says counts any more."""
        self._end_turn(1, is_complete=False)
        self._turns.server_gone(self._server)

    def _waiting(self, waiting: duty_pb2.RequestsWaiting) -> None:
        self._waiting_count = count = _count("count", waiting.count)
        self._turns.requests_waiting(self._server, count, _milliseconds("oldest_ms", waiting.oldest_ms))
        if waiting.wants_turn and self._taking is None:
            self._taking = background_task("turn of an inference server", self._take(waiting.number))

    async def _take(self, number: int) -> int:
        ticket = await self._turns.take(Kind.INFERENCE, self._is_first, self._server)
        duty = self._turns.duty
        workload = None if duty is None else duty.workload
        turn = self._pace.batch(number, workload, self._waiting_count, self._largest_batch)
        self.answers.put_nowait(duty_pb2.ServeResponse(turn=turn))
        return ticket

    def _answered(self, answered: duty_pb2.BatchAnswered) -> None:
        batch = _count("batch", answered.batch)
        latencies_ms = [_milliseconds("latency_ms", each) for each in answered.latency_ms]
        if len(latencies_ms) > _MAX_BATCH:
            raise InvalidInputError(f"a batch has at most {_MAX_BATCH:,} requests")
        failed = _count("failed", answered.failed)
        self._turns.batch_answered(_count("arrived", answered.arrived), latencies_ms, failed)
        # After an error, the requests of a batch are tried one by one, which takes longer than a batch.
        self._end_turn(max(1, batch), is_complete=batch > 0 and not failed)
        self._waiting(answered.waiting)

    def _end_turn(self, batch: int, is_complete: bool) -> None:
        """End the turn, or withdraw the question for it, if the server did not wait for it any longer."""
        taking, self._taking = self._taking, None
        if taking is None:
            return
        if taking.done() and not taking.cancelled():
            self._is_first = False
            self._pace.end()
            self._turns.give_back(taking.result(), batch, is_complete)
        else:
            taking.cancel()


def require_live_time(device: Device) -> None:
    """Check that a device can answer requests while it measures.

    Raises:
        InvalidInputError: it computes its figures itself, and no time passes on it.
    """
    if isinstance(device.clock, VirtualClock):
        raise InvalidInputError(
            f"{device.board_kind} is {device.provenance} and measures itself, without any time to answer requests in:"
            " set the duty on a device in real time, such as simulated:agx-orin:real-time"
        )


def _require_room(apps: str, connected: int) -> None:
    if connected >= _MAX_APPS:
        raise TooManyAppsError(f"{connected} {apps} are connected already: close one of them, and connect again")


def _count(what: str, value: int, least: int = 0) -> int:
    if not least <= value <= _MAX_BATCH:
        raise InvalidInputError(f"{what} must be {least} to {_MAX_BATCH:,}, not {value:,}")
    return value


def _milliseconds(what: str, value: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= _MAX_LATENCY_MS):
        raise InvalidInputError(f"{what} must be 0 to {_MAX_LATENCY_MS:g}, not {value:g}")
    return value
