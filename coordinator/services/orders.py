"""Orders to connected devices, on their way to the devices' sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import grpc

from coordinator.state.records import Reassignment
from wattfleet_io.tasks import background_task
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)


class ResponseStream:
    """The responses to one device: its gRPC stream takes one at a time, as fast as the device reads."""

    def __init__(self, write: Callable[[session_pb2.SessionResponse], Awaitable[None]]) -> None:
        """Write to a gRPC stream."""
        self._write = write
        self._lock = asyncio.Lock()
        self._order: session_pb2.Reassign | None = None
        self._sending: asyncio.Task[None] | None = None

    async def write(self, response: session_pb2.SessionResponse) -> None:
        """Write a response after those before it."""
        async with self._lock:
            await self._write(response)

    def send_order(self, order: session_pb2.Reassign) -> None:
        """Write an order in the background; it replaces an order that a slow reader has not taken yet."""
        self._order = order
        if self._sending is None or self._sending.done():
            self._sending = background_task("send an order", self._send())

    async def _send(self) -> None:
        async with self._lock:
            while self._order is not None:
                order, self._order = self._order, None
                try:
                    await self._write(session_pb2.SessionResponse(reassign=order))
                except grpc.aio.BaseError:
                    return  # the device disconnected: its next session begins with the current order

    def close(self) -> None:
        """Stop sending, since the session has ended."""
        if self._sending is not None:
            self._sending.cancel()


class Orders:
    """Sends orders to devices with a session; another device receives its order when its next session begins."""

    def __init__(self) -> None:
        """Start without any session."""
        self._streams: dict[str, ResponseStream] = {}

    def begin(self, device_id: str, stream: ResponseStream) -> None:
        """Send a device's orders to a stream from now on."""
        self._streams[device_id] = stream

    def end(self, device_id: str, stream: ResponseStream) -> None:
        """Stop sending to a stream, since its session has ended."""
        stream.close()
        if self._streams.get(device_id) is stream:  # otherwise a newer session has begun
            del self._streams[device_id]

    def send(self, reassignments: Sequence[Reassignment]) -> None:
        """Send devices their new assignments."""
        for reassignment in reassignments:
            stream = self._streams.get(reassignment.device_id)
            if stream is None:
                _log.warning("%s has no session: it receives its order when it reconnects", reassignment.device_id)
                continue
            new = reassignment.assignment
            order = "stop" if new is None else f"continue at {new.power_limit_w:.1f} W"
            _log.info("%s: order to %s", reassignment.device_id, order)
            stream.send_order(order_message(reassignment))


def order_message(reassignment: Reassignment) -> session_pb2.Reassign:
    """The message for an order."""
    new = reassignment.assignment
    return session_pb2.Reassign(
        plan_id=reassignment.plan_id,
        mode=None if new is None else mode_to_message(new.mode),
        power_limit_w=0.0 if new is None else new.power_limit_w,
    )
