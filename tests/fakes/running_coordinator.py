"""A coordinator process inside the test's event loop, without a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from coordinator.server import BoundAddresses, serve
from coordinator.settings import CoordinatorSettings
from coordinator.store.store import Store
from wattfleet_proto.v1 import (
    planning_pb2,
    planning_pb2_grpc,
)


class Running:
    """A coordinator in this process."""

    def __init__(self, config: CoordinatorSettings) -> None:
        self.stop = asyncio.Event()
        self.bound: asyncio.Future[BoundAddresses] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(serve(config, self.bound.set_result, self.stop))

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        waited: list[asyncio.Future[Any]] = [self.task, self.bound]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            await self.task
        async with grpc.aio.insecure_channel((await self.bound).address) as channel:
            yield channel

    async def end(self) -> None:
        self.stop.set()
        await self.task


async def start_run(channel: grpc.aio.Channel, run_id: str) -> None:
    planning: Any = planning_pb2_grpc.PlanningServiceStub(channel)
    await planning.StartRun(planning_pb2.StartRunRequest(run_id=run_id, strategy="FedAvg", rounds=3))


def runs_of(config: CoordinatorSettings) -> list[str]:
    store = Store(Path(config.store.location))
    runs = [record.run_id for record in store.load().runs]
    store.close()
    return runs
