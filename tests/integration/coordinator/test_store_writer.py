"""The writer: what it says is stored is stored, in few transactions, and nothing waits in it without bound."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from coordinator.repository.writer import Writer
from coordinator.state.records import (
    DeviceRecord,
    NodeRecord,
    ObservedTraining,
    RoundObservation,
    RoundRecord,
    RunRecord,
    StoredRecord,
)
from coordinator.store.errors import NotOwnerError, StoreUnavailableError, UnstorableRecordError
from coordinator.store.store import Store
from coordinator.store.times import Times, TimesOf
from tests.fakes.records_to_store import BLANK, assert_devices, planned_round
from wattfleet.planning import History

_WITHIN_S = 20.0
_A_MOMENT_S = 0.02

T = TypeVar("T")


class Paper:
    """A store that notes its transactions; it can be held up, and made to fail."""

    def __init__(self) -> None:
        self.transactions: list[tuple[StoredRecord, ...]] = []
        self.fails_with: Exception | None = None
        self.refuses: StoredRecord | None = None
        self.refuses_with: Exception = UnstorableRecordError("no such value")
        self.attempts = 0
        self.read: list[str] = []
        self.old = [["old"], [], ["older"]]
        self.forgotten: list[tuple[timedelta, Collection[str]]] = []
        self.looked = 0
        self.free, self.readable = threading.Event(), threading.Event()
        self.free.set()
        self.readable.set()

    def save(self, *records: StoredRecord) -> None:
        self.free.wait(_WITHIN_S)
        self.attempts += 1
        if self.fails_with is not None:
            raise self.fails_with
        if self.refuses in records:
            raise self.refuses_with
        self.transactions.append(records)

    def round_of(self, plan_id: str) -> RoundRecord | None:
        self._read(plan_id)
        run_id, _, number = plan_id.partition("/")
        return None if number == "gone" else planned_round(int(number), run_id)

    def times(self, of: TimesOf) -> dict[str, Times]:
        self._read("times")
        return {}

    def plan_ids_of(self, run_id: str) -> list[str]:
        self._read(run_id)
        return [f"{run_id}/{number}" for number in ("1", "gone", "2")]

    def history_of(self, run_id: str) -> History:
        self._read(run_id)
        return History().after(1, {})

    def _read(self, what: str) -> None:
        self.readable.wait(_WITHIN_S)
        if self.fails_with is not None:
            raise self.fails_with
        self.read.append(what)

    def delete_some(self, older_than: timedelta, except_runs: Collection[str] = ()) -> list[str] | None:
        if self.fails_with is not None:
            raise self.fails_with
        self.forgotten.append((older_than, except_runs))
        return self.old.pop() if self.old else None

    def require_owner(self) -> None:
        self.looked += 1
        if self.fails_with is not None:
            raise self.fails_with

    @property
    def saved(self) -> list[StoredRecord]:
        return [record for records in self.transactions for record in records]


class Pauses:
    """Pauses between attempts that end when a test says so."""

    def __init__(self) -> None:
        self.begun = 0
        self._over = asyncio.Event()

    async def __call__(self, _: float) -> None:
        self.begun += 1
        self._over.clear()
        await self._over.wait()

    def end(self) -> None:
        self._over.set()


async def never(_: float) -> None:
    pytest.fail("nothing failed")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def device(name: str, detail: str = "") -> DeviceRecord:
    return dataclasses.replace(BLANK, device_id=name, detail=detail)


def devices(count: int) -> Sequence[DeviceRecord]:
    return [device(f"device-{k}") for k in range(count)]


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

    paper = Paper()
    writer = Writer(paper, never)
    paper.free.clear()
    first = asyncio.create_task(writer.save(BLANK))
    await asyncio.sleep(_A_MOMENT_S)
    others = [asyncio.create_task(writer.save(record)) for record in devices(5_000)]
    await asyncio.sleep(_A_MOMENT_S)
    assert not first.done() and not any(task.done() for task in others), "none of it is stored yet"
    paper.free.set()
    await asyncio.gather(first, *others)
    await writer.close()
    assert [len(records) for records in paper.transactions] == [1, 5_000]


async def test_of_one_thing_only_the_newest_is_written_and_in_its_place() -> None:

    paper = Paper()
    writer = Writer(paper, never)
    paper.free.clear()
    first = asyncio.create_task(writer.save(BLANK))
    await asyncio.sleep(_A_MOMENT_S)
    runs = [RunRecord(name, "FedAvg", 3) for name in ("b", "a")]
    finished = dataclasses.replace(runs[0], finished=True)
    writer.save_soon(*runs)
    for k in range(1_000):
        writer.save_soon(device("orin", str(k)), NodeRecord(1, str(k)))
    later = asyncio.create_task(writer.save(finished))
    await asyncio.sleep(_A_MOMENT_S)
    paper.free.set()
    await asyncio.gather(first, later)
    await writer.close()
    assert paper.transactions[1] == (finished, runs[1], device("orin", "999"), NodeRecord(1, "999"))


async def test_things_of_different_kinds_are_not_taken_for_one_another() -> None:

    paper = Paper()
    writer = Writer(paper, never)
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
    assert paper.saved == records


async def test_what_could_not_be_stored_is_tried_again_by_itself_in_its_newest_state() -> None:

    paper, pauses = Paper(), Pauses()
    writer = Writer(paper, pauses)
    paper.fails_with = StoreUnavailableError("locked")
    paper.free.clear()
    refused = asyncio.create_task(writer.save(device("orin", "old"), device("nano")))
    await asyncio.sleep(_A_MOMENT_S)
    writer.save_soon(device("orin", "new"))
    paper.free.set()
    with pytest.raises(StoreUnavailableError, match="locked"):
        await refused
    await until(lambda: pauses.begun == 1)
    paper.fails_with = None
    pauses.end()
    await until(lambda: bool(paper.transactions))
    assert set(paper.saved) == {device("orin", "new"), device("nano")}
    await writer.close()
    assert len(paper.saved) == 2


async def test_while_nothing_can_be_stored_one_attempt_serves_all_who_wait() -> None:

    paper, pauses = Paper(), Pauses()
    writer = Writer(paper, pauses)
    paper.fails_with = StoreUnavailableError("full")
    with pytest.raises(StoreUnavailableError):
        await writer.save(BLANK)
    await until(lambda: pauses.begun == 1)
    waiting = [asyncio.create_task(writer.save(device("orin", str(k)))) for k in range(1_000)]
    await asyncio.sleep(_A_MOMENT_S)
    assert paper.attempts == 1
    pauses.end()
    assert {type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)} == {StoreUnavailableError}
    assert paper.attempts == 2
    paper.fails_with = None
    await writer.close()
    assert set(paper.saved) == {BLANK, device("orin", "999")}


async def test_trouble_is_logged_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:

    with caplog.at_level("INFO"):
        paper, pauses = Paper(), Pauses()
        writer = Writer(paper, pauses)
        paper.fails_with = StoreUnavailableError("the disk is full")
        writer.save_soon(BLANK)
        for attempts in (1, 2):
            await until(lambda: pauses.begun == attempts)  # noqa: B023 - awaited within the loop
            pauses.end()
        paper.fails_with = None
        await until(lambda: bool(paper.transactions))
        await writer.save(BLANK)
        await writer.close()
    assert [record.getMessage() for record in caplog.records if record.name == "coordinator.repository.writer"] == [
        "the disk is full",
        "records can be stored again",
    ]


async def test_a_value_that_no_database_takes_keeps_no_other_from_being_stored() -> None:

    paper = Paper()
    writer = Writer(paper, never)
    paper.free.clear()
    first = asyncio.create_task(writer.save(BLANK))
    await asyncio.sleep(_A_MOMENT_S)
    records = devices(100)
    paper.refuses = records[42]
    others = [asyncio.create_task(writer.save(record)) for record in records]
    both = asyncio.create_task(writer.save(NodeRecord(1, "orin"), records[42]))
    await asyncio.sleep(_A_MOMENT_S)
    paper.free.set()
    outcomes = await asyncio.gather(first, *others, return_exceptions=True)
    assert [k for k, outcome in enumerate(outcomes) if outcome is not None] == [43]
    with pytest.raises(UnstorableRecordError, match="no such value"):
        await both
    assert set(paper.saved) == {BLANK, NodeRecord(1, "orin"), *records} - {records[42]}
    assert paper.attempts < 20
    attempts = paper.attempts
    await writer.close()
    assert paper.attempts == attempts, "it is not tried again"


async def test_a_record_that_a_bug_is_in_is_told_of_and_keeps_no_other_from_being_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:

    paper = Paper()
    writer = Writer(paper, never)
    paper.refuses, paper.refuses_with = device("device-42"), ZeroDivisionError("a bug")
    outcomes = await asyncio.gather(*map(writer.save, devices(100)), return_exceptions=True)
    assert {k: repr(outcome) for k, outcome in enumerate(outcomes) if outcome is not None} == {
        42: "ZeroDivisionError('a bug')"
    }
    await writer.save(device("orin"))
    await writer.close()
    assert set(paper.saved) == {*devices(100), device("orin")} - {device("device-42")}
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


async def all_of(found: AsyncIterator[T]) -> list[T]:
    return [each async for each in found]


ASKED: dict[str, Callable[[Writer], Awaitable[object]]] = {
    "saved": lambda writer: writer.save(BLANK),
    "round_of": lambda writer: writer.round_of("4711/1"),
    "rounds_of": lambda writer: all_of(writer.rounds_of("4711")),
    "history_of": lambda writer: writer.history_of("4711"),
    "newest_plan_id": lambda writer: writer.newest_plan_id("4711"),
    "forget": lambda writer: all_of(writer.delete_old_runs(timedelta(days=1))),
}


@pytest.mark.parametrize("asked", ASKED)
async def test_a_coordinator_that_was_taken_over_learns_it(asked: str) -> None:

    paper = Paper()
    writer = Writer(paper, never)
    paper.fails_with = NotOwnerError("another one")
    with pytest.raises(NotOwnerError):
        await ASKED[asked](writer)
    assert writer.ownership_lost.is_set()
    await writer.close()
    assert not paper.transactions


async def test_an_owner_that_stores_nothing_learns_that_it_was_taken_over() -> None:

    paper, pauses = Paper(), Pauses()
    writer = Writer(paper, pauses)
    watch = asyncio.create_task(writer.watch_owner())
    for looked, trouble in enumerate((None, StoreUnavailableError("locked"), NotOwnerError("another one")), 1):
        await until(lambda: pauses.begun == looked)  # noqa: B023 - awaited within the loop
        paper.fails_with = trouble
        assert not writer.ownership_lost.is_set()
        pauses.end()
    await watch
    assert writer.ownership_lost.is_set() and paper.looked == 3
    await writer.close()


# --- reading ------------------------------------------------------------------------------------------------------


async def test_rounds_are_read_one_by_one_and_those_that_are_gone_meanwhile_left_out() -> None:

    paper = Paper()
    writer = Writer(paper, never)
    assert await all_of(writer.rounds_of("4711")) == [planned_round(1, "4711"), planned_round(2, "4711")]
    assert paper.read == ["4711", "4711/1", "4711/gone", "4711/2"]
    assert await writer.newest_plan_id("4711") == "4711/2"
    await writer.close()


async def test_what_is_stored_does_not_wait_for_what_is_read() -> None:

    paper = Paper()
    writer = Writer(paper, never)
    paper.readable.clear()
    history, reading = (asyncio.ensure_future(each) for each in (writer.history_of("1"), writer.round_of("4711/1")))
    await writer.save(BLANK)
    assert not history.done() and not reading.done()
    paper.readable.set()
    assert (await reading, len((await history).rounds)) == (planned_round(1, "4711"), 1)
    await writer.close()


async def test_a_round_is_unsaved_until_all_that_is_known_of_it_is_on_disk() -> None:

    paper = Paper()
    writer = Writer(paper, never)
    paper.free.clear()
    first = asyncio.create_task(writer.save(planned_round(1), BLANK))
    await asyncio.sleep(_A_MOMENT_S)
    assert writer.unsaved_rounds() == {"4711/1"}
    second = asyncio.create_task(writer.save(RoundObservation("4711/2", ObservedTraining("orin", 1.0, 1.0))))
    await asyncio.sleep(_A_MOMENT_S)
    assert writer.unsaved_rounds() == {"4711/1", "4711/2"}
    paper.free.set()
    await asyncio.gather(first, second)
    assert writer.unsaved_rounds() == set()
    await writer.close()


async def test_old_runs_are_forgotten_little_by_little_and_others_write_in_between() -> None:

    paper = Paper()
    writer = Writer(paper, never)
    forgotten = []
    async for run_id in writer.delete_old_runs(timedelta(days=3), {"awaited"}):
        forgotten.append(run_id)
        await writer.save(device(run_id))
    assert forgotten == ["older", "old"]
    assert paper.forgotten == [(timedelta(days=3), {"awaited"})] * 4
    await writer.close()


async def test_what_nobody_waits_for_any_more_is_stored_still() -> None:

    paper = Paper()
    writer = Writer(paper, never)
    paper.free.clear()
    waiting = [asyncio.create_task(writer.save(record)) for record in devices(3)]
    await asyncio.sleep(_A_MOMENT_S)
    for task in waiting[:2]:
        task.cancel()
    paper.free.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    await writer.close()
    assert paper.saved == devices(3)


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

    paper, pauses = Paper(), Pauses()
    writer = Writer(paper, pauses)
    paper.fails_with = StoreUnavailableError("full")
    writer.save_soon(BLANK, device("orin"))
    await until(lambda: pauses.begun == 1)
    await writer.close()
    assert paper.attempts == 2
    assert "2 records could not be stored before the coordinator stopped" in caplog.text
