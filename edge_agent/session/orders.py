"""What the coordinator changes of a round in flight, from when it comes until the training of that round ends."""

from __future__ import annotations

import asyncio

from wattfleet_proto.v1 import session_pb2


class Orders:
    """The latest order of the round that is in flight; an order may come before its training begins."""

    def __init__(self) -> None:
        """No order has come."""
        self._latest: session_pb2.Reassign | None = None
        self._came = asyncio.Condition()

    async def came(self, order: session_pb2.Reassign) -> None:
        """The coordinator has sent one; it takes the place of any before."""
        async with self._came:
            self._latest = order
            self._came.notify_all()

    async def next(self, plan_id: str, after: session_pb2.Reassign | None = None) -> session_pb2.Reassign:
        """The latest order for a plan, once there is one other than `after`."""

        def is_new() -> bool:
            return self._latest is not None and self._latest.plan_id == plan_id and self._latest is not after

        async with self._came:
            await self._came.wait_for(is_new)
            assert self._latest is not None, "it was waited for"
            return self._latest
