"""The agent's session: it repeats unacknowledged reports and the latest state; and broken or hostile coordinators."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge_agent.session.certificate_keeper import connects_to
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.outbox import Outbox, OutboxFile
from edge_agent.settings import ConnectionSettings
from tests.fakes.polling import eventually
from wattfleet.common.identity.channels import Endpoint
from wattfleet_proto.names import MAJOR, MINOR, own_version
from wattfleet_proto.v1 import power_pb2, session_pb2, session_pb2_grpc

# --- Coordinator session ----------------------------------------------------------------------------------------------
# The agent's session: it repeats unacknowledged reports and the latest state.


IMPATIENT = ConnectionSettings(silence_timeout_s=0.2)
HELLO = session_pb2.Hello(device_id="orin-0", board="agx-orin", mode_count=1, installation="a" * 32)


class Coordinator(session_pb2_grpc.SessionServiceServicer):
    """Records messages; disconnects after `patience` reports of a session, having acknowledged all but the last."""

    def __init__(self, patience: int = 1000, lease_s: float = 5.0, ack: session_pb2.Ack | None = None) -> None:
        self.sessions: list[list[session_pb2.SessionRequest]] = []
        self.leases: list[session_pb2.SessionRequest] = []
        self.patience = patience
        self.lease_s = lease_s
        self.ack = ack or session_pb2.Ack()
        self.version = own_version()
        self.mute_sessions = 0
        self.installations: list[str] = []
        self.refusal: tuple[grpc.StatusCode, str] | None = None

    def welcome(self) -> session_pb2.Welcome:
        return session_pb2.Welcome(
            reference_digest="0" * 64, profile_modes=20, lease_s=self.lease_s, protocol=self.version
        )

    async def Session(  # noqa: N802 - named by the protocol
        self, request_iterator: AsyncIterator[session_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[session_pb2.SessionResponse]:
        hello = (await anext(request_iterator)).hello
        assert hello.device_id == HELLO.device_id
        self.installations.append(hello.installation)
        if self.refusal:
            await context.abort(*self.refusal)
        received: list[session_pb2.SessionRequest] = []
        self.sessions.append(received)
        yield session_pb2.SessionResponse(welcome=self.welcome())
        async for request in request_iterator:
            (self.leases if request.HasField("lease") else received).append(request)
            if len(received) >= self.patience:
                self.patience = 1000
                return
            if len(self.sessions) > self.mute_sessions:
                self.ack.sequence = request.sequence
                yield session_pb2.SessionResponse(ack=self.ack)


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(OutboxFile(tmp_path / "outbox.jsonl"))


@asynccontextmanager
async def served(coordinator: Coordinator) -> AsyncIterator[int]:
    server = grpc.aio.server()
    session_pb2_grpc.add_SessionServiceServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@asynccontextmanager
async def session_at(
    port: int, outbox: Outbox, settings: ConnectionSettings = ConnectionSettings()
) -> AsyncIterator[tuple[CoordinatorSession, asyncio.Task[None]]]:
    async def on_welcome(welcome: session_pb2.Welcome) -> None:
        pass

    session = CoordinatorSession(connects_to(Endpoint(f"127.0.0.1:{port}")), HELLO, on_welcome, outbox, settings)
    running = asyncio.create_task(session.run())
    try:
        yield session, running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@asynccontextmanager
async def session_with(
    coordinator: Coordinator, outbox: Outbox, settings: ConnectionSettings = ConnectionSettings()
) -> AsyncIterator[tuple[CoordinatorSession, asyncio.Task[None]]]:
    async with served(coordinator) as port, session_at(port, outbox, settings) as both:
        yield both


class Proxy:
    """Forwards bytes between agents and a coordinator; the first connections fall silent, or all are closed at once."""

    def __init__(self, behind: int | None) -> None:
        self.behind = behind
        self.connections = 0
        self.silent = 0
        self._handlers: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for handler in self._handlers:
                handler.cancel()
            await asyncio.gather(*self._handlers, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        this = asyncio.current_task()
        assert this is not None
        self._handlers.add(this)
        with closing(writer):
            if self.behind is not None:
                inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.behind)
                with closing(inner_writer):
                    number = self.connections
                    await asyncio.gather(
                        self._passed(number, reader, inner_writer), self._passed(number, inner_reader, writer)
                    )

    async def _passed(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while some := await reader.read(4096):
            if number > self.silent:
                writer.write(some)
        writer.close()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), 30)

    asyncio.run(bounded())


def state(detail: str) -> session_pb2.StateReport:
    return session_pb2.StateReport(state=session_pb2.DEVICE_STATE_READY, detail=detail)


def test_reports_arrive_in_order_and_are_acknowledged(outbox: Outbox) -> None:
    async def body() -> None:
        coordinator = Coordinator()
        async with session_with(coordinator, outbox) as (session, _):
            for k in range(5):
                session.report_observation(session_pb2.Observation(plan_id=str(k)))
            assert await session.flush(10)
            assert [request.observation.plan_id for request in coordinator.sessions[0]] == list("01234")

    run(body)


def test_a_counted_training_stopped_before_it_began_is_reported_with_0_joules(outbox: Outbox) -> None:
    async def body() -> None:
        coordinator = Coordinator()
        async with session_with(coordinator, outbox) as (session, _):
            await eventually(lambda: session.connected)
            mode = power_pb2.PowerMode(cores=6, cpu_khz=1_510_400, gpu_hz=624_750_000, mem_hz=2_133_000_000)
            grant = session_pb2.Grant(id=1, plan_id="7/1", mode=mode, power_limit_w=25.0, longest_s=60.0)
            grant.counts_energy = True
            session.grants.greeting()
            await session.grants.welcomed(120.0)
            await session.grants.receive(grant)
            assert not coordinator.sessions[0]
            await session.grants.receive(session_pb2.Grant(id=2, plan_id="7/1"))
            assert await session.flush(10)
            assert [request.energy for request in coordinator.sessions[0]] == [
                session_pb2.TrainingEnergy(plan_id="7/1")
            ]

    run(body)


def test_unacknowledged_reports_and_the_latest_state_are_sent_again(outbox: Outbox) -> None:
    async def body() -> None:
        coordinator = Coordinator(patience=3)
        async with session_with(coordinator, outbox) as (session, _):
            session.report_front(session_pb2.FrontReport(idle_w=7))
            session.report_state(state("first"))
            session.report_observation(session_pb2.Observation(plan_id="lost"))
            await eventually(lambda: len(coordinator.sessions) == 2)
            session.report_state(state("second"))
            assert await session.flush(10)
            again = coordinator.sessions[1]
            assert "lost" in {r.observation.plan_id for r in again}
            assert [r.front.idle_w for r in again if r.HasField("front")] == [7]
            assert [r.state.detail for r in again if r.HasField("state")][-1] == "second"

    run(body)


def test_only_the_latest_state_waits_for_an_absent_coordinator(outbox: Outbox) -> None:
    async def body() -> None:
        coordinator = Coordinator()
        coordinator.refusal = (grpc.StatusCode.UNAVAILABLE, "starting")
        async with session_with(coordinator, outbox) as (session, _):
            for k in range(100):
                session.report_state(state(str(k)))
            assert not await session.flush(0.1)
            coordinator.refusal = None
            assert await session.flush(20)
            assert [r.state.detail for r in coordinator.sessions[0]] == ["99"]

    run(body)


def test_leases_are_sent_while_there_is_nothing_to_report(outbox: Outbox) -> None:
    async def body() -> None:
        coordinator = Coordinator(lease_s=0.1)
        async with session_with(coordinator, outbox):
            await eventually(lambda: len(coordinator.leases) >= 3)
            assert [lease.lease.number for lease in coordinator.leases[:3]] == [1, 2, 3]
            assert coordinator.sessions == [[]]

    run(body)


def test_the_agent_reconnects_to_a_silent_coordinator(outbox: Outbox) -> None:
    async def body() -> None:
        coordinator = Coordinator(patience=10**9, lease_s=0.05)
        async with session_with(coordinator, outbox, IMPATIENT) as (session, _):
            await eventually(lambda: session.connected)
            coordinator.mute_sessions = 1
            session.report_observation(session_pb2.Observation(plan_id="unheard"))
            await eventually(lambda: len(coordinator.sessions) > 1)
            assert await session.flush(20)
            assert "unheard" in {request.observation.plan_id for request in coordinator.sessions[-1]}

    run(body)


def test_a_dead_connection_is_replaced_by_a_new_one(outbox: Outbox) -> None:
    async def body() -> None:
        coordinator = Coordinator(lease_s=0.05)
        async with served(coordinator) as port:
            proxy = Proxy(port)
            async with proxy.listening() as front, session_at(front, outbox, IMPATIENT) as (session, _):
                await eventually(lambda: session.connected)
                proxy.silent = 1
                session.report_observation(session_pb2.Observation(plan_id="unheard"))
                assert await session.flush(20)
                assert proxy.connections == 2

    run(body)


def test_reconnecting_follows_the_agents_backoff_and_not_grpcs(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattfleet.common.tasks.random.uniform", lambda low, high: 0.01)

    async def body() -> None:
        proxy = Proxy(None)
        async with proxy.listening() as front, session_at(front, outbox):
            # gRPC's own backoff would have reached minutes by now.
            await eventually(lambda: proxy.connections >= 30)

    run(body)


def test_of_two_agents_from_a_copied_disk_the_older_yields(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []

    def noted(low: float, high: float) -> float:
        pauses.append(high)
        return 0.01

    async def body() -> None:
        coordinator = Coordinator()
        coordinator.refusal = (grpc.StatusCode.ABORTED, "a newer session of the same device has begun")
        monkeypatch.setattr("wattfleet.common.tasks.random.uniform", noted)
        async with session_with(coordinator, outbox) as (session, _):
            await eventually(lambda: len(coordinator.installations) == 1)
            coordinator.refusal = (grpc.StatusCode.ALREADY_EXISTS, "orin-0 is connected already")
            await eventually(lambda: len(coordinator.installations) >= 4)
            coordinator.refusal = None
            session.report_state(state("the other has left"))
            assert await session.flush(20)
            # Sending its installation again would end the other agent's session.
            first, *later = coordinator.installations
            assert first == HELLO.installation and set(later) == {""}

    run(body)
    assert min(pauses[:4]) == 60.0
    assert "a newer session of the same device has begun. This agent waits" in caplog.text


def test_an_own_hello_that_arrives_late_is_no_other_agent(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        coordinator = Coordinator()
        coordinator.refusal = (grpc.StatusCode.ABORTED, "replaced by a newer session of the same device")
        async with served(coordinator) as port:
            proxy = Proxy(port)
            proxy.silent = 1  # nobody answers the first Hello
            monkeypatch.setattr("edge_agent.session.coordinator_session.WELCOME_TIMEOUT_S", 0.3)
            async with proxy.listening() as front, session_at(front, outbox):
                await eventually(lambda: "reached the coordinator late" in caplog.text or "This agent" in caplog.text)
                coordinator.refusal = None
                before = len(coordinator.installations)
                await eventually(lambda: len(coordinator.installations) > before)
                assert coordinator.installations[-1] == HELLO.installation
                assert "This agent waits" not in caplog.text

    run(body)


def test_reports_of_an_earlier_process_arrive_before_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "outbox.jsonl"
    seen = session_pb2.Observation(plan_id="while it was away", epoch_s=10, power_w=12)
    Outbox(OutboxFile(path)).add(session_pb2.SessionRequest(observation=seen))

    async def body() -> None:
        coordinator = Coordinator()
        async with session_with(coordinator, Outbox(OutboxFile(path))) as (session, _):
            session.report_observation(session_pb2.Observation(plan_id="new", epoch_s=10, power_w=12))
            assert await session.flush(10)
            assert [r.observation.plan_id for r in coordinator.sessions[0]] == ["while it was away", "new"]
            assert session.connected

    run(body)
    assert path.read_bytes() == b""


def test_an_acknowledgement_can_change_the_lease(outbox: Outbox) -> None:
    async def body() -> None:
        coordinator = Coordinator(lease_s=60.0, ack=session_pb2.Ack(lease_s=0.05))
        async with session_with(coordinator, outbox) as (session, _):
            await eventually(lambda: session.connected)
            session.report_state(state("a report, so that there is an acknowledgement"))
            await eventually(lambda: len(coordinator.leases) >= 3)

    run(body)


def test_reconnects_are_spread_over_the_time_that_the_coordinator_names(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[float] = []

    def noted(low: float, high: float) -> float:
        spans.append(high)
        return 0.0

    async def body() -> None:
        coordinator = Coordinator(patience=2, ack=session_pb2.Ack(reconnect_s=77.0))
        async with session_with(coordinator, outbox) as (session, _):
            await eventually(lambda: session.connected)
            monkeypatch.setattr("edge_agent.session.coordinator_session.random.uniform", noted)
            for _ in range(2):
                session.report_observation(session_pb2.Observation(plan_id="one"))
            await eventually(lambda: len(coordinator.sessions) == 2)

    run(body)
    assert 77.0 in spans


def test_unknown_answers_of_a_newer_coordinator_are_ignored(outbox: Outbox) -> None:
    class Newer(Coordinator):
        async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
            async for response in super().Session(request_iterator, context):
                yield session_pb2.SessionResponse.FromString(b"\xa2\x06\x02\x08\x01")  # a field 100
                yield response

    async def body() -> None:
        coordinator = Newer()
        coordinator.version = session_pb2.ProtocolVersion(major=MAJOR, minor=MINOR + 99)
        async with session_with(coordinator, outbox) as (session, _):
            session.report_state(state("understood"))
            assert await session.flush(10)
            assert len(coordinator.sessions) == 1

    run(body)


# --- Refused reports --------------------------------------------------------------------------------------------------
# A report that the coordinator refuses while the session lasts.


def test_a_refused_report_is_logged_once_and_the_session_lasts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        coordinator = Coordinator(ack=session_pb2.Ack(refusal="999 W as its idle power"))
        async with session_with(coordinator, Outbox(OutboxFile(tmp_path / "outbox.jsonl"))) as (session, _):
            for detail in ("first", "second"):
                session.report_state(state(detail))
                assert await session.flush(10)
            assert session.connected

    run(body)
    assert caplog.text.count("the coordinator refused a report: 999 W as its idle power") == 1


# --- Broken coordinator -----------------------------------------------------------------------------------------------
# A broken or hostile coordinator: the agent reports what is wrong, and reconnects until it gets a usable answer.

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


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("wattfleet.common.tasks.random.uniform", lambda low, high: max(low, 0.02))
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


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.ALREADY_EXISTS]
)
async def test_a_refused_agent_says_why_and_comes_back(
    code: grpc.StatusCode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await comes_back(BrokenCoordinator(refusal=(code, "give it another id")), tmp_path)
    assert "the coordinator refused this device: give it another id" in caplog.text


@pytest.mark.usefixtures("short_pauses")
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


@pytest.mark.usefixtures("short_pauses")
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


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("lease_s", [1e-9, 1e-300])
async def test_a_short_lease_does_not_make_the_agent_flood_the_coordinator(lease_s: float, tmp_path: Path) -> None:
    coordinator = BrokenCoordinator(response(welcome=welcome(lease_s=lease_s)))
    async with coordinator.served() as address:
        agent = Agent(address, tmp_path)
        async with agent.running():
            await eventually(lambda: agent.session.connected)
            await asyncio.sleep(0.4)
    assert len(coordinator.requests) <= 2


@pytest.mark.usefixtures("short_pauses")
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
