"""Sessions for a device's id from anybody else, and from a second agent on a copy of its disk."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from edge_agent.session.certificate_keeper import connects_to
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.outbox import Outbox, OutboxFile
from tests.fakes.polling import eventually
from tests.fakes.served import (
    READY,
    Agent,
    CertifiedFleet,
    Client,
    calling,
    certified,
    hello_of,
    joined,
    serving,
    serving_client,
)
from wattfleet.common.identity.channels import Endpoint
from wattfleet.common.identity.joining import Applicant
from wattfleet.common.identity.peers import Role
from wattfleet.common.logs import LINES_AT_ONCE, service_handler
from wattfleet_proto.v1 import identity_pb2_grpc, session_pb2

# --- Foreign hellos ---------------------------------------------------------------------------------------------------
# Sessions for a device's id from anybody else: all are refused, and the owner gets its id back.


HELLOS = int(os.environ.get("FOREIGN_HELLOS", "200"))
STRANGERS = 20
"""Hellos with a certificate of another authority: each costs a handshake."""

TAKEN_BACK_WITHIN_S = 5.0
DENIED = grpc.StatusCode.PERMISSION_DENIED


async def refusal(client: Client, hello: session_pb2.Hello) -> tuple[grpc.StatusCode, str]:
    """The error for a Hello."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await Agent(client.sessions).greet(hello)
    return refused.value.code(), refused.value.details() or ""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def lasts(agent: Agent) -> None:
    """Keep a session open by sending leases, and check that each is acknowledged."""
    while True:
        await agent.lease()
        await asyncio.sleep(0.2)


@pytest.mark.timeout(240)
async def test_foreign_hellos_are_refused_and_the_owners_session_goes_on(
    config: CoordinatorSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    settings = certified(config, fleet.authority.folder, plaintext_address="127.0.0.1:0")
    own = {"board": "agx-orin", "installation": "own"}
    written = StringIO()
    handler, log = service_handler(written), logging.getLogger("coordinator")
    async with AsyncExitStack() as opened:
        served = await opened.enter_async_context(serving(settings))
        operator = await opened.enter_async_context(calling(served, fleet.identity(Role.OPERATOR)))
        service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        orin = await joined(service, Role.DEVICE, Applicant("orin", **own))
        other = fleet.identity(Role.DEVICE, "nano", board="orin-nano", installation="other")
        copied = fleet.identity(Role.DEVICE, "orin", board="agx-orin", installation="copy")
        swapped = fleet.identity(Role.DEVICE, "orin", board="orin-nano", installation="own")
        owner = await opened.enter_async_context(calling(served, orin))
        agent = owner.agent()
        hello = hello_of("orin", installation="own")
        await agent.greet(hello)
        lasting = asyncio.create_task(lasts(agent))
        foreign = [
            (await opened.enter_async_context(calling(served, identity, address)), hello, reason)
            for identity, address, reason in (
                (other, None, "the certificate is for the device 'nano', not 'orin'"),
                (copied, None, "the certificate is for the installation 'copy', not 'own'"),
                (swapped, None, "the certificate is for the board 'orin-nano', not 'agx-orin'"),
                (None, served.bound.plaintext_address, "orin has a certificate: its agent must use it"),
            )
        ]
        numbers, reasons, slowest_s = itertools.count(), Counter[str](), 0.0
        log.addHandler(handler)
        before_bytes, begun_s = resident_bytes(), time.monotonic()

        async def intrude(client: Client, hello: session_pb2.Hello, expected: str) -> None:
            nonlocal slowest_s
            while next(numbers) < HELLOS - STRANGERS:
                asked_s = time.monotonic()
                code, reason = await refusal(client, hello)
                slowest_s = max(slowest_s, time.monotonic() - asked_s)
                assert code is DENIED and expected in reason
                reasons[expected] += 1

        await asyncio.gather(*(intrude(*each) for each in foreign for _ in range(4)))
        took_s, grown = time.monotonic() - begun_s, resident_bytes() - before_bytes
        log.removeHandler(handler)
        stranger = CertifiedFleet.create(tmp_path / "another").identity(Role.DEVICE, "orin", **own)
        for _ in range(STRANGERS):
            async with calling(served, stranger) as client:
                assert (await refusal(client, hello))[0] is grpc.StatusCode.UNAVAILABLE
        assert not lasting.done(), "the owner's session is undisturbed"
        await agent_states(operator)
        lasting.cancel()
    assert sum(reasons.values()) == HELLOS - STRANGERS and len(reasons) == len(foreign)
    lines = written.getvalue().splitlines()
    assert len(lines) <= LINES_AT_ONCE + took_s + 2, "the log is limited in rate"
    assert all("is refused" in line for line in lines) and lines
    assert grown < 64 * 2**20
    with capsys.disabled():
        print(
            f"\n{sum(reasons.values())} foreign Hellos refused in {took_s:.1f} s, the slowest in {slowest_s:.2f} s;"
            f" {len(lines)} lines of log, {grown / 2**20:.1f} MiB more memory; {STRANGERS} of another authority"
        )


async def agent_states(operator: Client) -> None:
    """Check that the owner's device is the enrolled one, and that the fleet has no other."""
    devices = await operator.devices()
    assert {name: device.board for name, device in devices.items()} == {"orin": "agx-orin"}


async def test_an_owner_takes_its_id_back_from_an_intruder_of_before(
    config: CoordinatorSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the fleet was moving to TLS, somebody took the id in plaintext, and keeps reconnecting."""
    fleet = CertifiedFleet.create(tmp_path / "authority")
    settings = certified(config, fleet.authority.folder, plaintext_address="127.0.0.1:0")
    async with AsyncExitStack() as opened:
        served = await opened.enter_async_context(serving(settings))
        operator = await opened.enter_async_context(calling(served, fleet.identity(Role.OPERATOR)))
        plaintext = await opened.enter_async_context(calling(served, None, served.bound.plaintext_address))
        intruder = plaintext.agent()
        await intruder.greet(hello_of("orin", installation="intruder"))
        service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        orin = await joined(service, Role.DEVICE, Applicant("orin", "agx-orin", "own"))
        owner = await opened.enter_async_context(calling(served, orin))
        begun_s = time.monotonic()
        agent = owner.agent()
        await agent.greet(hello_of("orin", installation="own"))
        await agent.lease()
        ended: Any = await intruder.call.code()
        took_s = time.monotonic() - begun_s
        assert ended is grpc.StatusCode.ABORTED
        assert took_s < TAKEN_BACK_WITHIN_S
        for installation in ("intruder", "own"):
            code, reason = await refusal(plaintext, hello_of("orin", installation=installation))
            assert code is DENIED and "has a certificate" in reason
        await agent.lease()
        with capsys.disabled():
            print(f"\nthe owner has its id back after {1e3 * took_s:.0f} ms")


# --- Copied disk ------------------------------------------------------------------------------------------------------
# Two agents on copies of one disk: one is accepted, and they do not keep ending each other's sessions.

HELLO = hello_of("orin", installation="a" * 32)


class CountingAgent:
    """A link that counts the coordinator's Welcomes."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.welcomes = 0
        outbox = Outbox(OutboxFile(folder / "outbox.jsonl"))
        self.session = CoordinatorSession(connects_to(Endpoint(client.bound.address)), HELLO, self._welcomed, outbox)

    async def _welcomed(self, welcome: session_pb2.Welcome) -> None:
        self.welcomes += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[CountingAgent]:
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

    monkeypatch.setattr("wattfleet.common.tasks.random.uniform", at_once)

    async with serving_client(config) as client:
        async with CountingAgent(client, tmp_path / "older").running() as older:
            async with CountingAgent(client, tmp_path / "newer").running() as newer:

                async def tried() -> bool:
                    return tries >= 10

                await eventually(tried)
                assert (older.welcomes, newer.welcomes) == (1, 1)
                assert newer.session.connected and not older.session.connected

            async def is_back() -> bool:
                return older.session.connected

            await eventually(is_back)
