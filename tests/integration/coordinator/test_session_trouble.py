"""Agents' sessions in trouble: messages that are too large or impossible, slow readers, and fleets that reconnect."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.polling import eventually
from tests.fakes.served import READY, Agent, Client, serving_client, status
from tests.fakes.small_fleet import NANO_FRONT, ORIN_FRONT
from tests.integration.coordinator.test_sessions import INVALID, hello_of
from wattfleet.prediction import Artefact
from wattfleet_proto import error_boundary
from wattfleet_proto.v1 import operator_pb2, power_pb2, session_pb2, session_pb2_grpc


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"state": session_pb2.StateReport(state=READY.state, detail="x" * 70_000)}, "at most 65,536 bytes"),
        (
            {"front": session_pb2.FrontReport(front=power_pb2.Front(points=[power_pb2.FrontPoint()] * 1_000_000))},
            "at most 65,536 bytes",
        ),
        (
            {"front": session_pb2.FrontReport(front=power_pb2.Front(points=[power_pb2.FrontPoint()] * 10_000))},
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
    async with serving_client(
        config.with_values(sessions={"lease_s": 1.0, "missed_leases": 1, "check_s": 0.05})
    ) as client:

        async def offline() -> bool:
            return await client.states() == {"slow": "offline"}

        async with blocked_reader(client, hello_of("slow")):
            await eventually(offline)
            again = client.agent()
            await again.hello("slow")
            await again.goodbye()
