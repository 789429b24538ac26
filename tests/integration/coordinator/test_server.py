"""The coordinator process over real gRPC on loopback: sessions, references, plans, connections, start and stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator import listeners, server
from coordinator.budgets.site_file import SiteFile
from coordinator.server import BoundAddresses, serve
from coordinator.settings import CoordinatorSettings
from coordinator.store.store import Store
from tests.fakes.connections import faulty_link
from tests.fakes.fleets import front
from tests.fakes.polling import eventually, until
from tests.fakes.real_processes import CoordinatorProcess
from tests.fakes.served import READY, Agent, CertifiedFleet, calling, certified, fetch, serving, serving_client, status
from tests.fakes.short_forms import first
from tests.fakes.small_fleet import NANO_FRONT, NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN
from wattfleet.common.addresses import split_address
from wattfleet.common.identity import channels
from wattfleet.common.identity.peers import Role
from wattfleet.core.budgets import InForce
from wattfleet.core.errors import CorruptReferenceError, InvalidInputError
from wattfleet.core.prediction import Artefact
from wattfleet.simulation.run import RunSeen
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.device_state import DeviceState, GrantPhase
from wattfleet_proto.v1 import (
    identity_pb2,
    identity_pb2_grpc,
    operator_pb2,
    planning_pb2,
    planning_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    view_pb2,
)

# --- Server -----------------------------------------------------------------------------------------------------------
# The coordinator process over real gRPC on loopback: sessions, references, plans, start and stop.


# --- rounds -------------------------------------------------------------------------------------------------------


async def test_a_round_from_its_plan_to_its_report(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        assert await client.rounds() == RunSeen(), "no run ever started"
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
            await agent.send(observation=observation)  # an agent repeats a report that was not acknowledged
        await client.planning.ReportMetrics(metrics(0, accuracy=0.1))
        await client.planning.ReportMetrics(metrics(1, accuracy=0.5))
        results = [
            planning_pb2.DeviceResult(device_id="orin", num_examples=96.0, share=0.5),
            planning_pb2.DeviceResult(device_id="nano", failure="the node is gone"),
        ]
        with urllib.request.urlopen(f"http://{client.bound.http_address}/metrics", timeout=10) as response:
            scraped = response.read().decode()
        assert 'wattfleet_site_power_watts{kind="observed"} 45.5' in scraped
        assert 'wattfleet_rpc_seconds_count{method="PlanRound"} 1.0' in scraped
        assert "wattfleet_store_write_seconds_count 0.0" not in scraped
        finish = planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, results=results, wall_s=3.5)
        await client.planning.FinishRound(finish)
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN, error="stopped by hand"))

        listed = await client.rounds()
        assert (listed.run.run_id, listed.run.finished, listed.run.error) == (RUN, True, "stopped by hand")
        assert dict(listed.run.initial_metrics) == {"accuracy": 0.1}
        [shown] = listed.rounds
        assert {seen.device_id: (seen.epoch_s, seen.power_w) for seen in shown.observations} == {
            "orin": (20.5, 31.0),
            "nano": (36.0, 14.5),
        }
        assert (shown.observed_site_w, shown.observed_s, shown.wall_s) == (45.5, 36, 3.5)
        assert (list(shown.failed), dict(shown.metrics)) == (["nano"], {"accuracy": 0.5})

        with urllib.request.urlopen(f"http://{client.bound.http_address}/metrics", timeout=10) as response:
            assert 'wattfleet_site_power_watts{kind="observed"}' not in response.read().decode(), "the run has ended"


def metrics(number: int, **values: float) -> planning_pb2.ReportMetricsRequest:
    return planning_pb2.ReportMetricsRequest(run_id=RUN, round=number, metrics=values)


def sky_above_the_site(monkeypatch: pytest.MonkeyPatch) -> Sky:
    """A site whose budget is set by a `Sky`."""
    sky = Sky()
    monkeypatch.setattr(server, "site_of", lambda _: replace(SiteFile.of_site(100.0), budgets={"site": sky}))
    return sky


async def test_devices_of_a_round_in_flight_are_told_that_the_watts_fell(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sky = sky_above_the_site(monkeypatch)
    monkeypatch.setattr("coordinator.budgets.budget_watch.CHECK_S", 0.01)

    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        plan = await client.plan()
        for agent in (orin, nano):
            await agent.lease(GrantPhase.TRAINING, await agent.grant())
        sky.watts = 20.0
        # The budget still covers the Nano's 15 W and the Orin's 5 W of idling.
        stop = await orin.grant()
        assert (stop.plan_id, stop.HasField("mode")) == (plan.plan_id, False)
        await orin.lease(GrantPhase.OVER, stop)
        [shown] = (await client.rounds()).rounds
        assert [part.device_id for part in shown.plan.assignments] == ["nano"]
        assert shown.plan.planned_w <= 20
        sky.watts = 17.0
        grant = await nano.grant()
        assert grant.power_limit_w == 10.0
        assert grant.mode == front_to_message(NANO_FRONT).points[1].mode
        await nano.send(state=READY)


async def test_a_device_that_was_away_when_the_watts_fell_is_told_when_it_is_back(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sky = sky_above_the_site(monkeypatch)
    monkeypatch.setattr("coordinator.budgets.budget_watch.CHECK_S", 0.01)
    monkeypatch.setattr("coordinator.services.orders.TRIM_CHECK_S", 0.01)
    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        plan = await client.plan()
        had = await orin.grant()
        await orin.lease(GrantPhase.TRAINING, had)
        await nano.lease(GrantPhase.TRAINING, await nano.grant())
        await orin.goodbye()
        sky.watts = 30.0
        stop = await nano.grant()
        assert not stop.HasField("mode"), "the Orin, which cannot be told anything, has all of the watts"
        await nano.lease(GrantPhase.OVER, stop)
        orin = client.agent()
        await orin.hello("orin")
        await orin.lease(GrantPhase.TRAINING, had)
        # The first grant may repeat the current limit; the next one has the limit of the current budget.
        grant = await orin.grant()
        if grant.power_limit_w == 30.0:
            grant = await orin.grant()
        assert (grant.plan_id, grant.power_limit_w) == (plan.plan_id, 20.0)
        await orin.lease(GrantPhase.TRAINING, grant)
    async with serving_client(config) as client:
        orin, nano = client.agent(), client.agent()
        for agent, device_id, phase in ((orin, "orin", GrantPhase.TRAINING), (nano, "nano", GrantPhase.OVER)):
            await agent.hello(device_id)
            await agent.lease(phase, grant)
        kept = await orin.grant()
        assert kept.power_limit_w == 20.0
        await orin.lease(GrantPhase.TRAINING, kept)
        await nano.obey()
        [site] = (await client.operator.GetBudgets(operator_pb2.GetBudgetsRequest())).supplies
        assert site.set_aside_w == 20.0 + 3.0, "the Nano idles, and is granted nothing anew"


@dataclass
class Sky:
    """A budget that the test changes."""

    watts: float = 100.0

    def in_force(self, now: datetime) -> InForce:
        return InForce(self.watts, "schedule", False, "the sky")


async def test_why_there_is_no_plan_is_told(config: CoordinatorSettings) -> None:

    async with serving_client(config.with_values(site={"budget_w": 12.0})) as client:

        async def refusal(run_id: str = RUN) -> tuple[grpc.StatusCode, str]:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.plan(run_id=run_id)
            return status(refused)

        assert await refusal() == (grpc.StatusCode.NOT_FOUND, f"unknown run '{RUN}': it never started")
        orin, nano = await client.two_ready()
        code, reason = await refusal()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert reason == "12 W is not enough to train one device on top of 8.0 W of idle power: allow at least 15.0 W"
        await orin.goodbye()
        await nano.goodbye()
        code, reason = await refusal()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert reason == "no device is ready to train: orin is offline, nano is offline"


async def test_where_nobody_who_is_ready_may_be_chosen_it_is_said_to_ask_again(config: CoordinatorSettings) -> None:

    async with serving_client(config.with_values(selection={"exclude": ("id:*",)})) as client:
        await client.two_ready()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.plan()
        code, reason = status(refused)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert reason == "no device can be selected: nano: excluded: matches id:*; orin: excluded: matches id:*"


async def test_a_restart_on_the_same_store_keeps_devices_nodes_and_rounds(config: CoordinatorSettings) -> None:
    before: dict[str, Any] = {}

    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        plan = await client.plan()
        await client.end_trainings()
        await orin.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=20.0, power_w=31.0))
        await client.planning.ReportMetrics(metrics(1, accuracy=0.5))
        await client.plan(2)
        before["plan"], before["rounds"] = plan, await client.rounds()
        for agent in (orin, nano):
            await agent.goodbye()  # otherwise the coordinator would wait for them
    async with serving_client(config) as client:
        assert await client.rounds() == before["rounds"]
        assert await client.states() == {"nano": "offline", "orin": "offline"}
        assert await client.plan(1) == before["plan"], "a requested plan stays"
        resolved = await client.planning.ResolveNodes(planning_pb2.ResolveNodesRequest(node_ids=NODES))
        assert not resolved.unknown_node_ids
        agent = client.agent()
        await agent.hello("orin")
        await agent.lease()
        await agent.send(state=READY)
        await client.end_trainings()  # of round 2, whose grant may be repeated
        after = await client.plan(3)
        assert [(part.node_id, part.device_id) for part in after.assignments] == [(ORIN_NODE, "orin")]
        assert [listed.round for listed in (await client.rounds()).rounds] == [1, 2, 3]


# --- start and stop -----------------------------------------------------------------------------------------------


async def test_it_is_healthy_while_it_serves_and_gives_its_ports_back(config: CoordinatorSettings) -> None:
    async def bound_while_healthy(config: CoordinatorSettings) -> BoundAddresses:
        async with serving_client(config) as client:
            health = health_pb2_grpc.HealthStub(client.channel)
            answer = await health.Check(health_pb2.HealthCheckRequest())
            assert answer == health_pb2.HealthCheckResponse(status="SERVING")
            fleet = await client.view.GetFleet(view_pb2.GetFleetRequest())
            assert (fleet.site_budget_w, fleet.policy, await client.devices()) == (100.0, "fastest-k", {})
            return client.bound

    config = config.with_values(policy={"name": "fastest-k", "clients": 2})
    first = await bound_while_healthy(config)
    again = config.with_values(server={"address": first.address, "http_address": first.http_address})
    assert await bound_while_healthy(again) == first


async def test_a_session_that_is_open_at_the_end_is_closed_and_stored(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        agent = client.agent()
        await agent.become_ready("orin", ORIN_FRONT, 5.0)
        client.stop.set()
        await client.running
        store = Store(Path(config.store.location))
        assert [record.state for record in store.load().devices] == [DeviceState.READY], "it is expected back"
        store.close()
        assert await agent.call.code() is not grpc.StatusCode.OK, "the agent notices the lost session"


def test_where_it_listens_is_announced_as_json(tmp_path: Path) -> None:
    file = tmp_path / "addresses.json"
    BoundAddresses("127.0.0.1:7070", "127.0.0.1:9464").announce(file)
    assert json.loads(file.read_text()) == {"address": "127.0.0.1:7070", "http_address": "127.0.0.1:9464"}
    assert list(tmp_path.iterdir()) == [file]


async def start_fails(config: CoordinatorSettings) -> str:
    with pytest.raises(InvalidInputError) as refusal:
        async with serving_client(config):
            pytest.fail("it came up")
    return str(refusal.value)


@pytest.mark.parametrize("which", ["address", "http_address"])
async def test_a_port_in_use_is_refused_with_what_to_do_and_nothing_is_held(
    config: CoordinatorSettings, which: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        in_use, free = (f"127.0.0.1:{open_.getsockname()[1]}" for open_ in (taken, other))
        other.close()
        both = {"address": free, "http_address": free, which: in_use}
        text = await start_fails(config.with_values(server=both))
    assert in_use in text
    assert "hoose another port" in text

    # The port that was free is still free.
    free = {name: at for name, at in both.items() if name != which}
    async with serving_client(config.with_values(server=free)) as client:
        assert await client.states() == {}


async def test_a_second_coordinator_does_not_share_the_first_ones_port(
    config: CoordinatorSettings, tmp_path: Path
) -> None:

    async with serving_client(config) as client:
        second = config.with_values(
            server={"address": client.bound.address}, store={"location": str(tmp_path / "second.db")}
        )
        with pytest.raises(InvalidInputError, match="is another coordinator running"):
            await serve(second, lambda _: pytest.fail("it came up"))
        assert await client.states() == {}


@pytest.mark.parametrize("address", ["7070", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70700", ":7070"])
@pytest.mark.parametrize("which", ["address", "http_address"])
async def test_what_is_no_address_is_refused(config: CoordinatorSettings, which: str, address: str) -> None:
    refused = await start_fails(config.with_values(server={which: address}))
    assert f"{address!r} is not an address: write host:port" in refused
    assert not Path(config.store.location).exists(), "nothing was started"


async def test_a_store_or_a_reference_that_cannot_be_used_is_refused(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    absent = str(tmp_path / "absent")
    assert "no such directory" in await start_fails(config.with_values(profiling={"reference": absent}))
    assert not Path(config.store.location).exists(), "nothing was started"
    Path(config.store.location).write_bytes(b"no database" * 100)
    assert "cannot be used as the coordinator's store" in await start_fails(config)


async def test_a_corrupted_reference_is_refused(config: CoordinatorSettings) -> None:
    weights = Path(config.profiling.reference, "weights.safetensors")
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(CorruptReferenceError, match=r"weights.safetensors has the SHA-256"):
        await serve(config, lambda _: pytest.fail("it came up"))


async def test_the_shipped_reference_is_found_by_its_name(config: CoordinatorSettings) -> None:

    async with serving_client(config.with_values(profiling={"reference": "agx_orin_resnet18"})) as client:
        welcome = await client.agent().hello("orin")
        parts = [part async for part in client.sessions.FetchReference(fetch(welcome.reference_digest))]
        shipped = Artefact(parts[0].manifest, b"".join(part.weights_chunk for part in parts))
        assert shipped.details.board == "agx-orin"


async def test_a_front_of_sixty_four_points_fits_into_a_message(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        widest = front(*((1.0 + k, 100.0 - k) for k in range(64)), epoch_log_sd=0.1, power_log_sd=0.1)
        await client.agent().become_ready("orin", widest, 5.0)
        assert len((await client.devices())["orin"].front.points) == 64


async def test_tools_learn_from_it_what_it_serves(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        answers = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
        names = {service.name for service in answers[0].list_services_response.service}
        assert {f"wattfleet.v1.{name}Service" for name in ("Session", "Planning", "View", "Operator")} < names
        assert "grpc.health.v1.Health" in names


# --- Idle connections -------------------------------------------------------------------------------------------------
# Connections to the gRPC port without a request are closed, so that they do not exhaust the file descriptors.

# HTTP/2's preface, and empty settings.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


async def until_closed(address: str, greeting: bytes) -> None:
    """Connect, send some bytes, and read until the other side closes."""
    reader, writer = await asyncio.open_connection(*split_address(address))
    writer.write(greeting)
    try:
        async with asyncio.timeout(60):
            while await reader.read(65_536):
                pass
    except ConnectionResetError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("greeting", [GREETING, b""], ids=["without a request", "without a word"])
async def test_an_idle_connection_is_closed_and_a_session_lasts(config: CoordinatorSettings, greeting: bytes) -> None:
    async with serving_client(config.with_values(server={"idle_connection_s": 1.0})) as client:
        agent = client.agent()
        await agent.hello("orin")
        await until_closed(client.bound.address, greeting)
        assert "orin" in await client.devices()
        await agent.goodbye()


# --- Forgotten connections --------------------------------------------------------------------------------------------
# Connections that a firewall has forgotten: both sides notice, and clients open new ones.

_TEN_TIMES_SOONER = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")


def sooner(options: Any) -> list[tuple[str, Any]]:
    """The same options with pings ten times as often."""
    return [(name, value // 10 if name in _TEN_TIMES_SOONER else value) for name, value in options]


def failures_before_an_answer(call: Callable[[Any], object], stub: Any) -> int:
    """The number of failed calls before one succeeds; a busy machine may lose more than the call in progress."""
    for failed in range(4):
        with suppress(grpc.RpcError):
            call(stub)
            return failed
    pytest.fail("the client goes on with a connection that a firewall has forgotten")


async def test_a_client_uses_a_new_connection(config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_CLIENT_OPTIONS", sooner(channels._CLIENT_OPTIONS))  # noqa: SLF001

    def resolve(planning: Any) -> object:
        return planning.ResolveNodes(planning_pb2.ResolveNodesRequest(), timeout=10.0, wait_for_ready=True)

    async with serving(config) as client, faulty_link(client.bound.address) as link:
        with channels.open_channel(link.address, None) as channel:
            planning = planning_pb2_grpc.PlanningServiceStub(channel)
            await asyncio.to_thread(resolve, planning)
            link.forget()
            failed = await asyncio.to_thread(failures_before_an_answer, resolve, planning)
            assert failed > 0, "nothing was in progress on the forgotten connection"


async def test_the_coordinator_closes_them(config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        listeners,
        "OPTIONS",
        [(name, value // 60 if name in _TEN_TIMES_SOONER else value) for name, value in listeners.OPTIONS],
    )
    config = config.with_values(sessions={"lease_s": 1.0, "check_s": 0.1})
    async with serving(config) as client, faulty_link(client.bound.address) as link:
        _, _, port = client.bound.address.rpartition(":")

        def connections() -> int:
            return sum(
                each.laddr.port == int(port) and each.status == psutil.CONN_ESTABLISHED
                for each in psutil.Process().net_connections("tcp")
                if each.laddr
            )

        await client.states()
        before = connections()
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with channels.open_async_channel(link.address, None, options) as channel:
            agent = Agent(session_pb2_grpc.SessionServiceStub(channel))
            await agent.hello("orin")
            assert connections() == before + 1
            link.forget()
            await eventually(lambda: connections() == before)


# --- No forks ---------------------------------------------------------------------------------------------------------
# A coordinator with TLS starts child processes without fork, which could copy locks that gRPC's threads hold.


async def test_no_request_makes_a_coordinator_fork(
    config: CoordinatorSettings, tmp_path: Path, another: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks: list[str] = []
    children: list[dict[str, Any]] = []
    start = subprocess.Popen.__init__

    def starting(self: Any, *arguments: Any, **options: Any) -> None:
        children.append(options)
        start(self, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", starting)
    for name in ("fork", "forkpty"):
        monkeypatch.setattr(os, name, lambda name=name: forks.append(name) or 1)
    fleet = CertifiedFleet.create(tmp_path / "authority")
    anna = fleet.identity(Role.OPERATOR, "anna")
    async with serving(certified(config, fleet.authority.folder)) as served, calling(served, anna) as client:
        parts = [
            operator_pb2.PublishReferenceRequest(manifest=another.manifest),
            operator_pb2.PublishReferenceRequest(weights_chunk=another.weights),
        ]
        await client.operator.PublishReference(iter(parts))
        service = identity_pb2_grpc.IdentityServiceStub(client.channel)
        await service.BeginRotation(identity_pb2.BeginRotationRequest())
    assert forks == []
    assert children, "a published reference is checked in a child"
    # Without these, Python starts a child by vfork and exec, and runs no code in between.
    assert not any(options.get(name) for options in children for name in ("preexec_fn", "user", "group"))


# --- Stop limit -------------------------------------------------------------------------------------------------------
# A signal ends the coordinator within its time limit, whichever part hangs.

_LIMIT_S = 1

# The real command, with a part that hangs for an hour.
_HANGING = """
import asyncio, socket, sys, threading, time

def hang(*_, **__):
    print("it hangs", flush=True)
    time.sleep(3600)

if hangs == "names":
    look_up = socket.getaddrinfo
    def sometimes(host, *rest, **more):
        return (hang if host.endswith(".example") else look_up)(host, *rest, **more)
    socket.getaddrinfo = sometimes
elif hangs == "a thread":
    import coordinator.server as services
    healthy = services.HealthServicer
    def with_thread():
        asyncio.get_running_loop().run_in_executor(None, hang)
        return healthy()
    services.HealthServicer = with_thread
elif hangs == "the store":
    import coordinator.store.store as store
    store.Store.require_owner = hang
elif hangs == "a task":
    import coordinator.services.orders as trimmer
    async def watch(self):
        print("it hangs", flush=True)
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
    trimmer.Trimmer.watch = watch
elif hangs == "the log":
    import coordinator.services.orders as trimmer
    async def watch(self):
        while True:
            await asyncio.sleep(0)
            print("x" * 1_000, file=sys.stderr, flush=True)
    trimmer.Trimmer.watch = watch
from wattfleet.common.cli import main
main()
"""


def hanging(tmp_path: Path, hangs: str, stderr: int | None = None) -> CoordinatorProcess:
    """A coordinator with a part that hangs."""
    (tmp_path / "site.toml").write_text(
        '[supplies.site]\nbudget = { query = "watts", url = "http://prometheus.example:9090", fallback_w = 60 }\n'
    )
    (tmp_path / "settings.toml").write_text(
        f"[server]\nstop_grace_s = 0.1\nstop_limit_s = {_LIMIT_S}\n[site]\nquery_timeout_s = 0.2\n"
    )
    options = ("--config", str(tmp_path / "settings.toml"), "--site-file", str(tmp_path / "site.toml"))
    code = f"hangs = {hangs!r}\n{_HANGING}"
    return CoordinatorProcess(tmp_path, tmp_path / "coordinator.db", *options, code=code, stderr=stderr)


@pytest.mark.parametrize("hangs", first(2, ["the store", "a thread", "names", "a task"]))
def test_sigterm_ends_a_coordinator_of_which_something_hangs(tmp_path: Path, hangs: str) -> None:
    coordinator = hanging(tmp_path, hangs)
    coordinator.begin()
    try:
        until(lambda: coordinator.serves and "it hangs" in coordinator.log.read_text())
    finally:
        status = coordinator.stop()
    said = coordinator.log.read_text()
    assert "Traceback" not in said
    if hangs == "names":
        assert status == 0, said
    else:
        assert status == 1, said
        assert f"did not stop within {_LIMIT_S} s and is terminated now" in said


def test_sigterm_ends_a_coordinator_whose_log_nobody_reads(tmp_path: Path) -> None:
    coordinator = hanging(tmp_path, "the log", subprocess.PIPE)
    coordinator.begin()
    try:
        until(lambda: coordinator.serves)
        time.sleep(0.5)  # the pipe fills within milliseconds
        assert coordinator.serves
    finally:
        status = coordinator.stop()
    assert status == 1


async def test_a_closed_terminal_ends_it_and_a_signal_that_was_ignored_does_not(tmp_path: Path) -> None:
    in_the_background = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    coordinator = CoordinatorProcess(
        tmp_path, tmp_path / "coordinator.db", "--site-budget-w", "60", wrapper=in_the_background
    )
    await coordinator.start()
    try:
        coordinator.send(signal.SIGINT)
        async with grpc.aio.insecure_channel(coordinator.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for _ in range(2):  # the first may be answered before the signal arrives
                await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert coordinator.serves
    finally:
        status = coordinator.stop(signal.SIGHUP)
    assert status == 0, coordinator.log.read_text()
