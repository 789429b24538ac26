"""The coordinator and its store: who owns it, what is kept, and what clients and agents see when it fails."""

from __future__ import annotations

import asyncio
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tenacity
from click.testing import CliRunner
from sqlalchemy import URL, create_engine, event, text
from sqlalchemy.pool import Pool

from coordinator.errors import (
    NotOwnerError,
    StoreFullError,
    StoreInUseError,
    StoreUnavailableError,
    UnstorableRecordError,
)
from coordinator.repository.repository import open_store
from coordinator.server import serve
from coordinator.settings import CoordinatorSettings, StoreSettings
from coordinator.state.records import DeviceRecord, RunRecord, StoredRecord
from coordinator.store.database import database_url
from coordinator.store.ownership import AdvisoryLock, FileLock
from coordinator.store.store import Store
from tests.fakes.served import (
    READY,
    Agent,
    CertifiedFleet,
    Running,
    certified,
    runs_of,
    serving_client,
    start_run,
    status,
)
from tests.fakes.small_fleet import NODES, ORIN_FRONT, RUN, small_fleet
from tests.fakes.stored_records import BLANK, assert_devices, planned_round
from tests.fixtures.coordinator import PostgresServer
from wattfleet.common import cli
from wattfleet.common.identity.channels import open_async_channel
from wattfleet.common.identity.peers import Role
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.v1 import (
    identity_pb2,
    identity_pb2_grpc,
    session_pb2,
    view_pb2,
    view_pb2_grpc,
)

# --- Server store -----------------------------------------------------------------------------------------------------
# The coordinator process and its store: ownership, what is kept, and what clients see when the disk is full.


_WITHIN_S = 30.0


@pytest.fixture
def watchful_config(config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch) -> CoordinatorSettings:
    """A coordinator that checks often whether a store is free or has another owner."""
    monkeypatch.setattr("coordinator.repository.repository.STANDBY_CHECK_S", 0.01)
    monkeypatch.setattr("coordinator.repository.writer.OWNER_CHECK_S", 0.02)
    return config


async def test_a_second_coordinator_on_one_store_ends_at_once_and_the_first_serves_on(
    watchful_config: CoordinatorSettings,
) -> None:

    first = Running(watchful_config)
    async with first.channel() as channel:
        with pytest.raises(StoreInUseError, match="--standby"):
            await serve(watchful_config, lambda _: pytest.fail("it came up"))
        await start_run(channel, "1")
    await first.end()
    assert runs_of(watchful_config) == ["1"]


async def test_the_longest_lifetime_that_devices_were_told_is_stored(watchful_config: CoordinatorSettings) -> None:
    lifetimes_s = []
    for told_s in (60.0, 600.0, 30.0):
        running = Running(watchful_config.with_values(grants={"lifetime_s": told_s}))
        await running.bound
        store = sqlite3.connect(watchful_config.store.location)
        lifetimes_s += store.execute("SELECT lifetime_s FROM grant_lifetime").fetchall()
        store.close()
        await running.end()
    assert lifetimes_s == [(60.0,), (600.0,), (600.0,)], "devices may rely on 600 s for 600 s yet"


async def test_a_coordinator_on_standby_serves_once_the_first_is_gone(watchful_config: CoordinatorSettings) -> None:

    first, second = Running(watchful_config), None
    async with first.channel() as channel:
        await start_run(channel, "1")
        second = Running(watchful_config.with_values(store={"standby": True}))
        await asyncio.sleep(0.1)
        assert not second.bound.done(), "it listens only once it owns the store"
    await first.end()
    async with second.channel() as channel:
        view: Any = view_pb2_grpc.ViewServiceStub(channel)
        runs = [run async for answer in view.ListRuns(view_pb2.ListRunsRequest()) for run in answer.runs]
        assert runs[-1].run_id == "1"
        await start_run(channel, "2")
    await second.end()
    assert runs_of(watchful_config) == ["1", "2"]


async def test_a_standby_goes_on_with_the_authority_as_the_first_has_left_it(
    watchful_config: CoordinatorSettings, tmp_path: Path
) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    watchful_config = certified(watchful_config, fleet.authority.folder)
    first = Running(watchful_config)
    anna = fleet.identity(Role.OPERATOR, "anna")
    begin = identity_pb2.BeginRotationRequest()
    second = None
    address = (await first.bound).address
    second = Running(watchful_config.with_values(store={"standby": True}))
    async with open_async_channel(address, anna) as channel:
        await identity_pb2_grpc.IdentityServiceStub(channel).BeginRotation(begin)
    await first.end()
    async with open_async_channel((await second.bound).address, anna) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="is being replaced already"):
            await identity_pb2_grpc.IdentityServiceStub(channel).BeginRotation(begin)
    await second.end()


async def test_a_standby_takes_over_the_address_of_the_first_one(watchful_config: CoordinatorSettings) -> None:
    first = Running(watchful_config)
    async with first.channel() as channel:
        await start_run(channel, "1")
        address, http_address = (await first.bound).address, (await first.bound).http_address
        same = {"address": address, "http_address": http_address}
        second = Running(watchful_config.with_values(store={"standby": True}, server=same))
        await asyncio.sleep(0.1)
        assert not second.task.done(), "the address is in use by the one that it waits for"
    await first.end()
    async with second.channel() as channel:
        await start_run(channel, "2")
    assert (await second.bound).address == address
    await second.end()


async def test_a_standby_waits_until_its_address_is_free(watchful_config: CoordinatorSettings) -> None:
    """The previous coordinator may have lost the store, and still listen for a moment."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        in_use = f"127.0.0.1:{taken.getsockname()[1]}"
        standby = Running(watchful_config.with_values(store={"standby": True}, server={"address": in_use}))
        await asyncio.sleep(2)
        assert not standby.task.done()
    assert (await standby.bound).address == in_use
    await standby.end()


async def test_a_standby_whose_address_another_program_uses_gives_the_store_back(
    watchful_config: CoordinatorSettings,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        in_use = f"127.0.0.1:{taken.getsockname()[1]}"
        standby = watchful_config.with_values(store={"standby": True}, server={"address": in_use, "stop_limit_s": 0.1})
        with pytest.raises(InvalidInputError, match=f"cannot listen on {in_use}"):
            await serve(standby, lambda _: pytest.fail("it came up"))
    assert runs_of(watchful_config) == [], "another one can open it"


async def test_a_coordinator_that_was_taken_over_refuses_and_ends(
    watchful_config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that the request notices it before the check does.
    monkeypatch.setattr("coordinator.repository.writer.OWNER_CHECK_S", 60.0)
    first = Running(watchful_config)
    async with first.channel() as channel:
        await start_run(channel, "early")  # everything written at the start is stored
        # As if its lock had been released without its notice.
        monkeypatch.setattr(FileLock, "take", lambda _: True)
        second = Store(Path(watchful_config.store.location))
        with pytest.raises(grpc.aio.AioRpcError, match="another coordinator has taken the store over") as refused:
            await start_run(channel, "late")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(NotOwnerError):
            await first.task
        assert [run.run_id for run in second.load().runs] == ["early"]
        second.close()


async def test_a_coordinator_that_only_listens_learns_that_it_was_taken_over_and_ends(
    watchful_config: CoordinatorSettings,
    postgresql: PostgresServer,
    postgresql_database: URL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Running(
        watchful_config.with_values(store={"location": postgresql_database.render_as_string(hide_password=False)})
    )
    async with first.channel():
        # As if it had lost its database for a long time.
        monkeypatch.setattr(AdvisoryLock, "take", lambda _: True)
        second = await asyncio.to_thread(Store, postgresql_database)
        with pytest.raises(NotOwnerError, match="another coordinator has taken the store over"):
            await first.task
        second.close()


async def test_a_full_disk_is_reported_reads_work_and_all_is_stored_later(
    watchful_config: CoordinatorSettings,
) -> None:
    pages = [1_000_000_000]

    def limit(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA max_page_count={pages[-1]}")

    event.listen(Pool, "checkout", limit)
    try:
        running = Running(watchful_config)
        async with running.channel() as channel:
            await start_run(channel, "before")
            view: Any = view_pb2_grpc.ViewServiceStub(channel)
            pages.append(1)
            refused: list[grpc.aio.AioRpcError] = []
            started = 0
            while not refused:
                try:
                    await start_run(channel, f"{started:0200}")
                    started += 1
                except grpc.aio.AioRpcError as error:
                    refused.append(error)
            assert refused[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "database or disk is full" in str(refused[0].details())
            assert (await view.GetFleet(view_pb2.GetFleetRequest())).site_budget_w == 100.0
            pages.append(1_000_000_000)
            await start_run(channel, "after")
        await running.end()
        assert len(runs_of(watchful_config)) == started + 3, "the one that was refused is stored as well"
    finally:
        event.remove(Pool, "checkout", limit)


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "options", "text"),
    [
        ("mysql://fleet:hunter2@db/watts", [], "sqlite:///PATH or postgresql://USER@HOST:PORT/DATABASE"),
        ("postgresql://fleet:hunter2@127.0.0.1:1/watts", [], "postgresql://127.0.0.1:1/watts cannot be used"),
        ("coordinator.db", ["--keep-days", "0"], "--keep-days must be above 0"),
        (
            "coordinator.db",
            ["--store", "postgresql://fleet:hunter2@db/watts"],
            "--store: a password on the command line",
        ),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_without_its_password(
    store: str, options: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTFLEET_COORDINATOR_STORE_LOCATION", store)
    serve_on = ("coordinator", "serve", "--site-budget-w", "60", "--address", "127.0.0.1:0", "--http-address")
    ran = CliRunner().invoke(cli.wattfleet, [*serve_on, "127.0.0.1:0", *options])
    assert ran.exception is not None and text in str(ran.exception)
    assert "hunter2" not in f"{ran.output} {ran.exception}"


# --- Store ownership --------------------------------------------------------------------------------------------------
# One coordinator plans at a time: a second is refused or waits; one that was taken over stops writing.


def lose_the_lock(location: Path | URL, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the coordinator's lock without its noticing, as when its machine was cut off."""
    for kind in (FileLock, AdvisoryLock):
        monkeypatch.setattr(kind, "take", lambda _: True)


def test_a_second_coordinator_is_refused_and_told_what_to_do(location: Path | URL) -> None:
    first = Store(location)
    with pytest.raises(StoreInUseError, match=r"another coordinator uses .*--standby"):
        Store(location)
    first.save(BLANK)
    first.close()
    second = Store(location)
    assert_devices(second.load(), BLANK)
    second.close()


def test_two_names_of_one_file_are_one_store(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "coordinator.db")
    first = Store(tmp_path / "coordinator.db")
    for other in (tmp_path / "folder" / ".." / "coordinator.db", tmp_path / "link.db"):
        with pytest.raises(StoreInUseError):
            Store(other)
    first.close()


def test_stores_of_different_databases_have_different_owners(location: Path | URL, tmp_path: Path) -> None:
    first, second = Store(location), Store(tmp_path / "another.db")
    first.close()
    second.close()


def test_of_two_coordinators_that_plan_one_round_the_newest_owner_wins(
    location: Path | URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_lock(location, monkeypatch)
    first, first_fleet = Store(location), small_fleet()
    first.save(*first_fleet.agents.devices.values(), first_fleet.flower.run(RUN))
    first_plan = first_fleet.flower.plan(RUN, 1, NODES, 1.0)

    second, second_fleet = Store(location), small_fleet(site_budget_w=40.0)
    second_plan = second_fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert second_plan.plan_id == first_plan.plan_id and second_plan != first_plan

    with pytest.raises(NotOwnerError, match="another coordinator has taken the store over"):
        first.save(first_plan)
    assert second.load().rounds == []
    second.save(second_plan)
    for refused in (
        lambda: first.save(BLANK),
        lambda: first.save(RunRecord(RUN, "FedAvg", 1, finished=True)),
        first.load,
    ):
        with pytest.raises(NotOwnerError):
            refused()
    assert second.load().rounds == [second_plan]
    assert not second.load().runs[0].finished
    first.close()
    second.close()


def test_an_owner_that_was_planning_is_waited_for_or_loses(
    postgresql_database: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_lock(postgresql_database, monkeypatch)
    first = Store(postgresql_database)
    begun: list[StoreUnavailableError] = []
    with first._transaction() as connection:  # noqa: SLF001 - in the middle of a save
        patience = {"options": "-c lock_timeout=100ms"}
        try:
            Store(postgresql_database.update_query_dict(patience))
        except StoreUnavailableError as error:
            begun.append(error)
        connection.execute(text("SELECT 1"))
    assert "lock timeout" in str(begun[0]), "no term begins while the last owner is writing"
    second = Store(postgresql_database)
    with pytest.raises(NotOwnerError):
        first.save(planned_round())
    first.close()
    second.close()


async def test_a_coordinator_stands_by_until_the_other_is_gone(location: Path | URL) -> None:
    first = Store(location)
    first.save(BLANK)
    tried: list[float] = []

    async def sleep(seconds: float) -> None:
        tried.append(seconds)
        if len(tried) == 3:
            first.close()

    second = await open_store(location, StoreSettings(standby=True), sleep)
    assert len(tried) == 3
    assert_devices(second.load(), BLANK)
    second.close()


async def test_a_coordinator_that_is_not_to_stand_by_does_not(location: Path | URL) -> None:
    async def never(_: float) -> None:
        pytest.fail("it waits")

    first = Store(location)
    with pytest.raises(StoreInUseError):
        await open_store(location, sleep=never)
    first.close()


async def test_standing_by_outlasts_a_database_that_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Exception | None] = [StoreUnavailableError("refused"), StoreUnavailableError("refused"), None]

    def opened(location: Path | URL) -> Store:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return Store(location)

    async def sleep(_: float) -> None:
        pass

    with caplog.at_level("INFO"):
        (await open_store(tmp_path / "c.db", StoreSettings(standby=True), sleep, opened)).close()
    assert [record.getMessage() for record in caplog.records if record.name == "coordinator.repository.repository"] == [
        "standby: refused"
    ]


OWNER = """
import sys, time
from coordinator.store.database import database_url
from coordinator.store.store import Store
from tests.fakes.stored_records import BLANK
store = Store(database_url(sys.argv[1]))
store.save(BLANK)
print("owns", flush=True)
time.sleep(600)
"""


def test_the_store_of_a_killed_coordinator_is_taken_over_with_all_its_records(
    location: Path | URL,
) -> None:
    url = location if isinstance(location, URL) else database_url(location)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, url.render_as_string(hide_password=False)], stdout=subprocess.PIPE
    ) as owner:
        try:
            assert owner.stdout is not None and owner.stdout.readline() == b"owns\n"
            with pytest.raises(StoreInUseError):
                Store(location)
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait()
        # PostgreSQL soon notices that a client is gone.
        store = tenacity.retry(
            retry=tenacity.retry_if_exception_type(StoreInUseError),
            stop=tenacity.stop_after_delay(_WITHIN_S),
            wait=tenacity.wait_fixed(0.01),
            reraise=True,
        )(Store)(location)
    assert_devices(store.load(), BLANK)
    store.close()


def test_an_owner_whose_lock_was_cut_takes_it_again_before_another_can(postgresql_database: URL) -> None:
    store = Store(postgresql_database)
    engine = create_engine(postgresql_database, isolation_level="AUTOCOMMIT")
    with engine.connect() as other:
        other.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid != pg_backend_pid()"
            )
        )
        while other.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted")):
            time.sleep(0.01)
    engine.dispose()
    store.save(BLANK)
    with pytest.raises(StoreInUseError):
        Store(postgresql_database)
    store.close()


# --- Session store ----------------------------------------------------------------------------------------------------
# Agents' sessions while the store fails: they continue, and no report is acknowledged before it is on disk.

FRONT = session_pb2.FrontReport(front=front_to_message(ORIN_FRONT), idle_w=5.0, minibatches_per_epoch=100)


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
def retrying_config(config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch) -> CoordinatorSettings:
    """A coordinator that soon retries writes that have failed."""
    monkeypatch.setattr("coordinator.repository.writer.RETRY_S", 0.01)
    return config


def on_disk(retrying_config: CoordinatorSettings) -> tuple[int, list[str]]:
    """The stored fronts and states of devices."""
    connection = sqlite3.connect(retrying_config.store.location)
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
    retrying_config: CoordinatorSettings, disk: Disk
) -> None:

    async with serving_client(retrying_config) as client:
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
    retrying_config: CoordinatorSettings, disk: Disk
) -> None:

    async with serving_client(retrying_config) as client:
        disk.is_full = True
        agent = client.agent()
        await agent.hello("orin")
        await agent.call.write(session_pb2.SessionRequest(sequence=1, front=FRONT))
        await agent.call.write(report(2))
        await answered(agent)
        assert await client.states() == {"orin": "ready"}
        assert on_disk(retrying_config) == (0, [])
        disk.is_full = False
        assert await acknowledged(agent, 2) == [1, 2]
        assert on_disk(retrying_config) == (1, ["ready"])
        await agent.goodbye()


async def test_a_front_that_is_told_again_is_acknowledged_once_it_is_stored(
    retrying_config: CoordinatorSettings, disk: Disk
) -> None:

    async with serving_client(retrying_config) as client:
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
        assert on_disk(retrying_config)[0] == 1
        await second.goodbye()


async def test_leases_are_answered_while_a_transaction_takes_long(
    retrying_config: CoordinatorSettings, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.services.sessions.STORE_TIMEOUT_S", 0.05)
    async with serving_client(retrying_config) as client:
        agent = client.agent()
        await agent.hello("orin")
        disk.free.clear()
        await agent.call.write(report(1))
        await answered(agent)
        disk.free.set()
        assert await acknowledged(agent, 1) == [1]
        await agent.goodbye()


async def test_no_more_reports_wait_than_fit_and_a_new_session_begins_with_what_stands(
    retrying_config: CoordinatorSettings, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.services.sessions.MAX_UNSTORED_REPORTS", 3)
    async with serving_client(retrying_config) as client:
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


async def test_what_turns_out_to_be_unstorable_ends_its_session_only(
    retrying_config: CoordinatorSettings, disk: Disk
) -> None:

    async with serving_client(retrying_config) as client:
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
