"""A broken or hostile coordinator: the agent reports what is wrong, and reconnects until it gets a usable answer."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge_agent.session.certificate_keeper import connects_to
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.outbox import Outbox, OutboxFile
from tests.fakes.polling import eventually
from wattfleet_identity.channels import Endpoint
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import session_pb2

HELLO = session_pb2.Hello(device_id="orin-0", board="agx-orin", mode_count=1, installation="a" * 32)
Refusal = tuple[grpc.StatusCode, str]


def welcome(**fields: Any) -> session_pb2.Welcome:
    usable = {"reference_digest": "0" * 64, "profile_modes": 20, "lease_s": 5.0, "protocol": own_version()}
    return session_pb2.Welcome(**{**usable, **fields})


def response(**body: Any) -> session_pb2.SessionResponse:
    return session_pb2.SessionResponse(**body)


class BrokenCoordinator:
    """Answers the Hello with `answers`, which may be bytes, and every later message with an acknowledgement."""

    def __init__(self, *answers: session_pb2.SessionResponse | bytes, refusal: Refusal | None = None) -> None:
        self.answers: tuple[session_pb2.SessionResponse | bytes, ...] = answers
        self.refusal = refusal
        self.hellos = 0
        self.requests: list[session_pb2.SessionRequest] = []

    def mend(self) -> None:
        self.answers, self.refusal = (response(welcome=welcome()),), None

    async def session(self, requests: AsyncIterator[session_pb2.SessionRequest], context: Any) -> AsyncIterator[Any]:
        await anext(requests)
        self.hellos += 1
        if self.refusal:
            await context.abort(*self.refusal)
        for answer in self.answers:
            yield answer
        async for request in requests:
            self.requests.append(request)
            yield response(ack=session_pb2.Ack(sequence=request.sequence))

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(
            self.session,
            session_pb2.SessionRequest.FromString,
            lambda sent: sent if isinstance(sent, bytes) else sent.SerializeToString(),
        )
        service = grpc.method_handlers_generic_handler("wattfleet.v1.SessionService", {"Session": handler})
        server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


class Agent:
    """A session, and the Welcomes that it accepted."""

    def __init__(self, address: str, folder: Path) -> None:
        self.welcomes: list[session_pb2.Welcome] = []
        outbox = Outbox(OutboxFile(folder / "outbox.jsonl"))
        self.session = CoordinatorSession(connects_to(Endpoint(address)), HELLO, self._welcomed, outbox)

    async def _welcomed(self, received: session_pb2.Welcome) -> None:
        self.welcomes.append(received)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        running = asyncio.create_task(self.session.run())
        try:
            yield running
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("wattfleet_io.tasks.random.uniform", lambda low, high: max(low, 0.02))
    caplog.set_level(logging.INFO, logger="edge_agent")


async def comes_back(coordinator: BrokenCoordinator, tmp_path: Path) -> Agent:
    """Let an agent connect to the broken coordinator twice, then repair it; the agent must deliver a report."""
    async with coordinator.served() as address:
        agent = Agent(address, tmp_path)
        async with agent.running() as running:
            await eventually(lambda: coordinator.hellos >= 2 or running.done())
            assert not running.done(), running.exception()
            coordinator.mend()
            agent.session.report_observation(session_pb2.Observation(plan_id="kept", epoch_s=1, power_w=1))
            assert await agent.session.flush(20)
    return agent


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.ALREADY_EXISTS]
)
async def test_a_refused_agent_says_why_and_comes_back(
    code: grpc.StatusCode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await comes_back(BrokenCoordinator(refusal=(code, "give it another id")), tmp_path)
    assert "the coordinator refused this device: give it another id" in caplog.text


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([response(welcome=welcome(lease_s=-1.0))], "lease_s must be finite"),
        ([response(welcome=welcome(lease_s=math.nan))], "lease_s must be finite"),
        ([response(welcome=welcome(lease_s=math.inf))], "lease_s must be finite"),
        ([response(welcome=welcome(lease_s=0.0))], "has no lease_s"),
        ([response(welcome=welcome(reconnect_s=math.nan))], "reconnect_s must be finite"),
        ([response(welcome=welcome(profile_modes=0))], "profile_modes must be 5 to 10,000, not 0"),
        ([response(welcome=welcome(profile_modes=2**32 - 1))], "profile_modes must be 5 to 10,000"),
        ([response(welcome=welcome(reference_digest="../../etc"))], "names no reference"),
        ([response(welcome=welcome(protocol=session_pb2.ProtocolVersion(major=99)))], "update the older"),
        ([b"\xff\xff\xff"], "damaged message"),
        ([response(ack=session_pb2.Ack(sequence=1))], "no Welcome first"),
    ],
)
async def test_an_unusable_welcome_is_refused_and_the_agent_comes_back(
    answers: list[session_pb2.SessionResponse | bytes], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = await comes_back(BrokenCoordinator(*answers), tmp_path)
    assert why in caplog.text
    assert agent.welcomes == [welcome()], "no unusable Welcome reaches the device"


@pytest.mark.parametrize(
    "second",
    [
        response(welcome=welcome()),
        response(ack=session_pb2.Ack(lease_s=-1.0)),
        response(ack=session_pb2.Ack(lease_s=math.nan)),
        response(ack=session_pb2.Ack(reconnect_s=-1.0)),
    ],
)
async def test_an_unusable_answer_in_a_session_ends_only_that_session(
    second: session_pb2.SessionResponse, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await comes_back(BrokenCoordinator(response(welcome=welcome()), second), tmp_path)
    assert "the coordinator cannot be used: " in caplog.text


@pytest.mark.parametrize("lease_s", [1e-9, 1e-300])
async def test_a_short_lease_does_not_make_the_agent_flood_the_coordinator(lease_s: float, tmp_path: Path) -> None:
    coordinator = BrokenCoordinator(response(welcome=welcome(lease_s=lease_s)))
    async with coordinator.served() as address:
        agent = Agent(address, tmp_path)
        async with agent.running():
            await eventually(lambda: agent.session.connected)
            await asyncio.sleep(0.4)
    assert len(coordinator.requests) <= 2


async def test_a_long_reason_with_escapes_is_logged_once_in_one_plain_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "\x1b]0;title\x07 " + "long " * 400
    coordinator = BrokenCoordinator(refusal=(grpc.StatusCode.INVALID_ARGUMENT, reason))
    async with coordinator.served() as address:
        async with Agent(address, tmp_path).running():
            await eventually(lambda: coordinator.hellos >= 10)
    lines = [record.getMessage() for record in caplog.records if "refused this device" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].isprintable() and len(lines[0]) < 1000
