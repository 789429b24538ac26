"""A store that records its transactions, and the pauses of its writer."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import TypeVar

import pytest

from coordinator.errors import UnstorableRecordError
from coordinator.state.identity_records import AuditEntry
from coordinator.state.records import (
    DeviceRecord,
    EventFilter,
    EventRecord,
    RoundRecord,
    StoredRecord,
    UnplannedRound,
)
from coordinator.store.tables import Times, TimesOf
from tests.fakes.records_to_store import BLANK, planned_round
from wattfleet.planning import History

_WITHIN_S = 20.0
_A_MOMENT_S = 0.02

T = TypeVar("T")


class RecordingStore:
    """A store that records its transactions; it can be delayed, and made to fail."""

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
