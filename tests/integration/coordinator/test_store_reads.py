"""The store's writer: reads, loss of ownership, retention and stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from coordinator.errors import NotOwnerError, StoreUnavailableError
from coordinator.repository.writer import Writer
from coordinator.state.records import (
    ObservedTraining,
    RoundObservation,
)
from coordinator.store.store import Store
from tests.fakes.polling import eventually
from tests.fakes.recording_store import Pauses, RecordingStore, device, devices, never
from tests.fakes.records_to_store import BLANK, assert_devices, planned_round

_WITHIN_S = 20.0
_A_MOMENT_S = 0.02

T = TypeVar("T")


async def all_of(found: AsyncIterator[T]) -> list[T]:
    return [each async for each in found]


ASKED: dict[str, Callable[[Writer], Awaitable[object]]] = {
    "saved": lambda writer: writer.save(BLANK),
    "round_of": lambda writer: writer.round_of("4711/1"),
    "rounds_of": lambda writer: all_of(writer.rounds_of("4711")),
    "history_of": lambda writer: writer.history_of("4711"),
    "newest_plan_id": lambda writer: writer.newest_plan_id("4711"),
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
    assert await writer.newest_plan_id("4711") == "4711/2"
    await writer.close()


async def test_what_is_stored_does_not_wait_for_what_is_read() -> None:

    recording = RecordingStore()
    writer = Writer(recording, never)
    recording.readable.clear()
    history, reading = (asyncio.ensure_future(each) for each in (writer.history_of("1"), writer.round_of("4711/1")))
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
