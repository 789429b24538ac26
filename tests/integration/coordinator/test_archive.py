"""Rounds are evicted from memory only once they are stored, and are read back from the store unchanged."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TypeVar

import pytest

from coordinator.errors import StoreUnavailableError
from coordinator.repository.repository import FleetRepository
from coordinator.repository.writer import Writer
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceResult, ObservedTraining, RoundRecord, StoredRecord
from coordinator.state.rounds import ledger as round_cache
from coordinator.store.store import Store
from tests.fakes.small_fleet import NODES, RUN, small_fleet
from wattfleet.planning import History

_Read = TypeVar("_Read")
_WITHIN_S = 20.0


class Shaky(Store):
    """A store whose writes fail while a test says so."""

    is_locked = False

    def save(self, *records: StoredRecord) -> None:
        if self.is_locked:
            raise StoreUnavailableError("locked")
        super().save(*records)


@pytest.fixture(autouse=True)
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
