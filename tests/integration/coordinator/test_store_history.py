"""Stored rounds and runs: what a start loads, what is read later, times and retention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

from sqlalchemy import URL, create_engine, text

from coordinator.state.records import (
    GivenUpTraining,
    GrantLifetime,
    NodeRecord,
    RoundRecord,
    RunRecord,
    StoredGrants,
)
from coordinator.store.database import database_url
from coordinator.store.store import Store
from tests.fakes.records_to_store import (
    BLANK,
    finished_round,
    old_runs_deleted,
    planned_round,
    rounds_of,
)
from tests.fakes.small_fleet import ORIN_NODE, RUN
from tests.fakes.store_clock import StoreClock
from wattfleet.planning import History, Participation


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
