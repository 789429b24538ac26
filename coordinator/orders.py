"""What connected devices are to be told, on its way to their sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from coordinator.records import Reassignment
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)


class Orders:
    """One queue for each session; a device without a session cannot be told anything."""

    def __init__(self) -> None:
        """No session yet."""
        self._queues: dict[str, asyncio.Queue[session_pb2.Reassign]] = {}

    @contextmanager
    def session(self, device_id: str) -> Iterator[asyncio.Queue[session_pb2.Reassign]]:
        """The queue of a device while its session lasts."""
        queue: asyncio.Queue[session_pb2.Reassign] = asyncio.Queue()
        self._queues[device_id] = queue
        try:
            yield queue
        finally:
            del self._queues[device_id]

    def send(self, reassignments: Sequence[Reassignment]) -> None:
        """Tell devices what they are to go on with."""
        for reassignment in reassignments:
            queue = self._queues.get(reassignment.device_id)
            if queue is None:
                _log.warning("%s has no session and cannot be told that the watts fell", reassignment.device_id)
                continue
            new = reassignment.assignment
            told = "stop" if new is None else f"go on at {new.power_limit_w:.1f} W"
            _log.info("%s: %s", reassignment.device_id, told)
            queue.put_nowait(
                session_pb2.Reassign(
                    plan_id=reassignment.plan_id,
                    mode=None if new is None else mode_to_message(new.mode),
                    power_limit_w=0.0 if new is None else new.power_limit_w,
                )
            )
