"""Agents' sessions over real gRPC: allowed messages, how sessions end, references, and sessions in trouble."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.services import sessions
from coordinator.settings import CoordinatorSettings, SiteSettings
from tests.fakes.polling import eventually
from tests.fakes.served import READY, Agent, Client, fetch, serving_client, status
from tests.fakes.small_fleet import NANO_FRONT, ORIN_FRONT
from wattfleet.core.modes import board_named
from wattfleet.core.prediction import Artefact, restore_predictor
from wattfleet_proto import error_boundary
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.names import MAJOR, own_version
from wattfleet_proto.v1 import (
    operator_pb2,
    power_pb2,
    session_pb2,
    session_pb2_grpc,
    view_pb2,
)

# --- Sessions ---------------------------------------------------------------------------------------------------------
# Agents' sessions over real gRPC on loopback: allowed messages, how sessions end, and fetching references.


# --- sessions -----------------------------------------------------------------------------------------------------


async def test_a_sample_is_exported_until_the_device_disconnects(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        agent = client.agent()
        await agent.hello("orin")
        sample = session_pb2.BoardSample(power_w=21.5, mode=power_pb2.PowerMode(cores=4))  # without clocks
        await agent.send(lease=session_pb2.Lease(number=1, sample=sample))
        assert "wattfleet_device_power_watts{" not in await asyncio.to_thread(metrics_of, client.bound.http_address)
        sample.ClearField("mode")
        await agent.send(lease=session_pb2.Lease(number=2, sample=sample))
        text = await asyncio.to_thread(metrics_of, client.bound.http_address)
        assert 'wattfleet_device_power_watts{device="orin"} 21.5' in text
        await agent.send(lease=session_pb2.Lease(number=3))  # as from an agent that sends no samples
        agent.call.cancel()

        def is_gone() -> bool:
            return "wattfleet_device_power_watts{" not in metrics_of(client.bound.http_address)

        for _ in range(200):
            if await asyncio.to_thread(is_gone):
                return
            await asyncio.sleep(0.05)
        pytest.fail("a disconnected device has a sample")


async def test_devices_learn_whether_to_refuse_trainings_without_a_plan_and_report_them(
    config: CoordinatorSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "site.toml"
    file.write_text('unplanned_trainings = "refuse"\n[supplies.site]\nbudget = { watts = 300 }\n')
    async with serving_client(config.model_copy(update={"site": SiteSettings(file=file)})) as client:
        agent = client.agent()
        assert (await agent.hello("orin")).refuses_unplanned
        await agent.send(unplanned=session_pb2.UnplannedTraining(run_id="4711", is_refused=True))
        assert [each for each in caplog.messages if "orin refuses to train for Flower's run 4711" in each]
        # What an app may have made up ends no session, or the agent would send it again in the next one.
        for made_up in (".", "\n", "x" * 500):
            await agent.send(unplanned=session_pb2.UnplannedTraining(run_id=made_up))
        assert len([each for each in caplog.messages if "its run's id is invalid" in each]) == 3


def metrics_of(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        return str(response.read().decode())


async def test_a_session_from_hello_to_goodbye(config: CoordinatorSettings, artefact: Artefact) -> None:

    async with serving_client(config) as client:
        agent = client.agent()
        welcome = await agent.hello("orin")
        assert welcome == session_pb2.Welcome(
            reference_digest=artefact.digest,
            profile_modes=20,
            lease_s=5.0,
            reconnect_s=1 / 400,
            protocol=own_version(),
            grant_lifetime_s=120.0,
            share_modes=16,
        )
        shown = (await client.devices())["orin"]
        assert shown == view_pb2.DeviceView(
            device_id="orin",
            board="agx-orin",
            provenance=power_pb2.PROVENANCE_SIMULATED,
            state=session_pb2.DEVICE_STATE_ENROLLED,
            mode_count=7,
            target_modes=7,
            supply="site",
            state_since_unix_s=shown.state_since_unix_s,
        )
        profiling = session_pb2.StateReport(state=session_pb2.DEVICE_STATE_PROFILING, profiled_modes=3, detail="12c")
        await agent.send(state=profiling)
        await agent.send(lease=session_pb2.Lease())
        seen = (await client.devices())["orin"]
        assert (seen.state, seen.profiled_modes, seen.detail) == (session_pb2.DEVICE_STATE_PROFILING, 3, "12c")
        assert not seen.HasField("idle_w") and not seen.HasField("front"), "unknown is not zero"

        report = session_pb2.FrontReport(
            front=front_to_message(ORIN_FRONT),
            idle_w=5.0,
            profiled_modes=20,
            reference_digest=welcome.reference_digest,
            minibatches_per_epoch=100,
        )
        await agent.send(front=report)
        await agent.send(state=READY)
        seen = (await client.devices())["orin"]
        assert (seen.front, seen.idle_w, seen.reference_digest) == (report.front, 5.0, welcome.reference_digest)
        assert await client.states() == {"orin": "ready"}
        await agent.goodbye()
        assert await client.states() == {"orin": "offline"}


async def test_a_second_session_of_the_same_id_is_refused_and_the_first_goes_on(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        first, second = client.agent(), client.agent()
        await first.become_ready("orin", ORIN_FRONT, 5.0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await second.hello("orin")
        assert status(refused) == (
            grpc.StatusCode.ALREADY_EXISTS,
            "orin is already connected from another installation: give each device its own id",
        )
        await first.send(lease=session_pb2.Lease())
        assert await client.states() == {"orin": "ready"}
        await first.goodbye()
        third = client.agent()
        await third.hello("orin")
        await third.goodbye()


async def test_an_agent_that_falls_silent_goes_offline_and_one_that_speaks_does_not(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.state.leases.MISSED_LEASES", 1)
    async with serving_client(config.with_values(sessions={"lease_s": 1.0, "check_s": 0.05})) as client:
        silent, talker = client.agent(), client.agent()
        assert (await silent.hello("silent")).lease_s == 1.0
        await talker.hello("talker")
        end = asyncio.ensure_future(silent.call.read())
        while not end.done():
            await talker.send(lease=session_pb2.Lease())
            await asyncio.wait([end], timeout=0.25)
        with pytest.raises(grpc.aio.AioRpcError, match="silent: its lease has expired"):
            await end
        assert await client.states() == {"silent": "offline", "talker": "enrolled"}
        await talker.goodbye()


async def test_an_agent_whose_connection_breaks_goes_offline(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        async with grpc.aio.insecure_channel(client.bound.address) as own:
            await Agent(session_pb2_grpc.SessionServiceStub(own)).become_ready("orin", ORIN_FRONT, 5.0)
            assert await client.states() == {"orin": "ready"}

        async def offline() -> bool:
            return await client.states() == {"orin": "offline"}

        await eventually(offline)


async def test_a_session_in_which_nothing_is_said_never_begins(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_client(config.with_values(sessions={"lease_s": 1.0})) as client:
        mute, gone = client.agent(), client.agent()
        await gone.call.done_writing()
        for agent in (mute, gone):
            assert await agent.call.read() is grpc.aio.EOF
            assert await agent.call.code() is grpc.StatusCode.OK
        assert await client.states() == {}
    assert not caplog.records, "nothing failed"


async def test_what_an_agent_may_not_say_ends_its_session_and_nobody_elses(config: CoordinatorSettings) -> None:
    bad_front = front_to_message(ORIN_FRONT)
    bad_front.points[1].epoch_s = 5.0  # faster than the point before, and with less power
    good_front = front_to_message(ORIN_FRONT)
    refusals: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
        (
            {"front": session_pb2.FrontReport(front=bad_front, idle_w=5.0, minibatches_per_epoch=100)},
            INVALID,
            "times must rise",
        ),
        ({"front": session_pb2.FrontReport(idle_w=5.0)}, INVALID, "1 to 64 points, not 0"),
        (
            {"front": session_pb2.FrontReport(front=good_front, idle_w=float("nan"), minibatches_per_epoch=100)},
            INVALID,
            "orin: idle watts",
        ),
        ({"state": session_pb2.StateReport()}, INVALID, "unknown device state 0"),
        (
            {"state": session_pb2.StateReport(state=session_pb2.DEVICE_STATE_OFFLINE)},
            INVALID,
            "a device cannot report that it is offline",
        ),
        ({"hello": session_pb2.Hello(device_id="orin")}, INVALID, "a session must have exactly one Hello"),
    ]

    async with serving_client(config) as client:
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
            assert (kept.front, kept.idle_w) == (good_front, 5.0), "no part of it was accepted"
        await other.goodbye()


INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_an_observation_of_a_round_that_is_forgotten_is_let_go(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        agent = client.agent()
        await agent.become_ready("orin", ORIN_FRONT, 5.0)
        await agent.send(observation=session_pb2.Observation(plan_id="9/9", epoch_s=1.0, power_w=1.0))
        assert await client.states() == {"orin": "ready"}, "it was acknowledged, the session goes on"
        await agent.goodbye()


async def test_a_hello_has_to_say_who_and_what(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        for arguments, reason in (
            (("", "agx-orin"), "must have an id"),
            (("orin", ""), "must have an id, a kind of board"),
            (("orin", "agx-orin", power_pb2.PROVENANCE_UNSPECIFIED), "the provenance is missing"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.agent().hello(*arguments)
            assert status(refused)[0] is INVALID
            assert reason in status(refused)[1]
        assert await client.states() == {}


# --- references ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [None, 1_000])
async def test_the_reference_arrives_whole(
    config: CoordinatorSettings, artefact: Artefact, chunk_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk_bytes:
        monkeypatch.setattr(sessions, "_CHUNK_BYTES", chunk_bytes)

    async with serving_client(config) as client:
        digest = (await client.agent().hello("orin")).reference_digest
        parts = [part async for part in client.sessions.FetchReference(fetch(digest))]
        manifest, weights = parts[0].manifest, b"".join(part.weights_chunk for part in parts)
        assert hashlib.sha256(manifest).hexdigest() == digest == artefact.digest
        assert weights == artefact.weights
        assert not any(part.manifest for part in parts[1:])
        if chunk_bytes:
            assert max(len(part.weights_chunk) for part in parts) == chunk_bytes
            assert len(parts) > 5
        modes = board_named("orin-nano").space.array()
        arrived = restore_predictor(Artefact(manifest, weights)).predict(modes)
        assert np.array_equal(arrived.minibatch_ms, restore_predictor(artefact).predict(modes).minibatch_ms)

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in client.sessions.FetchReference(fetch("0" * 64)):
                pass
        assert status(refused)[0] is grpc.StatusCode.NOT_FOUND
        assert "0" * 64 in status(refused)[1]


# --- other versions, and agents that reconnect --------------------------------------------------------------------


def hello_of(device_id: str, installation: str = "", **more: Any) -> session_pb2.Hello:
    return session_pb2.Hello(
        device_id=device_id,
        board="agx-orin",
        provenance=power_pb2.PROVENANCE_SIMULATED,
        mode_count=7,
        installation=installation,
        **more,
    )


async def test_an_agent_that_restarts_takes_the_place_of_its_own_session_at_once(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        old, new, other = client.agent(), client.agent(), client.agent()
        await old.greet(hello_of("orin", "one"))
        await old.send(state=READY)
        await new.greet(hello_of("orin", "one"))
        with pytest.raises(grpc.aio.AioRpcError, match="a newer session of the same device") as ended:
            await old.call.read()
        assert status(ended)[0] is grpc.StatusCode.ABORTED
        assert await client.states() == {"orin": "enrolled"}, "the end of the old session is not that of the new one"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await other.greet(hello_of("orin", "another"))
        assert status(refused)[0] is grpc.StatusCode.ALREADY_EXISTS
        await new.send(lease=session_pb2.Lease())
        await new.goodbye()


@pytest.mark.parametrize(("own", "theirs"), [(0, 0), (0, 1), (0, 99), (2, 1)])
async def test_agents_of_neighbouring_versions_are_served(
    config: CoordinatorSettings, own: int, theirs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wattfleet_proto.names.MINOR", own)

    async with serving_client(config) as client:
        agent = client.agent()
        welcome = await agent.greet(hello_of("orin", protocol=session_pb2.ProtocolVersion(major=MAJOR, minor=theirs)))
        assert (welcome.protocol.major, welcome.protocol.minor) == (MAJOR, min(own, theirs))
        newer = session_pb2.SessionRequest.FromString(b"\xa2\x06\x02\x08\x01")  # a kind of report of a later version
        newer.sequence = 1
        await agent.call.write(newer)
        assert (await agent.call.read()).ack.sequence == 1
        await agent.send(state=READY)
        await agent.goodbye()


@pytest.mark.parametrize("theirs", [(MAJOR - 1, 0), (MAJOR + 1, 0), (MAJOR + 1, 2)])
async def test_an_agent_of_another_major_version_is_told_what_to_do(
    config: CoordinatorSettings, theirs: tuple[int, int]
) -> None:
    major, minor = theirs

    async with serving_client(config) as client:
        protocol = session_pb2.ProtocolVersion(major=major, minor=minor)
        with pytest.raises(grpc.aio.AioRpcError, match="update the older of agent and coordinator") as refused:
            await client.agent().greet(hello_of("orin", protocol=protocol))
        assert status(refused)[0] is grpc.StatusCode.UNIMPLEMENTED
        assert await client.states() == {}


async def test_a_report_that_comes_again_or_too_late_is_acknowledged_and_changes_nothing(
    config: CoordinatorSettings,
) -> None:

    async with serving_client(config) as client:
        agent = client.agent()
        await agent.hello("orin")
        for sequence, detail in ((5, "fifth"), (5, "fifth again"), (3, "third, late")):
            state = session_pb2.StateReport(state=session_pb2.DEVICE_STATE_READY, detail=detail)
            await agent.call.write(session_pb2.SessionRequest(sequence=sequence, state=state))
            assert (await agent.call.read()).ack.sequence == sequence
            assert (await client.devices())["orin"].detail == "fifth"
        await agent.goodbye()


async def test_a_report_without_a_number_is_taken_as_it_comes_and_a_second_hello_is_none(
    config: CoordinatorSettings,
) -> None:

    async with serving_client(config) as client:
        agent = client.agent()
        await agent.hello("orin")
        await agent.send(state=READY)
        for detail in ("one", "two"):
            state = session_pb2.StateReport(state=session_pb2.DEVICE_STATE_READY, detail=detail)
            await agent.call.write(session_pb2.SessionRequest(state=state))
            assert (await agent.call.read()).ack.sequence == 0
            assert (await client.devices())["orin"].detail == detail
        await agent.call.write(session_pb2.SessionRequest(hello=hello_of("orin")))
        with pytest.raises(grpc.aio.AioRpcError, match="a session must have exactly one Hello"):
            await agent.call.read()


async def test_a_reference_is_fetched_from_where_it_broke_off(config: CoordinatorSettings, artefact: Artefact) -> None:

    async with serving_client(config) as client:
        request = fetch(artefact.digest)
        request.weights_offset = 1000
        parts = [part async for part in client.sessions.FetchReference(request)]
        assert (parts[0].manifest, parts[0].weights_offset) == (artefact.manifest, 1000)
        assert b"".join(part.weights_chunk for part in parts) == artefact.weights[1000:]
        request.weights_offset = len(artefact.weights) + 1
        with pytest.raises(grpc.aio.AioRpcError, match="beyond the end of the weights") as refused:
            _ = [part async for part in client.sessions.FetchReference(request)]
        assert status(refused)[0] is INVALID


# --- Session trouble --------------------------------------------------------------------------------------------------
# Agents' sessions in trouble: messages that are too large or impossible, slow readers, and fleets that reconnect.


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"state": session_pb2.StateReport(state=READY.state, detail="x" * 70_000)}, "at most 65,536 bytes"),
        (
            {
                "front": session_pb2.FrontReport(
                    front=power_pb2.Front(points=[power_pb2.FrontPoint()] * 1_000_000), minibatches_per_epoch=100
                )
            },
            "at most 65,536 bytes",
        ),
        (
            {
                "front": session_pb2.FrontReport(
                    front=power_pb2.Front(points=[power_pb2.FrontPoint()] * 10_000), minibatches_per_epoch=100
                )
            },
            "1 to 64 points",
        ),
    ],
    ids=["70 kB", "front of a million points", "front of 10,000 points"],
)
async def test_what_is_far_too_large_ends_one_session_only(
    config: CoordinatorSettings, body: dict[str, Any], said: str
) -> None:

    async with serving_client(config) as client:
        other, agent = client.agent(), client.agent()
        await other.hello("other")
        await agent.hello("orin")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await agent.send(**body)
        assert status(refused)[0] is INVALID and said in status(refused)[1]
        await other.send(lease=session_pb2.Lease())
        await other.goodbye()


async def test_of_a_long_detail_the_beginning_is_kept(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        agent = client.agent()
        await agent.hello("orin")
        await agent.send(state=session_pb2.StateReport(state=READY.state, detail="x" * 60_000))
        assert (await client.devices())["orin"].detail == "x" * 2_000
        await agent.goodbye()


@pytest.mark.parametrize("name", ["x" * 201, "or\0in", "or\nin", "or\u202ein", " "])
@pytest.mark.parametrize("field", ["device_id", "board", "installation"])
async def test_a_name_that_is_too_long_or_cannot_be_shown_is_refused(
    config: CoordinatorSettings, field: str, name: str
) -> None:

    async with serving_client(config) as client:
        hello = hello_of("orin", "one")
        setattr(hello, field, name)
        with pytest.raises(grpc.aio.AioRpcError, match="1 to 200 printable characters") as refused:
            await client.agent().greet(hello)
        assert status(refused)[0] is INVALID
        assert await client.states() == {}


async def test_a_device_cannot_report_for_a_round_of_others(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        plan = await client.plan()
        stranger = client.agent()
        await stranger.hello("stranger")
        await stranger.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=1.0, power_w=1.0))
        assert not (await client.rounds()).rounds[0].observations
        for agent in (orin, nano, stranger):
            await agent.goodbye()


async def test_after_a_restart_a_round_waits_for_the_devices_that_were_there(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:

    async with serving_client(config) as client:
        await client.two_ready()
        await client.plan(1)
        client.stop.set()  # while the sessions last
        await client.running
    async with serving_client(config) as client:
        orin, nano = client.agent(), client.agent()
        assert (await client.plan(1)).assignments, "an existing plan is returned again"
        await orin.become_ready("orin", ORIN_FRONT, 5.0)
        with pytest.raises(grpc.aio.AioRpcError, match="waiting for devices to reconnect: 1 still missing") as refused:
            await client.plan(2)
        assert status(refused)[0] is grpc.StatusCode.UNAVAILABLE
        await nano.become_ready("nano", NANO_FRONT, 3.0)
        assert len((await client.plan(2)).assignments) == 2
        await orin.goodbye()


async def test_a_device_that_is_gone_for_good_is_waited_for_after_one_restart_only(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config.with_values(sessions={"check_s": 0.05})

    async def refusal(client: Client) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.plan()
        return status(refused)[1]

    async with serving_client(config) as client:
        await client.two_ready()
        client.stop.set()  # while the sessions last
        await client.running
    async with serving_client(config.with_values(sessions={"return_grace_s": 0.0})) as client:

        async def noted() -> bool:
            with closing(sqlite3.connect(config.store.location)) as store:
                return store.execute("SELECT DISTINCT state FROM device").fetchall() == [("offline",)]

        await eventually(noted)
    async with serving_client(config) as client:
        assert await refusal(client) == "no device is ready to train: orin is offline, nano is offline"


async def test_a_round_waits_for_the_devices_that_come_back_to_another_reference(
    config: CoordinatorSettings, another: Artefact
) -> None:

    async with serving_client(config) as client:
        agents = await client.two_ready()
        parts = [operator_pb2.PublishReferenceRequest(manifest=another.manifest, weights_chunk=another.weights)]
        await client.operator.PublishReference(iter(parts))
        await client.operator.PinReference(operator_pb2.PinReferenceRequest(digest=another.digest))
        for agent in agents:
            with pytest.raises(grpc.aio.AioRpcError, match="reconnect to fetch it"):
                await agent.hear([])  # earlier orders may still arrive
        orin, nano = client.agent(), client.agent()
        await orin.become_ready("orin", ORIN_FRONT, 5.0)
        with pytest.raises(grpc.aio.AioRpcError, match="waiting for devices to reconnect: 1 still missing") as refused:
            await client.plan()
        assert status(refused)[0] is grpc.StatusCode.UNAVAILABLE
        await nano.become_ready("nano", NANO_FRONT, 3.0)
        assert len((await client.plan()).assignments) == 2


@asynccontextmanager
async def blocked_reader(client: Client, hello: session_pb2.Hello) -> AsyncIterator[tuple[Agent, asyncio.Task[None]]]:
    """An agent that has sent until the network's buffers are full, and does not read any answers."""
    sent = 0

    async def flood(agent: Agent) -> None:
        nonlocal sent
        for k in range(FLOOD):
            state = session_pb2.StateReport(state=READY.state, detail="x" * 1000)
            await agent.call.write(session_pb2.SessionRequest(sequence=k + 1, state=state))
            sent += 1

    options = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(client.bound.address, options=options) as own:
        slow = Agent(session_pb2_grpc.SessionServiceStub(own))
        await slow.greet(hello)
        flooding = asyncio.create_task(flood(slow))
        before = -1
        while sent > before:
            before = sent
            await asyncio.sleep(0.3)
        assert not flooding.done()
        yield slow, flooding
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)


FLOOD = 1_000


async def test_a_slow_reader_is_not_read_from_either_and_holds_up_nobody_else(config: CoordinatorSettings) -> None:
    async def read_all(agent: Agent) -> list[int]:
        return [(await agent.call.read()).ack.sequence for _ in range(FLOOD)]

    async with serving_client(config) as client:
        other = client.agent()
        await other.hello("other")
        async with blocked_reader(client, hello_of("slow")) as (slow, flooding):
            await other.send(lease=session_pb2.Lease())
            reading = asyncio.create_task(read_all(slow))
            await flooding
            assert await reading == list(range(1, FLOOD + 1)), "no part of it was lost"
        await other.goodbye()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_boundary, "STATUS_TIMEOUT_S", 0.1)


async def test_an_agent_that_reads_nothing_does_not_hold_up_the_coordinators_stop(
    config: CoordinatorSettings, impatient: None
) -> None:

    async with serving_client(config) as client:
        # The second replaces the first, which does not read and so cannot be told.
        async with (
            blocked_reader(client, hello_of("slow", "same installation")),
            blocked_reader(client, hello_of("slow", "same installation")),
        ):
            client.stop.set()
            await client.running


async def test_an_agent_that_is_gone_before_it_could_be_told_is_no_failure(
    config: CoordinatorSettings, caplog: pytest.LogCaptureFixture
) -> None:

    async with serving_client(config) as client:
        async with blocked_reader(client, hello_of("slow")):
            client.stop.set()
            await asyncio.sleep(0.1)  # its connection breaks while it is being told
        await client.running
    assert not caplog.records, caplog.text


async def test_an_agent_that_reads_nothing_goes_offline_when_its_lease_has_lapsed(
    config: CoordinatorSettings, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.state.leases.MISSED_LEASES", 1)
    async with serving_client(config.with_values(sessions={"lease_s": 1.0, "check_s": 0.05})) as client:

        async def offline() -> bool:
            return await client.states() == {"slow": "offline"}

        async with blocked_reader(client, hello_of("slow")):
            await eventually(offline)
            again = client.agent()
            await again.hello("slow")
            await again.goodbye()
