"""Orders of the coordinator that change a round in flight."""

from __future__ import annotations

import asyncio

from wattfleet_proto.v1 import session_pb2


class Orders:
    """The latest order for the round in flight; it may arrive before the round's training begins."""

    def __init__(self) -> None:
        """Start without an order."""
        self._latest: session_pb2.Reassign | None = None
        self._changed = asyncio.Condition()

    async def receive(self, order: session_pb2.Reassign) -> None:
        """Take an order from the coordinator; it replaces the one before."""
        async with self._changed:
            self._latest = order
            self._changed.notify_all()

    async def next(self, plan_id: str, after: session_pb2.Reassign | None = None) -> session_pb2.Reassign:
        """Wait for the latest order of a plan, other than `after`."""

        def is_new() -> bool:
            return self._latest is not None and self._latest.plan_id == plan_id and self._latest is not after

        async with self._changed:
            await self._changed.wait_for(is_new)
            assert self._latest is not None, "it was waited for"
            return self._latest
