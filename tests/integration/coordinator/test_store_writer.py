"""The store's writer: what it stores and reads, its bounded queue, and a store that fails."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import signal
import sqlite3
import string
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from sqlalchemy import URL, create_engine, event, text
from sqlalchemy.pool import Pool

from coordinator.errors import NotOwnerError, StoreFullError, StoreUnavailableError, UnstorableRecordError
from coordinator.repository.repository import open_store
from coordinator.repository.writer import Writer
from coordinator.services.request_limits import STATUS
from coordinator.settings import StoreSettings
from coordinator.state.records import (
    DeviceRecord,
    NodeRecord,
    ObservedTraining,
    RoundObservation,
    RunRecord,
)
from coordinator.store.store import Store
from tests.fakes.fleets import front
from tests.fakes.polling import eventually
from tests.fakes.small_fleet import RUN
from tests.fakes.stored_records import (
    BLANK,
    Pauses,
    RecordingStore,
    assert_devices,
    device,
    devices,
    finished_round,
    for_all,
    never,
    planned_round,
    rounds_of,
)
from tests.fixtures.coordinator import PostgresServer
from wattfleet_proto.error_boundary import status_of

# --- Store writer -----------------------------------------------------------------------------------------------------
# The store's writer: reported records are stored, transactions are few, and its queue is bounded.


_WITHIN_S = 20.0
_A_MOMENT_S = 0.02

T = TypeVar("T")


async def test_what_was_saved_is_on_disk(tmp_path: Path) -> None:

    store = Store(tmp_path / "coordinator.db")
    writer = Writer(store, never)
    await writer.save(BLANK, NodeRecord(7, "nano"))
    await writer.save()
    await writer.close()
    kept = store.load()
    assert_devices(kept, BLANK)
    assert kept.nodes == {7: "nano"}
    store.close()


async def test_what_comes_during_a_transaction_goes_into_the_next_all_of_it() -> None:

    recording = RecordingStore()
    writer = Writer(recording, never)
    recording.free.clear()
    first = asyncio.create_task(writer.save(BLANK))
    await asyncio.sleep(_A_MOMENT_S)
    others = [asyncio.create_task(writer.save(record)) for record in devices(5_000)]
    await asyncio.sleep(_A_MOMENT_S)
    assert not first.done() and not any(task.done() for task in others), "none of it is stored yet"
    recording.free.set()
    await asyncio.gather(first, *others)
    await writer.close()
    assert [len(records) for records in recording.transactions] == [1, 5_000]


async def test_of_one_thing_only_the_newest_is_written_and_in_its_place() -> None:

    recording = RecordingStore()
    writer = Writer(recording, never)
    recording.free.clear()
    first = asyncio.create_task(writer.save(BLANK))
    await asyncio.sleep(_A_MOMENT_S)
    runs = [RunRecord(name, "FedAvg", 3) for name in ("b", "a")]
    finished = dataclasses.replace(runs[0], finished=True)
    writer.save_soon(*runs)
    for k in range(1_000):
        writer.save_soon(device("orin", str(k)), NodeRecord(1, str(k)))
    later = asyncio.create_task(writer.save(finished))
    await asyncio.sleep(_A_MOMENT_S)
    recording.free.set()
    await asyncio.gather(first, later)
    await writer.close()
    assert recording.transactions[1] == (finished, runs[1], device("orin", "999"), NodeRecord(1, "999"))


async def test_things_of_different_kinds_are_not_taken_for_one_another() -> None:

    recording = RecordingStore()
    writer = Writer(recording, never)
    records = [
        device("4711/1"),
        RunRecord("4711/1", "FedAvg", 1),
        planned_round(),
        RoundObservation("4711/1", ObservedTraining("orin", 1.0, 1.0)),
        RoundObservation("4711/1", ObservedTraining("nano", 1.0, 1.0)),
        NodeRecord(1, "orin"),
        NodeRecord(2, "orin"),
    ]
    await writer.save(*records)
    await writer.close()
    assert recording.saved == records


async def test_what_could_not_be_stored_is_tried_again_by_itself_in_its_newest_state() -> None:

    recording, pauses = RecordingStore(), Pauses()
    writer = Writer(recording, pauses)
    recording.fails_with = StoreUnavailableError("locked")
    recording.free.clear()
    refused = asyncio.create_task(writer.save(device("orin", "old"), device("nano")))
    await asyncio.sleep(_A_MOMENT_S)
    writer.save_soon(device("orin", "new"))
    recording.free.set()
    with pytest.raises(StoreUnavailableError, match="locked"):
        await refused
    await eventually(lambda: pauses.begun == 1)
    recording.fails_with = None
    pauses.end()
    await eventually(lambda: bool(recording.transactions))
    assert set(recording.saved) == {device("orin", "new"), device("nano")}
    await writer.close()
    assert len(recording.saved) == 2


async def test_while_nothing_can_be_stored_one_attempt_serves_all_who_wait() -> None:

    recording, pauses = RecordingStore(), Pauses()
    writer = Writer(recording, pauses)
    recording.fails_with = StoreUnavailableError("full")
    with pytest.raises(StoreUnavailableError):
        await writer.save(BLANK)
    await eventually(lambda: pauses.begun == 1)
    waiting = [asyncio.create_task(writer.save(device("orin", str(k)))) for k in range(1_000)]
    await asyncio.sleep(_A_MOMENT_S)
    assert recording.attempts == 1
    pauses.end()
    assert {type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)} == {StoreUnavailableError}
    assert recording.attempts == 2
    recording.fails_with = None
    await writer.close()
    assert set(recording.saved) == {BLANK, device("orin", "999")}


async def test_trouble_is_logged_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:

    with caplog.at_level("INFO"):
        recording, pauses = RecordingStore(), Pauses()
        writer = Writer(recording, pauses)
        recording.fails_with = StoreUnavailableError("the disk is full")
        writer.save_soon(BLANK)
        for attempts in (1, 2):
            await eventually(lambda: pauses.begun == attempts)  # noqa: B023 - awaited within the loop
            pauses.end()
        recording.fails_with = None
        await eventually(lambda: bool(recording.transactions))
        await writer.save(BLANK)
        await writer.close()
    assert [record.getMessage() for record in caplog.records if record.name == "coordinator.repository.writer"] == [
        "the disk is full",
        "records can be stored again",
    ]


async def test_a_value_that_no_database_takes_keeps_no_other_from_being_stored() -> None:

    recording = RecordingStore()
    writer = Writer(recording, never)
    recording.free.clear()
    first = asyncio.create_task(writer.save(BLANK))
    await asyncio.sleep(_A_MOMENT_S)
    records = devices(100)
    recording.refuses = records[42]
    others = [asyncio.create_task(writer.save(record)) for record in records]
    both = asyncio.create_task(writer.save(NodeRecord(1, "orin"), records[42]))
    await asyncio.sleep(_A_MOMENT_S)
    recording.free.set()
    outcomes = await asyncio.gather(first, *others, return_exceptions=True)
    assert [k for k, outcome in enumerate(outcomes) if outcome is not None] == [43]
    with pytest.raises(UnstorableRecordError, match="no such value"):
        await both
    assert set(recording.saved) == {BLANK, NodeRecord(1, "orin"), *records} - {records[42]}
    assert recording.attempts < 20
    attempts = recording.attempts
    await writer.close()
    assert recording.attempts == attempts, "it is not tried again"


async def test_a_record_that_a_bug_is_in_is_told_of_and_keeps_no_other_from_being_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:

    recording = RecordingStore()
    writer = Writer(recording, never)
    recording.refuses, recording.refuses_with = device("device-42"), ZeroDivisionError("a bug")
    outcomes = await asyncio.gather(*map(writer.save, devices(100)), return_exceptions=True)
    assert {k: repr(outcome) for k, outcome in enumerate(outcomes) if outcome is not None} == {
        42: "ZeroDivisionError('a bug')"
    }
    await writer.save(device("orin"))
    await writer.close()
    assert set(recording.saved) == {*devices(100), device("orin")} - {device("device-42")}
    [logged] = [record for record in caplog.records if record.name == "coordinator.repository.writer"]
    assert logged.exc_info is not None and logged.getMessage() == "a record was not stored: a bug"


async def test_a_round_that_no_row_can_be_made_of_takes_no_device_with_it(tmp_path: Path) -> None:
    planned = planned_round()
    first, *others = planned.plan.assignments
    no_mode = dataclasses.replace(first, mode=first.mode._replace(gpu_hz=2**64))
    no_row = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, assignments=(no_mode, *others)))

    store = Store(tmp_path / "coordinator.db")
    writer = Writer(store, never)
    innocent = asyncio.create_task(writer.save(BLANK))
    with pytest.raises(ValueError, match="out of range"):
        await writer.save(no_row)
    await innocent
    await writer.close()
    kept = store.load()
    assert_devices(kept, BLANK)
    assert kept.rounds == []
    store.close()


# --- Store reads ------------------------------------------------------------------------------------------------------
# The store's writer: reads, loss of ownership, retention and stop.


async def all_of(found: AsyncIterator[T]) -> list[T]:
    return [each async for each in found]


ASKED: dict[str, Callable[[Writer], Awaitable[object]]] = {
    "saved": lambda writer: writer.save(BLANK),
    "round_of": lambda writer: writer.read(lambda store: store.round_of("4711/1")),
    "rounds_of": lambda writer: all_of(writer.rounds_of("4711")),
    "history_of": lambda writer: writer.read(lambda store: store.history_of("4711")),
    "forget": lambda writer: all_of(writer.delete_old_runs(timedelta(days=1), set)),
}


@pytest.mark.parametrize("asked", ASKED)
async def test_a_coordinator_that_was_taken_over_learns_it(asked: str) -> None:

    recording = RecordingStore()
    writer = Writer(recording, never)
    recording.fails_with = NotOwnerError("another one")
    with pytest.raises(NotOwnerError):
        await ASKED[asked](writer)
    assert writer.ownership_lost.is_set()
    await writer.close()
    assert not recording.transactions


async def test_an_owner_that_stores_nothing_learns_that_it_was_taken_over() -> None:

    recording, pauses = RecordingStore(), Pauses()
    writer = Writer(recording, pauses)
    watch = asyncio.create_task(writer.watch_owner())
    for looked, trouble in enumerate((None, StoreUnavailableError("locked"), NotOwnerError("another one")), 1):
        await eventually(lambda: pauses.begun == looked)  # noqa: B023 - awaited within the loop
        recording.fails_with = trouble
        assert not writer.ownership_lost.is_set()
        pauses.end()
    await watch
    assert writer.ownership_lost.is_set() and recording.looked == 3
    await writer.close()


# --- reading ------------------------------------------------------------------------------------------------------


async def test_rounds_are_read_one_by_one_and_those_that_are_gone_meanwhile_left_out() -> None:

    recording = RecordingStore()
    writer = Writer(recording, never)
    assert await all_of(writer.rounds_of("4711")) == [planned_round(1, "4711"), planned_round(2, "4711")]
    assert recording.read == ["4711", "4711/1", "4711/gone", "4711/2"]
    await writer.close()


async def test_what_is_stored_does_not_wait_for_what_is_read() -> None:

    recording = RecordingStore()
    writer = Writer(recording, never)
    recording.readable.clear()
    history = asyncio.ensure_future(writer.read(lambda store: store.history_of("1")))
    reading = asyncio.ensure_future(writer.read(lambda store: store.round_of("4711/1")))
    await writer.save(BLANK)
    assert not history.done() and not reading.done()
    recording.readable.set()
    assert (await reading, len((await history).rounds)) == (planned_round(1, "4711"), 1)
    await writer.close()


async def test_a_round_is_unsaved_until_all_that_is_known_of_it_is_on_disk() -> None:

    recording = RecordingStore()
    writer = Writer(recording, never)
    recording.free.clear()
    first = asyncio.create_task(writer.save(planned_round(1), BLANK))
    await asyncio.sleep(_A_MOMENT_S)
    assert writer.unsaved_rounds() == {"4711/1"}
    second = asyncio.create_task(writer.save(RoundObservation("4711/2", ObservedTraining("orin", 1.0, 1.0))))
    await asyncio.sleep(_A_MOMENT_S)
    assert writer.unsaved_rounds() == {"4711/1", "4711/2"}
    recording.free.set()
    await asyncio.gather(first, second)
    assert writer.unsaved_rounds() == set()
    await writer.close()


async def test_old_runs_are_forgotten_little_by_little_and_others_write_in_between() -> None:

    recording = RecordingStore()
    writer = Writer(recording, never)
    forgotten = []
    async for run_id in writer.delete_old_runs(timedelta(days=3), lambda: {"awaited"}):
        forgotten.append(run_id)
        await writer.save(device(run_id))
    assert forgotten == ["older", "old"]
    assert recording.forgotten == [(timedelta(days=3), {"awaited"})] * 4
    await writer.close()


async def test_what_nobody_waits_for_any_more_is_stored_still() -> None:

    recording = RecordingStore()
    writer = Writer(recording, never)
    recording.free.clear()
    waiting = [asyncio.create_task(writer.save(record)) for record in devices(3)]
    await asyncio.sleep(_A_MOMENT_S)
    for task in waiting[:2]:
        task.cancel()
    recording.free.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    await writer.close()
    assert recording.saved == devices(3)


async def test_closing_stores_what_waits_still(tmp_path: Path) -> None:

    store = Store(tmp_path / "coordinator.db")
    writer = Writer(store, never)
    writer.save_soon(BLANK)
    await writer.close()
    assert_devices(store.load(), BLANK)
    store.close()


async def test_closing_while_nothing_can_be_stored_tries_once_and_says_what_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:

    recording, pauses = RecordingStore(), Pauses()
    writer = Writer(recording, pauses)
    recording.fails_with = StoreUnavailableError("full")
    writer.save_soon(BLANK, device("orin"))
    await eventually(lambda: pauses.begun == 1)
    await writer.close()
    assert recording.attempts == 2
    assert "2 records could not be stored before the coordinator stopped" in caplog.text


# --- Store trouble ----------------------------------------------------------------------------------------------------
# A full disk, a locked database or an unreachable server: a typed error, and no data is lost.

_TROUBLE_WITHIN_S = 60.0
_SOON_S = 0.01


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores wait only briefly for another program's lock."""
    monkeypatch.setattr("coordinator.store.database.LOCK_TIMEOUT_S", 0.02)


async def soon(_: float) -> None:
    await asyncio.sleep(_SOON_S)


def wide_device(number: int, points: int = 1) -> DeviceRecord:
    widest = front(*((1.0 + k, 100.0 - k) for k in range(points)))
    return dataclasses.replace(BLANK, device_id=f"device-{number}", fronts=for_all(widest))


def through_trouble(
    store: Store,
    trouble: Callable[[], Any],
    end: Callable[[], Any],
    kind: type[StoreUnavailableError],
    status: grpc.StatusCode,
) -> str:
    """Save records before, during and after a failure; returns the errors that were reported."""
    said: list[str] = []

    async def story() -> None:
        writer = Writer(store, soon)
        await writer.save(wide_device(0))
        trouble()
        try:
            with pytest.raises(StoreUnavailableError) as refusal:
                for number in range(1, 1_000):
                    await writer.save(wide_device(number, points=64))
            assert type(refusal.value) is kind
            assert status_of(refusal.value, STATUS) is status
            said.append(str(refusal.value))
            refused = number
        finally:
            end()
        await writer.save(wide_device(1_000))
        await writer.close()
        assert_devices(
            store.load(), wide_device(0), *(wide_device(k, 64) for k in range(1, refused + 1)), wide_device(1_000)
        )

    async def within() -> None:
        async with asyncio.timeout(_TROUBLE_WITHIN_S):
            await story()

    asyncio.run(within())
    store.close()
    assert "\n" not in said[0]
    return said[0]


@contextmanager
def pages_at_most(pages: list[int]) -> Iterator[None]:
    """SQLite files with a limited number of pages, which SQLite treats as a full disk."""

    def limit(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA max_page_count={pages[-1]}")

    event.listen(Pool, "checkout", limit)
    try:
        yield
    finally:
        event.remove(Pool, "checkout", limit)


def test_a_full_disk_under_a_file(tmp_path: Path) -> None:
    path, unlimited = tmp_path / "coordinator.db", 1_000_000_000
    pages = [unlimited]
    with pages_at_most(pages):
        said = through_trouble(
            Store(path),
            trouble=lambda: pages.append(100),
            end=lambda: pages.append(unlimited),
            kind=StoreFullError,
            status=grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
    assert said == f"the coordinator's store is unavailable: {path}: database or disk is full: free some space"


def test_a_disk_that_somebody_else_fills(small_disk: Path) -> None:
    path, rest = small_disk / "coordinator.db", small_disk / "rest"

    def fill() -> None:
        with open(rest, "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    said = through_trouble(Store(path), fill, rest.unlink, StoreFullError, status=grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert said == f"the coordinator's store is unavailable: {path}: database or disk is full: free some space"


def test_a_file_that_is_locked_for_long(tmp_path: Path, impatient: None) -> None:
    path = tmp_path / "coordinator.db"
    store = Store(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        said = through_trouble(
            store,
            trouble=lambda: other.execute("BEGIN EXCLUSIVE"),
            end=lambda: other.execute("ROLLBACK"),
            kind=StoreUnavailableError,
            status=grpc.StatusCode.UNAVAILABLE,
        )
    assert said.endswith("database is locked")


async def test_a_file_that_is_locked_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.db"
    store = Store(path)

    writer = Writer(store, soon)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        saved = asyncio.create_task(writer.save(BLANK))
        await asyncio.sleep(0.1)
        assert not saved.done()
        other.execute("ROLLBACK")
        await saved
    await writer.close()
    assert_devices(store.load(), BLANK)
    store.close()


def test_rounds_are_read_from_a_file_that_is_being_written_to(tmp_path: Path, impatient: None) -> None:
    store = Store(tmp_path / "coordinator.db")
    store.save(finished_round(1))
    with closing(sqlite3.connect(tmp_path / "coordinator.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("DELETE FROM round")
        assert rounds_of(store, RUN) == [finished_round(1)]
        assert len(store.history_of(RUN).rounds) == 1
    store.close()


def test_a_full_disk_under_postgresql(postgresql_database: URL) -> None:
    store = Store(postgresql_database)
    engine = create_engine(postgresql_database, isolation_level="AUTOCOMMIT")
    with engine.connect() as other:
        # The server's error for a full disk, without filling one.
        other.execute(
            text(
                "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS"
                " 'BEGIN RAISE EXCEPTION ''could not extend file'' USING ERRCODE = ''53100''; END'"
            )
        )
        said = through_trouble(
            store,
            trouble=lambda: other.execute(
                text("CREATE TRIGGER full_disk BEFORE INSERT ON device EXECUTE FUNCTION no_room()")
            ),
            end=lambda: other.execute(text("DROP TRIGGER full_disk ON device")),
            kind=StoreFullError,
            status=grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
    engine.dispose()
    assert said.endswith("could not extend file")


def test_a_table_of_postgresql_that_is_locked_for_long(postgresql_database: URL) -> None:
    # Combined with other options, such as the one that selects a schema.
    store = Store(postgresql_database.update_query_dict({"options": "-c search_path=public -c lock_timeout=20ms"}))
    engine = create_engine(postgresql_database)
    with engine.connect() as other:
        said = through_trouble(
            store,
            trouble=lambda: other.execute(text("LOCK TABLE device IN ACCESS EXCLUSIVE MODE")),
            end=other.rollback,
            kind=StoreUnavailableError,
            status=grpc.StatusCode.UNAVAILABLE,
        )
    engine.dispose()
    assert said.endswith("canceling statement due to lock timeout")


async def test_a_name_too_long_for_a_postgresql_index_blocks_no_other_record(
    postgresql_database: URL,
) -> None:
    store = Store(postgresql_database)
    endless = "".join(random.Random(1).choices(string.ascii_letters, k=20_000))  # random, so hardly compressible

    writer = Writer(store, soon)
    refused, first = await asyncio.gather(
        writer.save(RunRecord(endless, "FedAvg", 1)), writer.save(wide_device(1)), return_exceptions=True
    )
    assert isinstance(refused, UnstorableRecordError) and "cannot store a value: index row" in str(refused)
    assert first is None
    await writer.save(wide_device(2))
    await writer.close()
    assert_devices(store.load(), wide_device(1), wide_device(2))
    assert store.load().runs == []
    store.close()


# --- at the start -------------------------------------------------------------------------------------------------


async def test_a_file_that_is_locked_at_the_start_is_waited_for_on_standby(tmp_path: Path, impatient: None) -> None:
    path = tmp_path / "coordinator.db"
    Store(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnavailableError, match="cannot be used as the coordinator's store: database is lock"):
            Store(path)

        async def unlock(_: float) -> None:
            other.execute("ROLLBACK")

        (await open_store(path, StoreSettings(standby=True), unlock)).close()


def test_a_file_that_no_room_is_left_for_at_the_start_is_said_to_be_full(tmp_path: Path) -> None:
    path, pages = tmp_path / "coordinator.db", [1]
    with pages_at_most(pages):
        with pytest.raises(StoreFullError, match="cannot be used as the coordinator's store: database or disk is full"):
            Store(path)
        pages.append(1_000_000_000)
        Store(path).close()


@pytest.mark.parametrize("exists", [True, False])
def test_a_disk_that_is_full_at_the_start_is_said_to_be(small_disk: Path, exists: bool) -> None:
    if exists:
        Store(small_disk / "coordinator.db").close()
    with open(small_disk / "rest", "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(StoreFullError, match=r"coordinator\.db cannot be used .*disk is full: free some space$"):
        Store(small_disk / "coordinator.db")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
def test_a_server_that_goes_and_comes_back(
    postgresql: PostgresServer, postgresql_database: URL, how: signal.Signals
) -> None:
    said = through_trouble(
        Store(postgresql_database),
        trouble=lambda: postgresql.stop(how),
        end=postgresql.start,
        kind=StoreUnavailableError,
        status=grpc.StatusCode.UNAVAILABLE,
    )
    assert said.startswith(f"the coordinator's store is unavailable: postgresql://127.0.0.1:{postgresql.port}/")
