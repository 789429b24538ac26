"""Serves apps' trainings as long as the agent runs, and refuses them while the device is being prepared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from edge_agent.runtime.device_trainings import DeviceTrainings
from edge_agent.runtime.peer_credentials import PEER, PeerCredentials
from edge_agent.runtime.socket_errors import BusyError
from edge_agent.serving.duty_service import TooManyAppsError
from wattfleet_io.tasks import run_uncancelled, stop_tasks
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc

_ENDS_WITHIN_S = 1.0
"""Time for the last training of a ready device to deliver its answers, s."""

_MAX_OF_PROCESS = 8
"""Maximum of open trainings per process: one trains, and the others wait for their grant or are refused."""


class AppTrainings(local_pb2_grpc.LocalAgentServiceServicer):
    """The gRPC service for apps; passes their trainings on to the ready device.

    The agent's socket serves it from the agent's start to its end.

    Args:
        device_id: the device's name.
    """

    def __init__(self, device_id: str) -> None:
        self._device_id = device_id
        self._ready: DeviceTrainings | None = None
        self._calls: dict[asyncio.Task[Any], PeerCredentials | None] = {}

    @asynccontextmanager
    async def served_by(self, trainings: DeviceTrainings) -> AsyncIterator[None]:
        """Pass trainings on within this context. At its end, trainings in progress are ended and the device is parked.

        Args:
            trainings: runs the trainings of the ready device.
        """
        self._ready = trainings
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
            BusyError: the device is being prepared, or the agent is stopping.
            TooManyAppsError: the process already has the maximum of open trainings.
        """
        ready, call, peer = self._ready, asyncio.current_task(), PEER.get()
        assert call is not None, "gRPC runs every call in a task"
        if ready is None:
            raise BusyError(f"{self._device_id} is being prepared and cannot train now; try again later")
        if peer is not None and list(self._calls.values()).count(peer) >= _MAX_OF_PROCESS:
            raise TooManyAppsError(f"{peer} has {_MAX_OF_PROCESS} open trainings, the maximum: end one of them first")
        self._calls[call] = peer
        try:
            async with aclosing(ready.answers_to(request_iterator)) as answers:
                async for answer in answers:
                    yield answer
        except asyncio.CancelledError:
            if self._ready is ready:
                raise
            raise BusyError(
                f"{self._device_id} ends the training, since its agent is stopping or preparing it again"
            ) from None
        finally:
            self._calls.pop(call, None)

    async def ShowTraining(  # noqa: N802 - named by the protocol
        self, request: local_pb2.ShowTrainingRequest, context: Any
    ) -> local_pb2.ShowTrainingResponse:
        """Return the training in progress and the process that started it."""
        running = None if self._ready is None else self._ready.running
        if running is None:
            return local_pb2.ShowTrainingResponse()
        training = local_pb2.TrainingNow(plan_id=running.plan_id, running_s=time.monotonic() - running.began_s)
        if running.peer is not None:
            training.uid, training.pid = running.peer.uid, running.peer.pid
        return local_pb2.ShowTrainingResponse(training=training)

    async def GetDevice(  # noqa: N802 - named by the protocol
        self, request: local_pb2.GetDeviceRequest, context: Any
    ) -> local_pb2.GetDeviceResponse:
        """Return the device's name, even while the device is being prepared."""
        return local_pb2.GetDeviceResponse(device_id=self._device_id)

    async def _end_calls(self) -> None:
        if calls := list(self._calls):
            await asyncio.wait(calls, timeout=_ENDS_WITHIN_S)
            await stop_tasks(*calls)
