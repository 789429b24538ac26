"""Records for tests of stores, full stores, a made-up next version, and a store that only records its transactions."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

import pytest
from alembic.config import Config
from hypothesis import strategies as st
from sqlalchemy import URL

from coordinator.clocks import BootClock
from coordinator.errors import UnstorableRecordError
from coordinator.state.identity_records import AuditEntry
from coordinator.state.records import (
    DeviceOverrides,
    DeviceRecord,
    DeviceResult,
    EventFilter,
    EventRecord,
    NodeRecord,
    ObservedTraining,
    PinnedReferences,
    PublishedReference,
    RoundRecord,
    RunRecord,
    StoredRecord,
    SupplyOverride,
    UnplannedRound,
)
from coordinator.state.workload_fronts import WorkloadFront
from coordinator.store import database
from coordinator.store.store import Store, StoredState
from coordinator.store.tables import OF_DEVICES, OF_RUNS, Times, TimesOf, of_rounds
from tests.fakes.fleets import columns_of, front, fronts, of_batches
from tests.fakes.small_fleet import NODES, RUN, small_fleet
from wattfleet.core.budgets import Override
from wattfleet.core.choosing import Front
from wattfleet.core.modes import BatchOptions, Processor, Task, Workload, WorkloadFacts
from wattfleet.core.planning import History

# --- Workload fronts --------------------------------------------------------------------------------------------------
# Fronts of several workloads on one device, for tests.


def for_all(front: Front | None) -> tuple[WorkloadFront, ...]:
    """What the coordinator knows of a device whose agent does not know workloads."""
    return () if front is None else (WorkloadFront(front),)


def only_front(record: DeviceRecord) -> Front | None:
    """The front of a device that has at most one."""
    [*known] = record.fronts
    assert len(known) <= 1
    return known[0].front if known else None


def of_workloads(**known: tuple[Front, int | None, int]) -> tuple[WorkloadFront, ...]:
    """Fronts by workload, each with the minibatches in an epoch and the number of measured modes."""
    return tuple(
        WorkloadFront(front, Workload(name), minibatches, modes) for name, (front, minibatches, modes) in known.items()
    )


names = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=20)
facts = st.builds(
    WorkloadFacts,
    task=st.sampled_from(Task),
    batch=st.none() | st.integers(1, 10**6),
    loader_workers=st.none() | st.integers(0, 64),
    processor=st.sampled_from(Processor),
    parameters=st.none() | st.floats(1, 1e12),
    step_flops=st.none() | st.floats(1, 1e15),
    precision=st.none() | st.sampled_from(["float32", "bfloat16"]),
)
options = st.dictionaries(st.integers(1, 10**6), st.floats(0.1, 10.0), min_size=1, max_size=16).map(BatchOptions.of)
workloads = st.builds(Workload, names, facts, st.none() | options)


@st.composite
def fronts_of(draw: st.DrawFn, workload: Workload, power_log_sd: float) -> Front:
    """A front whose points may differ in batch size, if plans choose it."""
    found = draw(fronts(power_log_sd=power_log_sd))
    if workload.batches is None or draw(st.booleans()):
        return found
    return of_batches(found, [draw(st.sampled_from(workload.batches.batches)) for _ in range(len(found))])


@st.composite
def known_fronts(draw: st.DrawFn, most: int = 4, power_log_sd: float = 0.0) -> tuple[WorkloadFront, ...]:
    """The known fronts of a device, for several workloads or for all."""
    found = draw(st.lists(workloads, max_size=most, unique_by=lambda workload: workload.name))
    known = [
        WorkloadFront(
            draw(fronts_of(workload, power_log_sd)),
            workload,
            draw(st.none() | st.integers(1, 2**32 - 1)),
            draw(st.integers(0, 2**32 - 1)),
            draw(st.text("0123456789abcdef", max_size=64)),
        )
        for workload in found
    ]
    if draw(st.booleans()):
        known.append(
            WorkloadFront(draw(fronts(power_log_sd=power_log_sd)), profiled_modes=draw(st.integers(0, 2**32 - 1)))
        )
    return tuple(known)


# --- Records to store -------------------------------------------------------------------------------------------------
# Records for tests of stores, and a way to compare them.

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


# --- Full store -------------------------------------------------------------------------------------------------------
# A store with a record of every kind, and everything it returns.

NOW = datetime(2026, 3, 29, 0, 30, tzinfo=timezone.utc)


def fill(location: Path | URL, devices: int = 12, rounds: int = 5) -> None:
    """Create and fill a store, and close it."""
    with closing(Store(location, lambda: NOW, clock=BootClock("a boot", lambda: 1.0))) as store:
        wide = front(*((1.0 + k, 100.0 - k) for k in range(40)))
        store.save(
            *(
                dataclasses.replace(BLANK, device_id=f"nano-{k}", fronts=for_all(wide), idle_w=3.5)
                for k in range(devices)
            ),
            *(NodeRecord(2**63 + k, f"nano-{k}") for k in range(devices)),
            RunRecord("4710", "FedAdam", 7, {"accuracy": 0.1}, "ValueError: no", True),
            RunRecord(RUN, "FedAvg", rounds, {"accuracy": 0.1}),
        )
        for run_id in ("4710", RUN):
            store.save(*(finished_round(number, run_id) for number in range(1, rounds + 1)))
        store.save(
            planned_round(rounds + 1),
            DeviceOverrides("nano-1", frozenset({"lab", "solar"}), True),
            SupplyOverride("site", Override(45.5, datetime(2026, 3, 29, 2, 30, tzinfo=timezone.utc))),
            PublishedReference("ab" * 32, b"{}" * 400, bytes(range(256)) * 20),
            PinnedReferences(("ab" * 32,)),
        )


def served_by(store: Store) -> dict[str, Any]:
    """Everything that a store returns."""
    kept = store.load()
    served: dict[str, Any] = {
        "devices": comparable_devices(kept),
        **{name: getattr(kept, name) for name in ("nodes", "runs", "rounds", "overrides", "budget_overrides")},
        **{name: getattr(kept, name) for name in ("references", "pinned")},
        "times": [store.times(OF_DEVICES), store.times(OF_RUNS)],
    }
    for run_id in ("4710", RUN):
        served[run_id] = (rounds_of(store, run_id), store.history_of(run_id), store.times(of_rounds(run_id)))
    return served


def everything_in(location: Path | URL, now: Callable[[], datetime] = lambda: NOW) -> dict[str, Any]:
    """Everything that a store returns when it is opened."""
    with closing(Store(location, now)) as store:
        return served_by(store)


# --- Next version -----------------------------------------------------------------------------------------------------
# A made-up next version of the tables, so that upgrades can be tested.

NEXT_VERSION = "made_up"

_MIGRATION = """
import json

import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{down_revision}"


def upgrade():
    op.add_column("run", sa.Column("metric_count", sa.Integer()))
    runs = op.get_bind().execute(sa.text("SELECT run_id, initial_metrics FROM run")).all()
    for run in runs:
        op.get_bind().execute(
            sa.text("UPDATE run SET metric_count = :count WHERE run_id = :run_id"),
            {{"count": len(json.loads(run.initial_metrics)), "run_id": run.run_id}},
        )
"""


@contextmanager
def next_version(folder: Path) -> Iterator[None]:
    """Make a version that adds a column to runs, and fills it from their metrics, the newest one for a while.

    Args:
        folder: a new folder for the migrations.
    """
    script_location = database.migration_config().get_main_option("script_location")
    assert script_location is not None
    shutil.copytree(script_location, folder)
    migration = _MIGRATION.format(revision=NEXT_VERSION, down_revision=database.newest_version())
    (folder / "versions" / f"{NEXT_VERSION}.py").write_text(migration)
    config = Config()
    config.set_main_option("script_location", str(folder))
    known = database._versions  # noqa: SLF001 - their files are read only once
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(database, "migration_config", lambda: config)
            known.cache_clear()
            yield
    finally:
        known.cache_clear()


# --- Recording store --------------------------------------------------------------------------------------------------
# A store that records its transactions, and the pauses of its writer.

_WITHIN_S = 20.0
_A_MOMENT_S = 0.02

T = TypeVar("T")


class RecordingStore(Store):
    """A store that records its transactions; it can be delayed, and made to fail. It has no database."""

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

    def unplanned_of(self, run_id: str, number: int) -> UnplannedRound | None:
        self._read(f"{run_id}/{number}")
        return None

    def times(self, of: TimesOf) -> dict[str, Times]:
        self._read("times")
        return {}

    def audit_entries(self, since: datetime | None, limit: int) -> list[AuditEntry]:
        self._read("audit log")
        return [each for each in self.saved if isinstance(each, AuditEntry)][-limit:]

    def events(self, wanted: EventFilter) -> list[EventRecord]:
        self._read("events")
        return [each for each in self.saved if isinstance(each, EventRecord)][: -wanted.limit - 1 : -1]

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

    def delete_some_of(self, run_id: str) -> bool:
        if self.fails_with is not None:
            raise self.fails_with
        return True

    def require_owner(self) -> None:
        self.looked += 1
        if self.fails_with is not None:
            raise self.fails_with

    @property
    def saved(self) -> list[StoredRecord]:
        return [record for records in self.transactions for record in records]


class Pauses:
    """Pauses between attempts that end when the test ends them."""

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


def device(name: str, detail: str = "") -> DeviceRecord:
    return dataclasses.replace(BLANK, device_id=name, detail=detail)


def devices(count: int) -> Sequence[DeviceRecord]:
    return [device(f"device-{k}") for k in range(count)]
