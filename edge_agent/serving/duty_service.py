"""The agent's service for inference servers, for trainings that share the device, and for the duty's commands."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from edge_agent.devices.device import Device
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_figures import DutyFile
from edge_agent.serving.inference import InferenceRows
from edge_agent.serving.server_stream import ServerGoneError, ServerStream
from edge_agent.serving.turns import TurnPace, TurnPurpose
from wattfleet.common.clock import VirtualClock
from wattfleet.common.console import plain_text
from wattfleet.common.tasks import shield_until_done, stop_tasks
from wattfleet.core.duties import Duty, KeptDuty
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import Profile
from wattfleet_proto.convert import (
    batches_from_messages,
    batches_to_messages,
    kept_duty_from_message,
    kept_duty_to_message,
)
from wattfleet_proto.names import owner_socket
from wattfleet_proto.v1 import duty_pb2, duty_pb2_grpc

# --- Duty client ------------------------------------------------------------------------------------------------------
# A client for the duty's commands, over the socket of a running agent.


_TIMEOUT_S = 5.0


class NoAgentError(WattfleetError):
    """No agent of this version serves the socket."""


class DutyClient:
    """Sends the duty's commands to the agent at a socket.

    Args:
        socket: the path of the agent's socket.

    Every method raises:
        NoAgentError: no agent serves the socket, or it does not answer.
        InvalidInputError: the agent refused.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def set(self, duty: Duty, measured: Profile | None = None) -> None:
        """Put a duty in force; it stays in force after a restart of the agent.

        Args:
            duty: the duty.
            measured: inference rows measured on this device, with their batches; None for none.
        """
        rows = [] if measured is None else batches_to_messages(measured)
        self._ask_as_owner("SetDuty", duty_pb2.SetDutyRequest(duty=duty.to_json(), measured=rows))

    def show(self) -> tuple[Duty, KeptDuty] | None:
        """Return the duty in force and how it is kept; None if there is none."""
        answer = self._ask("ShowDuty", duty_pb2.ShowDutyRequest())
        return (Duty.from_json(answer.duty), kept_duty_from_message(answer.figures)) if answer.duty else None

    def clear(self) -> bool:
        """End the duty in force, and return whether there was one."""
        return bool(self._ask_as_owner("ClearDuty", duty_pb2.ClearDutyRequest()).was_set)

    def _ask_as_owner(self, method: str, request: Any) -> Any:
        socket = owner_socket(self._socket)
        if socket.exists() and not os.access(socket, os.W_OK):
            raise InvalidInputError(
                f"only {socket.owner()}, the user of the agent, may set or clear the duty: run the command with sudo"
            )
        return self._ask(method, request, socket)

    def _ask(self, method: str, request: Any, socket: Path | None = None) -> Any:
        with self._translated(), grpc.insecure_channel(f"unix:{socket or self._socket}") as channel:
            return getattr(duty_pb2_grpc.DutyServiceStub(channel), method)(request, timeout=_TIMEOUT_S)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            code, details = error.code(), plain_text(error.details() or "")
            if code is grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidInputError(details) from None
            raise NoAgentError(
                f"no agent answers at {self._socket} ({code.name}): start it with `wattfleet agent run` or `systemctl"
                " start wattfleet-agent`, or pass its --socket"
            ) from None


# --- Duty service -----------------------------------------------------------------------------------------------------

_STILL_WAITING_S = 1.0
_MAX_APPS = 16
"""Maximum of connected inference servers, and also of connected trainings."""


class TooManyAppsError(WattfleetError):
    """The maximum of inference servers or trainings is already connected."""


class DutyServicer(duty_pb2_grpc.DutyServiceServicer):
    """Translates between the protocol and the turns of the device.

    Args:
        device: the board.
        turns: the turns of the device.
        file: stores the duty.
        rows: stores the measured rows of inference.
    """

    def __init__(self, device: Device, turns: DeviceTurns, file: DutyFile, rows: InferenceRows) -> None:
        self._device = device
        self._turns = turns
        self._file = file
        self._rows = rows
        self._pace = TurnPace(device)
        self._streams: set[ServerStream] = set()
        self._trainings = 0
        self._one_change = asyncio.Lock()
        turns.batching_changed = self._send_batching

    async def Serve(  # noqa: N802 - named by the protocol
        self, request_iterator: AsyncIterator[duty_pb2.ServeRequest], context: Any
    ) -> AsyncIterator[duty_pb2.ServeResponse]:
        """Serve one inference server until it disconnects.

        Raises:
            InvalidInputError: a message comes in the wrong order, or a number is out of range.
            TooManyAppsError: 16 inference servers are connected already.
        """
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("hello"):
            raise InvalidInputError("the first message must be a ServerHello")
        _require_room("inference servers", len(self._streams))
        stream = ServerStream(self._turns, self._pace, first.hello)
        self._streams.add(stream)
        reading = asyncio.create_task(stream.read(request_iterator), name="requests of an inference server")
        try:
            stream.send_batching()
            reading.add_done_callback(lambda _: stream.answers.put_nowait(None))
            while (answer := await stream.answers.get()) is not None:
                yield answer
            reading.result()
        finally:
            # Without waiting, since gRPC may cancel this call again while it waits.
            self._streams.discard(stream)
            reading.cancel()
            stream.close()
            await stop_tasks(reading)

    async def Share(  # noqa: N802 - named by the protocol
        self, request_iterator: AsyncIterator[duty_pb2.ShareRequest], context: Any
    ) -> AsyncIterator[duty_pb2.ShareResponse]:
        """Serve one training until it disconnects.

        Raises:
            InvalidInputError: a message comes in the wrong order. TooManyAppsError: 16 trainings are connected already.
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
                    taking = asyncio.ensure_future(self._turns.take(TurnPurpose.MINIBATCH, is_first))
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
            InvalidInputError: the duty or a measured row is invalid, the device cannot keep a duty, or it cannot be
                stored.
        """
        duty = Duty.from_json(request.duty)
        require_live_time(self._device)

        def store() -> None:
            measured = batches_from_messages(request.measured)
            if len(measured):
                self._rows.add(duty.workload, measured)
            self._file.write(duty)

        async with self._one_change:
            # In a thread, since storing thousands of rows would delay the turns of requests.
            await shield_until_done(store)
            self._turns.duty = duty
        return duty_pb2.SetDutyResponse()

    async def ShowDuty(  # noqa: N802 - named by the protocol
        self, request: duty_pb2.ShowDutyRequest, context: Any
    ) -> duty_pb2.ShowDutyResponse:
        """Return the duty in force and how it is kept."""
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
        async with self._one_change:
            was_set = self._turns.duty is not None
            self._file.write(None)
            self._turns.duty = None
        return duty_pb2.ClearDutyResponse(was_set=was_set)

    @property
    def largest_measured(self) -> int:
        """Return the largest batch that a connected server can measure, 0 if none can yet.

        May be called in any thread.
        """
        return max((each.largest_batch for each in list(self._streams) if each.can_measure), default=0)

    async def measured_ms(self, batch: int, work_ms: float) -> float:
        """Make a server answer a batch of copies of an earlier request in a turn; return the time taken, ms.

        It is a minibatch's turn, so requests come first, but its time does not count as a training's.

        Args:
            batch: number of requests.
            work_ms: its longest expected time, ms.

        Raises:
            ServerGoneError: no server can measure, or it does not answer.
            MeasurementError: its model has failed.
        """
        ticket = await self._turns.take(TurnPurpose.MINIBATCH, work_ms=work_ms)
        try:
            stream = next((each for each in self._streams if each.can_measure and batch <= each.largest_batch), None)
            if stream is None:
                raise ServerGoneError(f"no connected inference server can measure batches of {batch}")
            return await stream.measured_ms(batch)
        finally:
            self._turns.give_back(ticket, is_complete=False)

    def _send_batching(self) -> None:
        for stream in self._streams:
            stream.send_batching()


def require_live_time(device: Device) -> None:
    """Check that a device can answer requests while it measures.

    Raises:
        InvalidInputError: the device computes its figures, and its measurements take no real time.
    """
    if isinstance(device.clock, VirtualClock):
        raise InvalidInputError(
            f"{device.board_kind} is {device.provenance} and does not run in real time, so it cannot answer "
            f"requests: set the duty on a device in real time, such as simulated:agx-orin:real-time"
        )


def _require_room(apps: str, connected: int) -> None:
    if connected >= _MAX_APPS:
        raise TooManyAppsError(
            f"{connected} {apps} are already connected, the maximum: close one of them, and connect again"
        )
