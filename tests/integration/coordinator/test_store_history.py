"""Ended rounds: evicted from memory once they are stored, read back unchanged, and deleted when they are old."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TypeVar

import pytest
from sqlalchemy import URL, create_engine, text

from coordinator.errors import StoreUnavailableError
from coordinator.repository.repository import FleetRepository
from coordinator.repository.writer import Writer
from coordinator.state.fleet import Fleet
from coordinator.state.records import (
    DeviceResult,
    GivenUpTraining,
    GrantLifetime,
    NodeRecord,
    ObservedTraining,
    RoundRecord,
    RunRecord,
    StoredGrants,
    StoredRecord,
)
from coordinator.state.rounds import ledger as round_cache
from coordinator.store.database import database_url
from coordinator.store.store import Store
from tests.fakes.small_fleet import NODES, ORIN_NODE, RUN, small_fleet
from tests.fakes.stored_records import (
    BLANK,
    finished_round,
    old_runs_deleted,
    planned_round,
    rounds_of,
)
from tests.fixtures.coordinator import StoreClock
from wattfleet.core.planning import History, Participation

# --- Store history ----------------------------------------------------------------------------------------------------
# Stored rounds and runs: what a start loads, what is read later, times and retention.


def sql(location: Path | URL, query: str) -> list[tuple[object, ...]]:
    """Rows as another client of the database reads them."""
    engine = create_engine(location if isinstance(location, URL) else database_url(location))
    with engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(text(query))]
    engine.dispose()
    return found


def test_a_coordinator_loads_the_newest_rounds_and_reads_others_on_request(
    store: Store, reopen: Callable[[], Store]
) -> None:
    for name in ("over", "going on", "newest"):
        store.save(RunRecord(name, "FedAvg", 2, finished=name != "going on"))
        store.save(finished_round(2, name), finished_round(1, name))
    after = reopen()
    kept = after.load()
    assert kept.rounds == [finished_round(1, "going on"), finished_round(2, "newest"), finished_round(1, "newest")]
    assert [record.run_id for record in kept.runs] == ["over", "going on", "newest"]
    assert kept.archived == {"over", "going on", "newest"}
    assert rounds_of(after, "over") == [finished_round(2, "over"), finished_round(1, "over")]
    assert after.round_of("over/2") == finished_round(2, "over")
    assert (after.round_of("over/3"), after.plan_ids_of("never begun")) == (None, [])


def of_devices(record: RoundRecord, *device_ids: str) -> RoundRecord:
    plan = dataclasses.replace(record.plan, assignments=())
    return dataclasses.replace(record, plan=plan, nodes={device_id: ORIN_NODE for device_id in device_ids})


def test_an_unfinished_round_continues_until_others_have_all_its_devices(store: Store) -> None:
    store.save(
        *(RunRecord(name, "FedAvg", 9) for name in ("killed", "running")), RunRecord("ended", "F", 9, {}, "", True)
    )
    store.save(of_devices(planned_round(1, "ended"), "tx", "x"), of_devices(planned_round(1, "killed"), "orin", "nano"))
    store.save(of_devices(finished_round(1, "running"), "orin"), of_devices(finished_round(2, "running"), "orin"))
    store.save(*(of_devices(finished_round(number, "running"), "xavier") for number in (3, 4, 5)))
    newest = ["running/3", "running/4", "running/5"]
    assert [record.plan_id for record in store.load().rounds] == ["killed/1", "running/2", *newest]
    store.save(of_devices(finished_round(6, "running"), "nano"), of_devices(planned_round(7, "running"), "tx"))
    newest = ["running/5", "running/6", "running/7"]
    assert [record.plan_id for record in store.load().rounds] == ["running/2", *newest]


def test_a_training_that_was_given_up_loads_its_round_however_old(store: Store, reopen: Callable[[], Store]) -> None:
    store.save(RunRecord("running", "FedAvg", 9))
    store.save(*(of_devices(finished_round(number, "running"), f"device-{number}") for number in range(1, 7)))
    store.save(GivenUpTraining("device-2", "running/2"), GrantLifetime(600.0))
    kept = reopen().load()
    assert [record.number for record in kept.rounds] == [2, 4, 5, 6]
    assert kept.grants == StoredGrants(600.0, {"device-2": GivenUpTraining("device-2", "running/2")})


def test_a_training_that_is_over_is_removed_and_one_of_a_deleted_run_loads_nothing(
    store: Store, reopen: Callable[[], Store]
) -> None:
    store.save(RunRecord("running", "FedAvg", 9))
    store.save(*(of_devices(finished_round(number, "running"), f"device-{number}") for number in range(1, 7)))
    store.save(GivenUpTraining("device-2", "running/2"), GivenUpTraining("device-1", "deleted/1"))
    store.save(GivenUpTraining("device-2", None))
    kept = reopen().load()
    assert [record.number for record in kept.rounds] == [4, 5, 6]
    assert kept.grants == StoredGrants(0.0, {"device-1": GivenUpTraining("device-1", "deleted/1")})


def test_what_the_rounds_of_a_run_come_to_is_read_without_their_plans(store: Store) -> None:
    assert store.history_of(RUN) == History()
    store.save(finished_round(2), planned_round(3), finished_round(1), finished_round(1, "another"))
    history = store.history_of(RUN)
    assert [(past.number, past.device_ids, past.utility) for past in history.rounds] == [
        (1, ("orin", "nano"), 12.0),
        (2, ("orin", "nano"), 12.0),
    ]
    assert history.latest == {"orin": (2, Participation(False, 96.0, 0.125))}
    assert history.consecutive_failures == {"nano": (2, 2)}


def test_the_store_notes_when_things_happened(store: Store, location: Path | URL, clock: StoreClock) -> None:
    began = clock.now
    store.save(BLANK, RunRecord(RUN, "FedAvg", 1), planned_round())
    clock.pass_days(1)
    store.save(BLANK, RunRecord(RUN, "FedAvg", 1, finished=True), finished_round())
    ended = clock.now
    clock.pass_days(1)
    store.save(BLANK, RunRecord(RUN, "FedAvg", 1, {"accuracy": 1.0}, finished=True), finished_round())
    store.close()

    def times(columns: str, table: str) -> list[datetime]:
        [found] = sql(location, f"SELECT {columns} FROM {table}")
        parsed = [datetime.fromisoformat(each) if isinstance(each, str) else each for each in found]
        assert all(isinstance(each, datetime) for each in parsed)
        return [each if each.tzinfo else each.replace(tzinfo=timezone.utc) for each in parsed]  # type: ignore

    assert times("first_seen_at, last_seen_at", "device") == [began, clock.now]
    assert times("started_at, finished_at", "run") == [began, ended]
    assert times("planned_at, finished_at", "round") == [began, ended]


def test_runs_that_ended_long_ago_are_forgotten_with_all_that_belongs_to_them(
    store: Store, reopen: Callable[[], Store], location: Path | URL, clock: StoreClock
) -> None:
    for name in ("old", "unfinished", "recent"):
        store.save(RunRecord(name, "FedAvg", 1), finished_round(1, name), NodeRecord(1, "nano"))
    store.save(BLANK, RunRecord("old", "FedAvg", 1, finished=True))
    clock.pass_days(20)
    store.save(finished_round(2, "unfinished"))
    store.save(RunRecord("recent", "FedAvg", 1, finished=True))
    clock.pass_days(10.5)
    assert old_runs_deleted(store, timedelta(days=31)) == []
    assert old_runs_deleted(store, timedelta(days=30)) == ["old"]
    assert old_runs_deleted(store, timedelta(days=30)) == []
    kept = reopen().load()
    assert [record.run_id for record in kept.runs] == ["unfinished", "recent"]
    assert [record.plan_id for record in kept.rounds] == ["unfinished/1", "recent/1", "unfinished/2"]
    assert all(len(record.observations) == 2 for record in kept.rounds)
    assert (len(kept.devices), kept.nodes) == (1, {1: "nano"})
    assert sql(location, "SELECT DISTINCT plan_id FROM observation ORDER BY plan_id") == [
        ("recent/1",),
        ("unfinished/1",),
        ("unfinished/2",),
    ]


def test_unfinished_runs_are_deleted_once_untouched_for_long_enough(store: Store, clock: StoreClock) -> None:
    store.save(
        RunRecord("never planned", "FedAvg", 1), RunRecord("killed", "FedAvg", 1), RunRecord("slow", "FedAvg", 1)
    )
    store.save(planned_round(1, "killed"), planned_round(1, "slow"))
    clock.pass_days(2)
    store.save(planned_round(2, "killed"))
    clock.pass_days(2)
    store.save(finished_round(1, "slow"))
    assert old_runs_deleted(store, timedelta(days=3)) == ["never planned"]
    clock.pass_days(2)
    assert store.delete_some(timedelta(days=1), except_runs=["killed", "slow"]) is None
    assert old_runs_deleted(store, timedelta(days=3)) == ["killed"]
    clock.pass_days(2)
    assert old_runs_deleted(store, timedelta(days=3)) == ["slow"]
    kept = store.load()
    assert (kept.runs, kept.rounds, store.plan_ids_of("killed")) == ([], [], [])


def test_a_long_run_is_forgotten_in_several_transactions(store: Store, clock: StoreClock) -> None:
    store.save(RunRecord("long", "FedAvg", 20, finished=True), *(finished_round(n, "long") for n in range(1, 21)))
    clock.pass_days(10)
    left = []
    while (some := store.delete_some(timedelta(days=1))) is not None:
        left.append(len(store.plan_ids_of("long")))
        assert some == (["long"] if left[-1] == 0 else [])
        assert bool(store.load().runs) == (left[-1] > 0), "the run is deleted with its last round"
    assert len(left) > 2 and left == sorted(left, reverse=True)


def test_a_run_that_began_anew_is_not_over(store: Store, clock: StoreClock) -> None:
    store.save(RunRecord(RUN, "FedAvg", 1, finished=True), finished_round(1))
    clock.pass_days(100)
    store.save(RunRecord(RUN, "FedAvg", 1), planned_round(2))
    clock.pass_days(1)
    assert old_runs_deleted(store, timedelta(days=2)) == []


# --- Archive ----------------------------------------------------------------------------------------------------------
# Rounds are evicted from memory only once they are stored, and are read back from the store unchanged.

_Read = TypeVar("_Read")
_WITHIN_S = 20.0


class Shaky(Store):
    """A store whose writes fail while a test says so."""

    is_locked = False

    def save(self, *records: StoredRecord) -> None:
        if self.is_locked:
            raise StoreUnavailableError("locked")
        super().save(*records)


@pytest.fixture
def one_round_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_cache, "_DECISIONS", 1)


async def soon(_: float) -> None:
    await asyncio.sleep(0.001)


async def look(repository: FleetRepository) -> None:
    """Run the eviction a few times."""
    looks = iter(range(3))

    async def some(_: float) -> None:
        if next(looks, None) is None:
            raise TimeoutError
        await asyncio.sleep(0)

    with pytest.raises(TimeoutError):
        await repository.keep_evicting(some)


def finish(fleet: Fleet, number: int) -> RoundRecord:
    plan_id = fleet.flower.plan(RUN, number, NODES, 1.0).plan_id
    return fleet.rounds.finish(plan_id, [DeviceResult("orin"), DeviceResult("nano")], 30.0)


@pytest.mark.usefixtures("one_round_at_hand")
async def test_a_round_stays_at_hand_until_all_of_it_is_on_disk(tmp_path: Path) -> None:

    store, fleet = Shaky(tmp_path / "coordinator.db"), small_fleet()
    writer = Writer(store, soon)
    repository = FleetRepository(fleet, writer)
    await writer.save(fleet.flower.run(RUN), finish(fleet, 1), finish(fleet, 2))
    store.is_locked = True
    with pytest.raises(StoreUnavailableError):
        await writer.save(fleet.rounds.observe(f"{RUN}/1", ObservedTraining("orin", 20.0, 30.0)))
    await look(repository)
    assert set(fleet.rounds.records) == {f"{RUN}/1", f"{RUN}/2"}
    store.is_locked = False
    while writer.unsaved_rounds():
        await asyncio.sleep(0.001)
    await look(repository)
    assert set(fleet.rounds.records) == {f"{RUN}/2"}
    await repository.load_round(f"{RUN}/1")
    assert set(fleet.rounds.records[f"{RUN}/1"].observations) == {"orin"}
    await writer.close()
    store.close()


@pytest.mark.usefixtures("one_round_at_hand")
async def test_what_is_listed_is_what_is_at_hand_where_the_store_is_behind(tmp_path: Path) -> None:

    store, fleet = Shaky(tmp_path / "coordinator.db"), small_fleet()
    writer = Writer(store, soon)
    repository = FleetRepository(fleet, writer)
    for number in (1, 2):
        await writer.save(finish(fleet, number))
    await look(repository)
    store.is_locked = True
    writer.save_soon(fleet.flower.report_metrics(RUN, 2, {"accuracy": 0.5}), finish(fleet, 3))
    listed = [record async for record in repository.rounds_of(RUN)]
    assert [(record.number, record.metrics) for record in listed] == [(1, {}), (2, {"accuracy": 0.5}), (3, {})]
    assert f"{RUN}/1" not in fleet.rounds.records, "the round was only read"
    store.is_locked = False
    await writer.close()
    store.close()


@pytest.mark.usefixtures("one_round_at_hand")
async def test_a_burst_of_late_reports_of_one_round_reads_it_once(tmp_path: Path) -> None:
    class Counting(Store):
        read = 0

        def round_of(self, plan_id: str) -> RoundRecord | None:
            self.read += 1
            return super().round_of(plan_id)

    store, fleet = Counting(tmp_path / "coordinator.db"), small_fleet()
    writer = Writer(store, soon)
    repository = FleetRepository(fleet, writer)
    for number in (1, 2):
        await writer.save(finish(fleet, number))
    await look(repository)

    async def report(device_id: str) -> None:
        await repository.load_round(f"{RUN}/1")
        await writer.save(fleet.rounds.observe(f"{RUN}/1", ObservedTraining(device_id, 20.0, 30.0)))

    await asyncio.gather(report("orin"), report("nano"))
    assert store.read == 1
    assert set(fleet.rounds.records[f"{RUN}/1"].observations) == {"orin", "nano"}
    await repository.load_round("unknown/1")
    assert store.read == 1, "nothing is read for an unknown run"
    await writer.close()
    store.close()


class Slow(Store):
    """A store whose reads return when a test lets them, with what was on disk when they began."""

    def __init__(self, location: Path) -> None:
        super().__init__(location)
        self.reading, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.reads = 0

    def round_of(self, plan_id: str) -> RoundRecord | None:
        return self._slowly(super().round_of(plan_id))

    def history_of(self, run_id: str) -> History:
        return self._slowly(super().history_of(run_id))

    def _slowly(self, read: _Read) -> _Read:
        self.reads += 1
        self.reading.set()
        assert self.go_on.wait(_WITHIN_S)
        return read

    def hold(self) -> None:
        self.go_on.clear()
        self.reading.clear()

    async def is_reading(self) -> None:
        await asyncio.to_thread(self.reading.wait, _WITHIN_S)


@pytest.mark.usefixtures("one_round_at_hand")
async def test_a_list_in_progress_does_not_restore_rounds_that_changed_meanwhile(tmp_path: Path) -> None:

    store, fleet = Slow(tmp_path / "coordinator.db"), small_fleet()
    writer = Writer(store, soon)
    repository = FleetRepository(fleet, writer)
    for number in (1, 2):
        await writer.save(finish(fleet, number))
    await look(repository)
    await repository.load_round(f"{RUN}/1")
    store.hold()
    listing = asyncio.ensure_future(anext(repository.rounds_of(RUN)))
    await store.is_reading()
    await writer.save(fleet.flower.report_metrics(RUN, 1, {"accuracy": 0.5}))
    await writer.save(finish(fleet, 3))
    await look(repository)
    assert f"{RUN}/1" not in fleet.rounds.records
    recalling = asyncio.ensure_future(repository.load_round(f"{RUN}/1"))
    await asyncio.sleep(0)
    store.go_on.set()
    await asyncio.gather(listing, recalling)
    assert fleet.rounds.records[f"{RUN}/1"].metrics == {"accuracy": 0.5}
    await writer.close()
    store.close()


@pytest.mark.usefixtures("one_round_at_hand")
async def test_a_history_is_read_to_its_end_although_who_asked_for_it_has_gone(tmp_path: Path) -> None:

    store, fleet = Slow(tmp_path / "coordinator.db"), small_fleet()
    writer = Writer(store, soon)
    repository = FleetRepository(fleet, writer)
    for number in (1, 2):
        await writer.save(finish(fleet, number))
    await writer.save(fleet.flower.plan(RUN, 3, NODES, 1.0))
    await look(repository)
    fleet.rounds.cache.run_finished(RUN)  # its history may be evicted now
    store.hold()
    asking = [asyncio.create_task(repository.load_history(RUN)) for _ in range(3)]
    await store.is_reading()
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await writer.save(finish(fleet, 3))
    fleet.flower.start_run("next", "FedAvg", 1)
    await writer.save(fleet.flower.plan("next", 1, NODES, 1.0))
    await look(repository)
    store.go_on.set()
    await repository.load_history(RUN)
    assert store.reads == 1
    assert [past.number for past in fleet.rounds.cache.history(RUN).rounds] == [1, 2, 3]
    await writer.close()
    store.close()
