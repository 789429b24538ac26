"""When events happened, according to the store: in SQLite and in PostgreSQL, before and after a restart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from sqlalchemy import URL

from coordinator.state.records import RunRecord
from coordinator.store.store import Store
from coordinator.store.tables import OF_DEVICES, OF_RUNS, Times, of_rounds
from tests.fakes.records_to_store import BLANK, finished_round, planned_round
from tests.fakes.small_fleet import RUN

_BEGIN = datetime(2026, 3, 29, 0, 30, tzinfo=timezone.utc)


def test_times_are_when_things_were_saved_first_and_last(location: Path | URL) -> None:
    hours = 0

    def clock() -> datetime:
        return (_BEGIN + timedelta(hours=hours)).astimezone(timezone(timedelta(hours=5, minutes=30)))

    def at(hour: int) -> datetime:
        return _BEGIN + timedelta(hours=hour)

    with closing(Store(location, clock)) as store:
        store.save(BLANK, RunRecord(RUN, "FedAvg", 3), planned_round(1))
        hours = 1
        store.save(replace(BLANK, detail="parked"), finished_round(1), planned_round(2), planned_round(1, "other"))
        assert store.times(OF_RUNS) == {RUN: Times(at(0), None)}
        hours = 2
        store.save(RunRecord(RUN, "FedAvg", 3, finished=True))

    def told(ask: Callable[[Store], dict[str, Times]]) -> dict[str, Times]:
        with closing(Store(location, clock)) as after:
            return ask(after)

    assert told(lambda after: after.times(OF_DEVICES)) == {BLANK.device_id: Times(at(0), at(1))}
    assert told(lambda after: after.times(OF_RUNS)) == {RUN: Times(at(0), at(2))}
    assert told(lambda after: after.times(of_rounds(RUN))) == {
        f"{RUN}/1": Times(at(0), at(1)),
        f"{RUN}/2": Times(at(1), None),
    }
    assert Times(at(0), None).first_unix_s == _BEGIN.timestamp() and Times().first_unix_s is None
