"""The trainings of apps during the whole life of an agent: refused while its device is being prepared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from edge_agent.runtime.local_socket import BusyError, LocalAgentServicer
from wattfleet_io.tasks import run_uncancelled, stop_tasks
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc

_ENDS_WITHIN_S = 1.0
"""How long the last training of a ready device has to deliver its answers."""


class AppTrainings(local_pb2_grpc.LocalAgentServiceServicer):
    """Passes trainings on to the servicer of the ready device; the agent's socket serves it from start to end.

    Args:
        device_id: the device's name.
    """

    def __init__(self, device_id: str) -> None:
        self._device_id = device_id
        self._ready: LocalAgentServicer | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def served_by(self, servicer: LocalAgentServicer) -> AsyncIterator[None]:
        """Pass trainings on within this context; at its end, trainings in progress are ended and the device is parked.

        Args:
            servicer: runs the trainings of the ready device.
        """
        self._ready = servicer
        try:
            yield
        finally:
            self._ready = None
            await run_uncancelled(self._end_calls())

    async def Train(  # noqa: N802 - named by the protocol
        self, request_iterator: AsyncIterator[local_pb2.TrainRequest], context: Any
    ) -> AsyncIterator[local_pb2.TrainResponse]:
        """Run one round's training, from its Start to its Finish or until the ClientApp disconnects.

        Raises:
            BusyError: the device is being prepared, or the agent stops.
        """
        ready, call = self._ready, asyncio.current_task()
        assert call is not None, "gRPC runs every call in a task"
        if ready is None:
            raise BusyError(f"{self._device_id} is being prepared and cannot train now; try again later")
        self._calls.add(call)
        try:
            async with aclosing(ready.answers_to(request_iterator)) as answers:
                async for answer in answers:
                    yield answer
        except asyncio.CancelledError:
            if self._ready is ready:
                raise
            raise BusyError(
                f"{self._device_id} ends the training, since its agent stops or prepares it again"
            ) from None
        finally:
            self._calls.discard(call)

    async def _end_calls(self) -> None:
        if calls := list(self._calls):
            await asyncio.wait(calls, timeout=_ENDS_WITHIN_S)
            await stop_tasks(*calls)
