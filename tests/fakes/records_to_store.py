"""Records for tests of stores, and a way to compare them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from coordinator.state.records import DeviceRecord, DeviceResult, ObservedTraining, RoundRecord
from coordinator.store.store import Store, StoredState
from tests.fakes.fronts import columns_of
from tests.fakes.small_fleet import NODES, RUN, small_fleet

BLANK = DeviceRecord("nano", "orin-nano", "simulated", 1_800)


def old_runs_deleted(store: Store, older_than: timedelta, except_runs: Collection[str] = ()) -> list[str]:
    """Delete all old runs from a store, as its writer does; returns their ids."""
    deleted: list[str] = []
    while (some := store.delete_some(older_than, except_runs)) is not None:
        deleted += some
    return deleted


def planned_round(number: int = 1, run_id: str = RUN) -> RoundRecord:
    fleet = small_fleet()
    fleet.flower.start_run(run_id, "FedAvg", 3)
    return fleet.flower.plan(run_id, number, NODES, 1.5)


def finished_round(number: int = 1, run_id: str = RUN) -> RoundRecord:
    return dataclasses.replace(
        planned_round(number, run_id),
        observations={
            "orin": ObservedTraining("orin", 20.123456789012345, 31.25),
            "nano": ObservedTraining("nano", 36.5, 14.75),
        },
        results=(
            DeviceResult("orin", num_examples=96.0, loss=0.125),
            DeviceResult("nano", "the node is gone", share=0.0),
        ),
        metrics={"accuracy": 2 / 3},
        wall_s=41.5,
    )


def rounds_of(store: Store, run_id: str) -> list[RoundRecord]:
    """All rounds of a run that are in a store."""
    return [record for plan_id in store.plan_ids_of(run_id) if (record := store.round_of(plan_id)) is not None]


def comparable(record: DeviceRecord) -> tuple[Any, ...]:
    """A device's values in a form that can be compared, since arrays cannot be compared with `==`."""
    fronts = {
        each.name: (
            {name: values.tolist() for name, values in columns_of(each.front).items()},
            None if each.front.batch is None else each.front.batch.tolist(),
            *(getattr(each, field.name) for field in dataclasses.fields(each) if field.name != "front"),
        )
        for each in record.fronts
    }
    return (*(getattr(record, field.name) for field in dataclasses.fields(record) if field.name != "fronts"), fronts)


def comparable_devices(kept: StoredState) -> dict[str, tuple[Any, ...]]:
    return {record.device_id: comparable(record) for record in kept.devices}


def assert_devices(kept: StoredState, *expected: DeviceRecord) -> None:
    assert len(kept.devices) == len(expected)
    assert comparable_devices(kept) == {record.device_id: comparable(record) for record in expected}
