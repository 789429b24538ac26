"""The store's writer: reported records are stored, transactions are few, and its queue is bounded."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import TypeVar

import pytest

from coordinator.errors import StoreUnavailableError, UnstorableRecordError
from coordinator.repository.writer import Writer
from coordinator.state.records import (
    NodeRecord,
    ObservedTraining,
    RoundObservation,
    RunRecord,
)
from coordinator.store.store import Store
from tests.fakes.polling import eventually
from tests.fakes.recording_store import Pauses, RecordingStore, device, devices, never
from tests.fakes.records_to_store import BLANK, assert_devices, planned_round

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
