"""The coordinator process over real gRPC on loopback: sessions, references, plans, and its start and end."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import socketserver
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partialmethod
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator import server as coordinator_server
from coordinator import service
from coordinator.records import DeviceState
from coordinator.server import BoundAddresses, CoordinatorConfig, serve
from coordinator.site_file import SiteFile
from coordinator.store.store import Store
from tests.coordinator.small_fleet import NANO_FRONT, NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN
from tests.fronts import front
from wattfleet.artefact import Artefact, pack, restore, write_directory
from wattfleet.boards import board
from wattfleet.budgets import InForce
from wattfleet.errors import CorruptReferenceError, InvalidInputError
from wattfleet.front import Front
from wattfleet.physics import PowerParameters, TimeParameters, power_mw, step_time_ms
from wattfleet.planning.policies.fastest_k import Everyone, FastestK
from wattfleet.profile import Profile
from wattfleet.roofline import RooflinePredictor
from wattfleet.workload import Workload
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.v1 import (
    planning_pb2,
    planning_pb2_grpc,
    power_pb2,
    session_pb2,
    session_pb2_grpc,
    view_pb2,
    view_pb2_grpc,
)

_WITHIN_S = 20.0
READY = session_pb2.StateReport(state=session_pb2.DEVICE_STATE_READY, profiled_modes=50, detail="parked")


@pytest.fixture(scope="module")
def artefact() -> Artefact:
    """A predictor fitted to thirty modes of a board whose physics is known."""
    time = TimeParameters(80, 20, 20, 30, 10, 50, 1, 4, 1, 0.12, 1, 1, 4)
    power = PowerParameters(9_000, 50, 400, 2_000, 8_000, 500, 300, 3_000, 700, 1, 1, 1, 0.5)
    space = board("agx-orin").space.array()
    modes = space[np.random.default_rng(1).choice(len(space), 30, replace=False)]
    fitted = RooflinePredictor.fit(Profile(modes, step_time_ms(time, modes), power_mw(power, time, modes)))
    return pack(fitted, Workload("resnet18-imagenet", 16, 3125), "agx-orin", {"made": "for tests"}, {})


@pytest.fixture
def config(tmp_path: Path, artefact: Artefact) -> CoordinatorConfig:
    write_directory(artefact, tmp_path / "small-reference")
    return CoordinatorConfig(
        address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        store=tmp_path / "coordinator.db",
        reference=str(tmp_path / "small-reference"),
        site=SiteFile.of_site(100.0),
        policy=Everyone(),
        profile_modes=20,
    )


@pytest.fixture(autouse=True)
def quick_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test needs the time that open sessions are given, or that an HTTP server takes to look up from its work."""
    monkeypatch.setattr(coordinator_server, "_STOP_GRACE_S", 0.05)
    monkeypatch.setattr(
        socketserver.BaseServer, "serve_forever", partialmethod(socketserver.BaseServer.serve_forever, 0.01)
    )


class Agent:
    """A device's side of a session, message by message."""

    def __init__(self, sessions: Any) -> None:
        self.call = sessions.Session()
        self._sequence = 100

    async def hello(self, device_id: str, kind: str = "agx-orin", evidence: Any = power_pb2.EVIDENCE_SIMULATED) -> Any:
        hello = session_pb2.Hello(device_id=device_id, board=kind, evidence=evidence, mode_count=7)
        await self.call.write(session_pb2.SessionRequest(hello=hello))
        response = await self.call.read()
        if response is grpc.aio.EOF:
            await self.refused()
        return response.welcome

    async def send(self, **body: Any) -> None:
        """Send a message and see it acknowledged."""
        self._sequence += 7
        await self.call.write(session_pb2.SessionRequest(sequence=self._sequence, **body))
        response = await self.call.read()
        if response is grpc.aio.EOF:
            await self.refused()
        assert response == session_pb2.SessionResponse(ack=session_pb2.Ack(sequence=self._sequence))

    async def refused(self) -> None:
        raise grpc.aio.AioRpcError(await self.call.code(), None, None, await self.call.details())  # type: ignore

    async def become_ready(self, device_id: str, device_front: Front, idle_w: float) -> None:
        await self.hello(device_id)
        await self.send(front=session_pb2.FrontReport(front=front_to_message(device_front), idle_w=idle_w))
        await self.send(state=READY)

    async def goodbye(self) -> None:
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF


@dataclass
class Client:
    """Everything that talks to a coordinator."""

    bound: BoundAddresses
    channel: grpc.aio.Channel
    stop: asyncio.Event
    running: asyncio.Task[None]

    @property
    def sessions(self) -> Any:
        return session_pb2_grpc.SessionServiceStub(self.channel)

    @property
    def planning(self) -> Any:
        return planning_pb2_grpc.PlanningServiceStub(self.channel)

    @property
    def view(self) -> Any:
        return view_pb2_grpc.ViewServiceStub(self.channel)

    def agent(self) -> Agent:
        return Agent(self.sessions)

    async def devices(self) -> dict[str, view_pb2.DeviceView]:
        fleet = await self.view.GetFleet(view_pb2.GetFleetRequest())
        return {device.device_id: device for device in fleet.devices}

    async def states(self) -> dict[str, str]:
        return {
            device_id: session_pb2.DeviceState.Name(device.state).removeprefix("DEVICE_STATE_").lower()
            for device_id, device in (await self.devices()).items()
        }

    async def two_ready(self) -> tuple[Agent, Agent]:
        """The Orin and the Nano, ready and tied to their nodes, and a run that has begun."""
        orin, nano = self.agent(), self.agent()
        await orin.become_ready("orin", ORIN_FRONT, 5.0)
        await nano.become_ready("nano", NANO_FRONT, 3.0)
        bindings = [
            planning_pb2.NodeBinding(node_id=ORIN_NODE, device_id="orin"),
            planning_pb2.NodeBinding(node_id=NANO_NODE, device_id="nano"),
        ]
        await self.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
        await self.planning.StartRun(planning_pb2.StartRunRequest(run_id=RUN, strategy="FedAvg", rounds=3))
        return orin, nano

    async def plan(self, number: int = 1, run_id: str = RUN) -> planning_pb2.PlanRoundResponse:
        request = planning_pb2.PlanRoundRequest(run_id=run_id, round=number, node_ids=NODES, epochs=1.0)
        return await self.planning.PlanRound(request)

    async def rounds(self, run_id: str = "") -> view_pb2.ListRoundsResponse:
        return await self.view.ListRounds(view_pb2.ListRoundsRequest(run_id=run_id))


@asynccontextmanager
async def serving(config: CoordinatorConfig) -> AsyncIterator[Client]:
    """A coordinator from its start to a clean stop."""
    stop = asyncio.Event()
    bound: asyncio.Future[BoundAddresses] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(config, bound.set_result, stop))
    await asyncio.wait([running, bound], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        await running
    try:
        async with grpc.aio.insecure_channel((await bound).address) as channel:
            yield Client(await bound, channel, stop, running)
    finally:
        stop.set()
        await running


def with_coordinator(config: CoordinatorConfig, story: Callable[[Client], Awaitable[None]]) -> None:
    async def told() -> None:
        async with asyncio.timeout(_WITHIN_S), serving(config) as client:
            await story(client)

    asyncio.run(told())


def status(refused: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> tuple[grpc.StatusCode, str]:
    return refused.value.code(), refused.value.details() or ""


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what the coordinator does by itself; the test's own time limit ends it."""
    while not await condition():
        await asyncio.sleep(0.01)


# --- sessions -----------------------------------------------------------------------------------------------------


def test_a_session_from_hello_to_goodbye(config: CoordinatorConfig, artefact: Artefact) -> None:
    async def story(client: Client) -> None:
        agent = client.agent()
        welcome = await agent.hello("orin")
        assert welcome == session_pb2.Welcome(
            reference_digest=artefact.digest,
            profile_modes=20,
            lease_s=service.LEASE_S,
        )
        assert (await client.devices())["orin"] == view_pb2.DeviceView(
            device_id="orin",
            board="agx-orin",
            evidence=power_pb2.EVIDENCE_SIMULATED,
            state=session_pb2.DEVICE_STATE_ENROLLED,
            mode_count=7,
        )
        profiling = session_pb2.StateReport(state=session_pb2.DEVICE_STATE_PROFILING, profiled_modes=3, detail="12c")
        await agent.send(state=profiling)
        await agent.send(lease=session_pb2.Lease())
        seen = (await client.devices())["orin"]
        assert (seen.state, seen.profiled_modes, seen.detail) == (session_pb2.DEVICE_STATE_PROFILING, 3, "12c")
        assert not seen.HasField("idle_w") and not seen.HasField("front"), "unknown is not zero"

        report = session_pb2.FrontReport(
            front=front_to_message(ORIN_FRONT), idle_w=5.0, profiled_modes=20, reference_digest=welcome.reference_digest
        )
        await agent.send(front=report)
        await agent.send(state=READY)
        seen = (await client.devices())["orin"]
        assert (seen.front, seen.idle_w, seen.reference_digest) == (report.front, 5.0, welcome.reference_digest)
        assert await client.states() == {"orin": "ready"}
        await agent.goodbye()
        assert await client.states() == {"orin": "offline"}

    with_coordinator(config, story)


def test_a_second_session_of_the_same_id_is_refused_and_the_first_goes_on(config: CoordinatorConfig) -> None:
    async def story(client: Client) -> None:
        first, second = client.agent(), client.agent()
        await first.become_ready("orin", ORIN_FRONT, 5.0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await second.hello("orin")
        assert status(refused) == (
            grpc.StatusCode.ALREADY_EXISTS,
            "orin is connected already: give each device an id of its own",
        )
        await first.send(lease=session_pb2.Lease())
        assert await client.states() == {"orin": "ready"}
        await first.goodbye()
        third = client.agent()
        await third.hello("orin")
        await third.goodbye()

    with_coordinator(config, story)


def test_an_agent_that_falls_silent_goes_offline_and_one_that_speaks_does_not(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LEASE_S", 0.2)

    async def story(client: Client) -> None:
        silent, talker = client.agent(), client.agent()
        assert (await silent.hello("silent")).lease_s == 0.2
        await talker.hello("talker")
        end = asyncio.ensure_future(silent.call.read())
        while not end.done():
            await talker.send(lease=session_pb2.Lease())
            await asyncio.wait([end], timeout=0.05)
        assert await end is grpc.aio.EOF
        assert await client.states() == {"silent": "offline", "talker": "enrolled"}
        await talker.goodbye()

    with_coordinator(config, story)


def test_an_agent_whose_connection_breaks_goes_offline(config: CoordinatorConfig) -> None:
    async def story(client: Client) -> None:
        async with grpc.aio.insecure_channel(client.bound.address) as own:
            await Agent(session_pb2_grpc.SessionServiceStub(own)).become_ready("orin", ORIN_FRONT, 5.0)
            assert await client.states() == {"orin": "ready"}

        async def offline() -> bool:
            return await client.states() == {"orin": "offline"}

        await until(offline)

    with_coordinator(config, story)


def test_a_session_in_which_nothing_is_said_never_begins(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "LEASE_S", 0.1)

    async def story(client: Client) -> None:
        mute, gone = client.agent(), client.agent()
        await gone.call.done_writing()
        for agent in (mute, gone):
            assert await agent.call.read() is grpc.aio.EOF
            assert await agent.call.code() is grpc.StatusCode.OK
        assert await client.states() == {}

    with_coordinator(config, story)
    assert not caplog.records, "nothing failed"


def test_what_an_agent_may_not_say_ends_its_session_and_nobody_elses(config: CoordinatorConfig) -> None:
    bad_front = front_to_message(ORIN_FRONT)
    bad_front.points[1].epoch_s = 5.0  # quicker than the point before, and thriftier
    good_front = front_to_message(ORIN_FRONT)
    refusals: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
        ({"front": session_pb2.FrontReport(front=bad_front, idle_w=5.0)}, INVALID, "times must rise"),
        ({"front": session_pb2.FrontReport(idle_w=5.0)}, INVALID, "1 to 64 points, not 0"),
        ({"front": session_pb2.FrontReport(front=good_front, idle_w=float("nan"))}, INVALID, "orin: idle watts"),
        ({"state": session_pb2.StateReport()}, INVALID, "no state that a device can report"),
        (
            {"state": session_pb2.StateReport(state=session_pb2.DEVICE_STATE_OFFLINE)},
            INVALID,
            "no state that a device can report",
        ),
        ({"hello": session_pb2.Hello(device_id="orin")}, INVALID, "goes on with reports and leases, not with hello"),
        ({}, INVALID, "goes on with reports and leases"),
    ]

    async def story(client: Client) -> None:
        other = client.agent()
        await other.become_ready("other", NANO_FRONT, 3.0)
        first = client.agent()
        await first.become_ready("orin", ORIN_FRONT, 5.0)
        await first.goodbye()
        for body, code, reason in refusals:
            agent = client.agent()
            await agent.hello("orin")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await agent.send(**body)
            assert status(refused)[0] is code, body
            assert reason in status(refused)[1]
            await other.send(lease=session_pb2.Lease())
            assert await client.states() == {"orin": "offline", "other": "ready"}
            kept = (await client.devices())["orin"]
            assert (kept.front, kept.idle_w) == (good_front, 5.0), "nothing of it was taken"
        await other.goodbye()

    with_coordinator(config, story)


INVALID = grpc.StatusCode.INVALID_ARGUMENT


def test_an_observation_of_a_round_that_is_forgotten_is_let_go(config: CoordinatorConfig) -> None:
    async def story(client: Client) -> None:
        agent = client.agent()
        await agent.become_ready("orin", ORIN_FRONT, 5.0)
        await agent.send(observation=session_pb2.Observation(plan_id="9/9", epoch_s=1.0, power_w=1.0))
        assert await client.states() == {"orin": "ready"}, "it was acknowledged, the session goes on"
        await agent.goodbye()

    with_coordinator(config, story)


def test_a_hello_has_to_say_who_and_what(config: CoordinatorConfig) -> None:
    async def story(client: Client) -> None:
        for arguments, reason in (
            (("", "agx-orin"), "needs an id"),
            (("orin", ""), "needs an id, a kind of board"),
            (("orin", "agx-orin", power_pb2.EVIDENCE_UNSPECIFIED), "has to say what its figures rest on"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.agent().hello(*arguments)
            assert status(refused)[0] is INVALID
            assert reason in status(refused)[1]
        assert await client.states() == {}

    with_coordinator(config, story)


# --- references ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [None, 1_000])
def test_the_reference_arrives_whole(
    config: CoordinatorConfig, artefact: Artefact, chunk_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk_bytes:
        monkeypatch.setattr(service, "_CHUNK_BYTES", chunk_bytes)

    async def story(client: Client) -> None:
        digest = (await client.agent().hello("orin")).reference_digest
        parts = [part async for part in client.sessions.FetchReference(fetch(digest))]
        manifest, weights = parts[0].manifest, b"".join(part.weights_chunk for part in parts)
        assert hashlib.sha256(manifest).hexdigest() == digest == artefact.digest
        assert weights == artefact.weights
        assert not any(part.manifest for part in parts[1:])
        if chunk_bytes:
            assert max(len(part.weights_chunk) for part in parts) == chunk_bytes
            assert len(parts) > 5
        modes = board("orin-nano").space.array()
        arrived = restore(Artefact(manifest, weights)).predict(modes)
        assert np.array_equal(arrived.minibatch_ms, restore(artefact).predict(modes).minibatch_ms)

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in client.sessions.FetchReference(fetch("0" * 64)):
                pass
        assert status(refused)[0] is grpc.StatusCode.NOT_FOUND
        assert "0" * 64 in status(refused)[1]

    with_coordinator(config, story)


def fetch(digest: str) -> session_pb2.FetchReferenceRequest:
    return session_pb2.FetchReferenceRequest(digest=digest)


# --- rounds -------------------------------------------------------------------------------------------------------


def test_a_round_from_its_plan_to_its_report(config: CoordinatorConfig) -> None:
    async def story(client: Client) -> None:
        assert await client.rounds() == view_pb2.ListRoundsResponse(), "no run ever started"
        orin, nano = await client.two_ready()
        resolved = await client.planning.ResolveNodes(planning_pb2.ResolveNodesRequest(node_ids=[NANO_NODE, 5]))
        assert [(node.node_id, node.device_id) for node in resolved.bindings] == [(NANO_NODE, "nano")]
        assert resolved.unknown_node_ids == [5]

        plan = await client.plan()
        assert {part.device_id: part.node_id for part in plan.assignments} == {"orin": ORIN_NODE, "nano": NANO_NODE}
        assert (plan.duration_s, plan.planned_w, plan.site_budget_w) == (35, 45, 100)
        [shown] = (await client.rounds()).rounds
        assert (shown.plan, shown.round, shown.run_id) == (plan, 1, RUN)
        assert not shown.HasField("wall_s") and not shown.HasField("observed_site_w"), "unknown is not zero"

        for agent, seconds, watts in ((orin, 20.5, 31.0), (nano, 36.0, 14.5)):
            observation = session_pb2.Observation(plan_id=plan.plan_id, epoch_s=seconds, power_w=watts)
            await agent.send(observation=observation)
            await agent.send(observation=observation)  # an agent repeats what it saw no ack for
        await client.planning.ReportMetrics(metrics(0, accuracy=0.1))
        await client.planning.ReportMetrics(metrics(1, accuracy=0.5))
        results = [
            planning_pb2.DeviceResult(device_id="orin", num_examples=96.0, share=0.5),
            planning_pb2.DeviceResult(device_id="nano", failure="the node is gone"),
        ]
        finish = planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, results=results, wall_s=3.5)
        await client.planning.FinishRound(finish)
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN, error="stopped by hand"))

        listed = await client.rounds()
        assert (listed.run_id, listed.finished, listed.error) == (RUN, True, "stopped by hand")
        assert dict(listed.initial_metrics) == {"accuracy": 0.1}
        [shown] = listed.rounds
        assert {seen.device_id: (seen.epoch_s, seen.power_w) for seen in shown.observations} == {
            "orin": (20.5, 31.0),
            "nano": (36.0, 14.5),
        }
        assert (shown.observed_site_w, shown.observed_duration_s, shown.wall_s) == (45.5, 36, 3.5)
        assert (list(shown.failed_device_ids), dict(shown.metrics)) == (["nano"], {"accuracy": 0.5})

        with urllib.request.urlopen(f"http://{client.bound.metrics_address}/metrics", timeout=10) as response:
            assert 'wattfleet_site_power_watts{kind="observed"} 45.5' in response.read().decode()

    with_coordinator(config, story)


def metrics(number: int, **values: float) -> planning_pb2.ReportMetricsRequest:
    return planning_pb2.ReportMetricsRequest(run_id=RUN, round=number, metrics=values)


def test_devices_of_a_round_in_flight_are_told_that_the_watts_fell(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.budget_watch._LOOK_EVERY_S", 0.01)
    sky = Sky()

    async def story(client: Client) -> None:
        orin, nano = await client.two_ready()
        plan = await client.plan()
        sky.watts = 20.0
        # The Nano's 15 W are carried still, beside the Orin's 5 W of idling.
        order = (await orin.call.read()).reassign
        assert (order.plan_id, order.HasField("mode")) == (plan.plan_id, False)
        [shown] = (await client.rounds()).rounds
        assert [part.device_id for part in shown.plan.assignments] == ["nano"]
        assert shown.plan.planned_w <= 20
        sky.watts = 17.0
        order = (await nano.call.read()).reassign
        assert order.power_limit_w == 10.0
        assert order.mode == front_to_message(NANO_FRONT).points[1].mode
        await nano.send(state=READY)

    with_coordinator(replace(config, site=replace(config.site, budgets={"site": sky})), story)


@dataclass
class Sky:
    """A budget that somebody changes."""

    watts: float = 100.0

    def in_force(self, now: datetime) -> InForce:
        return InForce(self.watts, "schedule", False, "the sky")


def test_why_there_is_no_plan_is_told(config: CoordinatorConfig) -> None:
    async def story(client: Client) -> None:
        async def refusal(run_id: str = RUN) -> tuple[grpc.StatusCode, str]:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.plan(run_id=run_id)
            return status(refused)

        assert await refusal() == (grpc.StatusCode.NOT_FOUND, f"run '{RUN}' never started")
        orin, nano = await client.two_ready()
        code, reason = await refusal()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert reason == "12 W cannot carry one training device beside 8.0 W of idling: allow at least 15.0 W"
        await orin.goodbye()
        await nano.goodbye()
        code, reason = await refusal()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert reason == "no device is ready to train: orin is offline, nano is offline"

    with_coordinator(replace(config, site=SiteFile.of_site(12.0)), story)


def test_a_restart_on_the_same_store_keeps_devices_nodes_and_rounds(config: CoordinatorConfig) -> None:
    before: dict[str, Any] = {}

    async def first(client: Client) -> None:
        orin, _ = await client.two_ready()
        plan = await client.plan()
        await orin.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=20.0, power_w=31.0))
        await client.planning.ReportMetrics(metrics(1, accuracy=0.5))
        await client.plan(2)
        before["plan"], before["rounds"] = plan, await client.rounds()

    async def second(client: Client) -> None:
        assert await client.rounds() == before["rounds"]
        assert await client.states() == {"nano": "offline", "orin": "offline"}
        assert await client.plan(1) == before["plan"], "a plan that was asked for stays"
        resolved = await client.planning.ResolveNodes(planning_pb2.ResolveNodesRequest(node_ids=NODES))
        assert not resolved.unknown_node_ids
        agent = client.agent()
        await agent.hello("orin")
        await agent.send(state=READY)
        after = await client.plan(3)
        assert [(part.node_id, part.device_id) for part in after.assignments] == [(ORIN_NODE, "orin")]
        assert [listed.round for listed in (await client.rounds()).rounds] == [1, 2, 3]

    with_coordinator(config, first)
    with_coordinator(config, second)


# --- start and stop -----------------------------------------------------------------------------------------------


def test_it_is_healthy_while_it_serves_and_gives_its_ports_back(config: CoordinatorConfig) -> None:
    bound: list[BoundAddresses] = []

    async def story(client: Client) -> None:
        health = health_pb2_grpc.HealthStub(client.channel)
        assert await health.Check(health_pb2.HealthCheckRequest()) == health_pb2.HealthCheckResponse(status="SERVING")
        fleet = await client.view.GetFleet(view_pb2.GetFleetRequest())
        assert (fleet.site_budget_w, fleet.policy, len(fleet.devices)) == (100.0, "fastest-k", 0)
        bound.append(client.bound)

    with_coordinator(replace(config, policy=FastestK(2)), story)
    addresses = {"address": bound[0].address, "metrics_address": bound[0].metrics_address}
    with_coordinator(replace(config, policy=FastestK(2), **addresses), story)
    assert bound[1] == bound[0]


def test_a_session_that_is_open_at_the_end_is_closed_and_stored(config: CoordinatorConfig) -> None:
    async def story(client: Client) -> None:
        agent = client.agent()
        await agent.become_ready("orin", ORIN_FRONT, 5.0)
        client.stop.set()
        await client.running
        store = Store(config.store)
        assert [record.state for record in store.load().devices] == [DeviceState.OFFLINE]
        store.close()
        assert await agent.call.code() is not grpc.StatusCode.OK, "the agent knows that it was cut off"

    with_coordinator(config, story)


def test_where_it_listens_is_announced_as_json(tmp_path: Path) -> None:
    file = tmp_path / "addresses.json"
    BoundAddresses("127.0.0.1:7070", "127.0.0.1:9464").announce(file)
    assert json.loads(file.read_text()) == {"address": "127.0.0.1:7070", "metrics_address": "127.0.0.1:9464"}
    assert list(tmp_path.iterdir()) == [file]


def start_fails(config: CoordinatorConfig) -> str:
    async def never(_: Client) -> None:
        pytest.fail("it came up")

    with pytest.raises(InvalidInputError) as refusal:
        with_coordinator(config, never)
    return str(refusal.value)


@pytest.mark.parametrize("which", ["address", "metrics_address"])
def test_a_port_in_use_is_refused_with_what_to_do_and_nothing_is_held(config: CoordinatorConfig, which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        in_use, free = (f"127.0.0.1:{open_.getsockname()[1]}" for open_ in (taken, other))
        other.close()
        both = {"address": free, "metrics_address": free, which: in_use}
        text = start_fails(replace(config, **both))
    assert in_use in text
    assert "hoose another port" in text

    async def story(client: Client) -> None:
        assert await client.states() == {}

    # Whichever of the two was free is free still.
    with_coordinator(replace(config, **{name: at for name, at in both.items() if name != which}), story)


def test_a_second_coordinator_does_not_share_the_first_ones_port(config: CoordinatorConfig, tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        second = replace(config, address=client.bound.address, store=tmp_path / "second.db")
        with pytest.raises(InvalidInputError, match="is another coordinator running"):
            await serve(second, lambda _: pytest.fail("it came up"))
        assert await client.states() == {}

    with_coordinator(config, story)


@pytest.mark.parametrize("address", ["7070", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70700", ":7070"])
@pytest.mark.parametrize("which", ["address", "metrics_address"])
def test_what_is_no_address_is_refused(config: CoordinatorConfig, which: str, address: str) -> None:
    assert f"{address!r} is no address: write host:port" in start_fails(replace(config, **{which: address}))
    assert not config.store.exists(), "nothing was begun"


def test_a_store_or_a_reference_that_cannot_be_used_is_refused(config: CoordinatorConfig, tmp_path: Path) -> None:
    assert "no such directory" in start_fails(replace(config, reference=str(tmp_path / "absent")))
    assert not config.store.exists(), "nothing was begun"
    config.store.write_bytes(b"no database" * 100)
    assert "cannot be used as the coordinator's store" in start_fails(config)


def test_a_corrupted_reference_is_refused(config: CoordinatorConfig) -> None:
    weights = Path(config.reference, "weights.safetensors")
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(CorruptReferenceError, match=r"weights.safetensors has the SHA-256"):
        asyncio.run(serve(config, lambda _: pytest.fail("it came up")))


def test_the_shipped_reference_is_found_by_its_name(config: CoordinatorConfig) -> None:
    async def story(client: Client) -> None:
        welcome = await client.agent().hello("orin")
        parts = [part async for part in client.sessions.FetchReference(fetch(welcome.reference_digest))]
        shipped = Artefact(parts[0].manifest, b"".join(part.weights_chunk for part in parts))
        assert shipped.details.board == "agx-orin"

    with_coordinator(replace(config, reference="agx_orin_resnet18"), story)


def test_too_few_modes_for_a_predictor_are_refused(config: CoordinatorConfig) -> None:
    with pytest.raises(InvalidInputError, match="a predictor needs 5 or more measured modes, not 4"):
        replace(config, profile_modes=4)
    assert replace(config, profile_modes=5).profile_modes == 5


def test_a_front_of_sixty_four_points_fits_into_a_message(config: CoordinatorConfig) -> None:
    async def story(client: Client) -> None:
        widest = front(*((1.0 + k, 100.0 - k) for k in range(64)), epoch_log_sd=0.1, power_log_sd=0.1)
        await client.agent().become_ready("orin", widest, 5.0)
        assert len((await client.devices())["orin"].front.points) == 64

    with_coordinator(config, story)
