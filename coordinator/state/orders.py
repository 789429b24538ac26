"""What connected devices are to be told, on its way to their sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import grpc

from coordinator.state.records import Reassignment
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)


class Outlet:
    """Where messages to one device go: its stream takes one at a time, and as slowly as it is read."""

    def __init__(self, write: Callable[[session_pb2.SessionResponse], Awaitable[None]]) -> None:
        """Write to a stream."""
        self._write = write
        self._turn = asyncio.Lock()
        self._order: session_pb2.Reassign | None = None
        self._telling: asyncio.Task[None] | None = None

    async def write(self, response: session_pb2.SessionResponse) -> None:
        """Write a message when those before it are written."""
        async with self._turn:
            await self._write(response)

    def tell(self, order: session_pb2.Reassign) -> None:
        """Write an order soon; of those that a slow reader has not taken yet the newest counts."""
        self._order = order
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        async with self._turn:
            while self._order is not None:
                order, self._order = self._order, None
                try:
                    await self._write(session_pb2.SessionResponse(reassign=order))
                except grpc.aio.BaseError:
                    return  # the peer is gone, which ends the session; the next one begins with what stands

    def close(self) -> None:
        """The session is over."""
        if self._telling is not None:
            self._telling.cancel()


class Orders:
    """The outlets of all sessions; a device without one is told what it is to do when it has one again."""

    def __init__(self) -> None:
        """No session yet."""
        self._outlets: dict[str, Outlet] = {}

    def begin(self, device_id: str, outlet: Outlet) -> None:
        """Send a device's orders to an outlet from now on."""
        self._outlets[device_id] = outlet

    def end(self, device_id: str, outlet: Outlet) -> None:
        """Its session is over."""
        outlet.close()
        if self._outlets.get(device_id) is outlet:  # else a newer session has begun
            del self._outlets[device_id]

    def send(self, reassignments: Sequence[Reassignment]) -> None:
        """Tell devices what they are to go on with."""
        for reassignment in reassignments:
            outlet = self._outlets.get(reassignment.device_id)
            if outlet is None:
                _log.warning("%s has no session, and is told that the watts fell when it has", reassignment.device_id)
                continue
            new = reassignment.assignment
            told = "stop" if new is None else f"go on at {new.power_limit_w:.1f} W"
            _log.info("%s: %s", reassignment.device_id, told)
            outlet.tell(order_message(reassignment))


def order_message(reassignment: Reassignment) -> session_pb2.Reassign:
    """What a device is told."""
    new = reassignment.assignment
    return session_pb2.Reassign(
        plan_id=reassignment.plan_id,
        mode=None if new is None else mode_to_message(new.mode),
        power_limit_w=0.0 if new is None else new.power_limit_w,
    )
