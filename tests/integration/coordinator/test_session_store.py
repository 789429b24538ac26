"""Agents' sessions while the store fails: they continue, and no report is acknowledged before it is on disk."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator

import grpc
import pytest

from coordinator.errors import StoreFullError, UnstorableRecordError
from coordinator.settings import CoordinatorSettings
from coordinator.state.records import DeviceRecord, StoredRecord
from coordinator.store.store import Store
from tests.fakes.served import READY, Agent, serving_client, status
from tests.fakes.small_fleet import ORIN_FRONT
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.v1 import session_pb2

FRONT = session_pb2.FrontReport(front=front_to_message(ORIN_FRONT), idle_w=5.0)


class Disk:
    """Determines what the coordinator's store does; by default, it stores."""

    def __init__(self) -> None:
        self.is_full = False
        self.refuses = ""
        self.free = threading.Event()
        self.free.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk, stored = Disk(), Store.save

    def save(self: Store, *records: StoredRecord) -> None:
        disk.free.wait()
        if disk.is_full:
            raise StoreFullError("the disk is full")
        if disk.refuses in [record.detail for record in records if isinstance(record, DeviceRecord) and record.detail]:
            raise UnstorableRecordError("no such value")
        stored(self, *records)

    monkeypatch.setattr(Store, "save", save)
    yield disk
    disk.free.set()


@pytest.fixture
def config(config: CoordinatorSettings) -> CoordinatorSettings:
    """A coordinator that soon retries writes that have failed."""
    return config.with_values(store={"retry_s": 0.01})


def on_disk(config: CoordinatorSettings) -> tuple[int, list[str]]:
    """The stored fronts and states of devices."""
    connection = sqlite3.connect(config.store.location)
    [[fronts]] = connection.execute("SELECT count(*) FROM workload_front")
    states = [state for (state,) in connection.execute("SELECT state FROM device ORDER BY device_id")]
    connection.close()
    return fronts, states


async def answered(agent: Agent) -> None:
    """Check that leases are answered, and that no report is acknowledged."""
    for _ in range(3):
        await agent.lease()
        await asyncio.sleep(0.02)


def report(number: int, detail: str = "parked") -> session_pb2.SessionRequest:
    state = session_pb2.StateReport(state=READY.state, profiled_modes=50, detail=detail)
    return session_pb2.SessionRequest(sequence=number, state=state)


async def acknowledged(agent: Agent, count: int) -> list[int]:
    return [(await agent.ack()).sequence for _ in range(count)]


async def test_while_the_disk_is_full_sessions_go_on_and_nothing_is_acknowledged(
    config: CoordinatorSettings, disk: Disk
) -> None:

    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        disk.is_full = True
        await orin.call.write(report(1_000, "parked again"))
        await answered(orin)
        await orin.call.write(report(1_001, "and again"))
        await orin.call.write(report(1_001, "the same once more"))
        await answered(orin)
        await answered(nano)
        assert await client.states() == {"nano": "ready", "orin": "ready"}
        with pytest.raises(grpc.aio.AioRpcError, match="the disk is full") as refused:
            await client.plan()
        assert status(refused)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED, "a request for a plan gets the error"
        disk.is_full = False
        assert await acknowledged(orin, 3) == [1_000, 1_001, 1_001]
        await orin.send(state=READY)
        assert (await client.plan()).assignments
        await orin.goodbye()
        await nano.goodbye()


async def test_a_device_can_begin_a_session_and_be_looked_at_while_the_disk_is_full(
    config: CoordinatorSettings, disk: Disk
) -> None:

    async with serving_client(config) as client:
        disk.is_full = True
        agent = client.agent()
        await agent.hello("orin")
        await agent.call.write(session_pb2.SessionRequest(sequence=1, front=FRONT))
        await agent.call.write(report(2))
        await answered(agent)
        assert await client.states() == {"orin": "ready"}
        assert on_disk(config) == (0, [])
        disk.is_full = False
        assert await acknowledged(agent, 2) == [1, 2]
        assert on_disk(config) == (1, ["ready"])
        await agent.goodbye()


async def test_a_front_that_is_told_again_is_acknowledged_once_it_is_stored(
    config: CoordinatorSettings, disk: Disk
) -> None:

    async with serving_client(config) as client:
        first, second = client.agent(), client.agent()
        await first.hello("orin")
        disk.is_full = True
        await first.call.write(session_pb2.SessionRequest(sequence=1, front=FRONT))
        await answered(first)
        await first.goodbye()
        await second.hello("orin")
        await second.call.write(session_pb2.SessionRequest(sequence=1, front=FRONT))
        await answered(second)
        disk.is_full = False
        assert await acknowledged(second, 1) == [1]
        assert on_disk(config)[0] == 1
        await second.goodbye()


async def test_leases_are_answered_while_a_transaction_takes_long(
    config: CoordinatorSettings, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_client(config.with_values(sessions={"store_timeout_s": 0.05})) as client:
        agent = client.agent()
        await agent.hello("orin")
        disk.free.clear()
        await agent.call.write(report(1))
        await answered(agent)
        disk.free.set()
        assert await acknowledged(agent, 1) == [1]
        await agent.goodbye()


async def test_no_more_reports_wait_than_fit_and_a_new_session_begins_with_what_stands(
    config: CoordinatorSettings, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_client(config.with_values(sessions={"max_unstored_reports": 3})) as client:
        agent, other, again = client.agent(), client.agent(), client.agent()
        await agent.hello("orin")
        await other.hello("other")
        disk.is_full = True
        for number in range(1, 5):
            await agent.call.write(report(number))
        with pytest.raises(grpc.aio.AioRpcError, match="3 reports wait while the store is unavailable") as refused:
            await agent.call.read()
        assert status(refused)[0] is grpc.StatusCode.UNAVAILABLE
        await answered(other)
        await again.hello("orin")
        await again.call.write(report(1))
        disk.is_full = False
        assert await acknowledged(again, 1) == [1]
        await again.goodbye()
        await other.goodbye()


async def test_what_turns_out_to_be_unstorable_ends_its_session_only(config: CoordinatorSettings, disk: Disk) -> None:

    async with serving_client(config) as client:
        agent, other = client.agent(), client.agent()
        await agent.hello("orin")
        await other.hello("other")
        disk.is_full, disk.refuses = True, "odd"
        await agent.call.write(report(1, "odd"))
        await other.call.write(report(1))
        await answered(agent)
        await answered(other)
        disk.is_full = False
        with pytest.raises(grpc.aio.AioRpcError, match="no such value") as refused:
            await agent.call.read()
        assert status(refused)[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert await acknowledged(other, 1) == [1]
        await other.goodbye()
