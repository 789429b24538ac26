"""Two agents on copies of one disk: one is accepted, and they do not keep ending each other's sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from coordinator.settings import CoordinatorSettings
from edge_agent.session.certificate_keeper import connects_to
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.outbox import Outbox, OutboxFile
from tests.fakes.polling import eventually
from tests.fakes.served import READY, Client, hello_of, serving_client
from wattfleet_identity.channels import Endpoint
from wattfleet_proto.v1 import session_pb2

HELLO = hello_of("orin", installation="a" * 32)


class Agent:
    """A link that counts the coordinator's Welcomes."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.welcomes = 0
        outbox = Outbox(OutboxFile(folder / "outbox.jsonl"))
        self.session = CoordinatorSession(connects_to(Endpoint(client.bound.address)), HELLO, self._welcomed, outbox)

    async def _welcomed(self, welcome: session_pb2.Welcome) -> None:
        self.welcomes += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Agent]:
        running = asyncio.create_task(self.session.run())
        try:
            self.session.report_state(READY)
            assert await self.session.flush(10)
            yield self
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


async def test_the_newer_one_stays_and_the_older_one_is_back_when_it_has_left(
    config: CoordinatorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    def at_once(low: float, high: float) -> float:
        nonlocal tries
        tries += 1
        return 0.02

    monkeypatch.setattr("wattfleet_io.tasks.random.uniform", at_once)

    async with serving_client(config) as client:
        async with Agent(client, tmp_path / "older").running() as older:
            async with Agent(client, tmp_path / "newer").running() as newer:

                async def tried() -> bool:
                    return tries >= 10

                await eventually(tried)
                assert (older.welcomes, newer.welcomes) == (1, 1)
                assert newer.session.connected and not older.session.connected

            async def is_back() -> bool:
                return older.session.connected

            await eventually(is_back)
