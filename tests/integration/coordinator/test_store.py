"""What every store promises, in SQLite and in PostgreSQL: what was saved is there after a restart, as it was."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import URL, create_engine, text

from coordinator.state.records import (
    DeviceOverrides,
    DeviceRecord,
    DeviceResult,
    NodeRecord,
    ObservedTraining,
    PinnedReference,
    PublishedReference,
    RoundObservation,
    RoundRecord,
    RunRecord,
    SupplyOverride,
)
from coordinator.store.database import database_url
from coordinator.store.errors import UnstorableRecordError
from coordinator.store.store import Store
from tests.fakes.fronts import front, fronts
from tests.fakes.records_to_store import (
    BLANK,
    assert_devices,
    comparable,
    finished_round,
    planned_round,
    rounds_of,
)
from tests.fakes.small_fleet import NANO_NODE, ORIN_NODE, RUN
from wattfleet.budgets import Override
from wattfleet.planning import History, Participation
from wattfleet_proto.device_state import DeviceState


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = datetime(2026, 3, 29, 0, 30, tzinfo=timezone.utc)

    def __call__(self) -> datetime:
        # In an offset that is not UTC's, as an operator's clock may be.
        return self.now.astimezone(timezone(timedelta(hours=5, minutes=30)))

    def pass_days(self, days: float) -> None:
        self.now += timedelta(days=days)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(location: Path | URL, clock: Clock) -> Iterator[Store]:
    store = Store(location, clock)
    yield store
    store.close()


@pytest.fixture
def reopen(store: Store, location: Path | URL, clock: Clock) -> Iterator[Callable[[], Store]]:
    """What the next process finds: the store closed and opened anew."""
    with ExitStack() as opened:

        def again() -> Store:
            store.close()
            after = Store(location, clock)
            opened.callback(after.close)
            return after

        yield again


def sql(location: Path | URL, query: str) -> list[tuple[object, ...]]:
    """What anybody else reads in the database."""
    engine = create_engine(location if isinstance(location, URL) else database_url(location))
    with engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(text(query))]
    engine.dispose()
    return found


def test_a_new_store_is_empty(store: Store) -> None:
    kept = store.load()
    assert (kept.devices, kept.nodes, kept.runs, kept.rounds) == ([], {}, [], [])
    assert (kept.overrides, kept.budget_overrides, kept.references, kept.pinned) == ([], {}, [], None)


# --- what the operator said ---------------------------------------------------------------------------------------


def test_what_the_operator_said_comes_back_in_its_newest_state(
    store: Store, reopen: Callable[[], Store], clock: Clock
) -> None:
    until = clock.now + timedelta(hours=2)
    references = [PublishedReference(digit * 64, b"{}\n", bytes(range(256))) for digit in "ab"]
    store.save(
        DeviceOverrides("orin", frozenset({"lab", "ü ö"})),
        DeviceOverrides("nano", drained=True),
        SupplyOverride("rack", Override(40.1, until)),
        SupplyOverride("roof", Override(30.0)),
        *references,
        PinnedReference("a" * 64),
    )
    store.save(
        DeviceOverrides("nano"), SupplyOverride("roof", Override(20.0)), references[0], PinnedReference("b" * 64)
    )
    kept = reopen().load()
    assert {say.device_id: say for say in kept.overrides} == {
        "orin": DeviceOverrides("orin", frozenset({"lab", "ü ö"})),
        "nano": DeviceOverrides("nano"),
    }
    assert kept.budget_overrides == {"rack": Override(40.1, until), "roof": Override(20.0)}
    assert sorted(kept.references, key=lambda each: each.digest) == references
    assert kept.pinned == "b" * 64


def test_what_the_operator_takes_back_is_gone(store: Store, reopen: Callable[[], Store]) -> None:
    store.save(SupplyOverride("rack", Override(40.0)), SupplyOverride("roof", Override(40.0)), PinnedReference("a"))
    store.save(SupplyOverride("rack", None), PinnedReference(None))
    store.save(SupplyOverride("rack", None), PinnedReference(None))
    kept = reopen().load()
    assert (set(kept.budget_overrides), kept.pinned) == ({"roof"}, None)


# --- each record comes back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        BLANK,
        DeviceRecord(
            "orin",
            "agx-orin",
            "hardware",
            2**32 - 1,
            DeviceState.DEGRADED,
            2**32 - 1,
            "rail VDD_CPU: 'no' \"sample\" – 100 %",
            front((10.1, 50.3), (20.2, 30.7), power_log_sd=0.0371, epoch_log_sd=1 / 3),
            5.123456789012345,
            "d" * 64,
        ),
        dataclasses.replace(BLANK, idle_w=0.0),
    ],
)
def test_a_device_comes_back_as_it_was(store: Store, reopen: Callable[[], Store], record: DeviceRecord) -> None:
    store.save(record)
    assert_devices(reopen().load(), record)


characters = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    device=st.builds(
        DeviceRecord,
        device_id=characters.filter(bool),
        board=characters,
        provenance=st.sampled_from(["simulated", "replayed", "hardware"]),
        mode_count=st.integers(1, 2**32 - 1),
        state=st.sampled_from(DeviceState),
        profiled_modes=st.integers(0, 2**32 - 1),
        detail=characters,
        front=st.none() | fronts(power_log_sd=0.1),
        idle_w=st.none() | st.floats(0, 1e3),
        reference_digest=characters,
    ),
    node_id=st.integers(0, 2**64 - 1),
)
def test_any_device_and_node_come_back(store: Store, device: DeviceRecord, node_id: int) -> None:
    store.save(device, NodeRecord(node_id, device.device_id))
    kept = store.load()
    [of_same_id] = [record for record in kept.devices if record.device_id == device.device_id]
    assert comparable(of_same_id) == comparable(device)
    assert kept.nodes[node_id] == device.device_id


def test_a_character_that_databases_have_no_room_for_is_replaced(store: Store) -> None:
    store.save(dataclasses.replace(BLANK, detail="half a line\x00 of a C program"))
    store.save(RunRecord("r", "FedAvg", 1, {}, "\x00", True))
    kept = store.load()
    assert (kept.devices[0].detail, kept.runs[0].error) == ("half a line\ufffd of a C program", "\ufffd")


def test_a_front_keeps_every_bit(store: Store, reopen: Callable[[], Store]) -> None:
    values = np.random.default_rng(5).random(64)
    kept = front(*zip(np.sort(values).tolist(), np.sort(values)[::-1].tolist(), strict=True), epoch_log_sd=0.1)
    record = dataclasses.replace(BLANK, front=kept)
    store.save(record)
    assert_devices(reopen().load(), record)


def test_node_ids_keep_all_64_bits(store: Store, reopen: Callable[[], Store]) -> None:
    nodes = {0: "a", 1: "b", 2**63 - 1: "c", 2**63: "d", 2**64 - 1: "e"}
    store.save(*(NodeRecord(node_id, device_id) for node_id, device_id in nodes.items()))
    store.save(NodeRecord(1, "another"))
    assert reopen().load().nodes == {**nodes, 1: "another"}


@pytest.mark.parametrize(
    "record",
    [
        RunRecord("4711", "FedAvg", 3),
        RunRecord("18446744073709551615", "FedAdam", 0, {"accuracy": 0.1, "loss": 2.302585092994046}, "", True),
        RunRecord("x", "Mine", 2**32 - 1, {}, "ValueError: 'nothing' came back\nat all", True),
    ],
)
def test_a_run_comes_back_as_it_was(store: Store, reopen: Callable[[], Store], record: RunRecord) -> None:
    store.save(record)
    assert reopen().load().runs == [record]


def test_a_round_comes_back_as_it_was(store: Store, reopen: Callable[[], Store]) -> None:
    planned, done = planned_round(), finished_round()
    assert set(planned.nodes.values()) == {ORIN_NODE, NANO_NODE}
    store.save(planned)
    assert rounds_of(store, RUN) == [planned]
    store.save(done)
    [kept] = rounds_of(reopen(), RUN)
    assert kept == done
    assert kept.observed_site_w == 31.25 + 14.75
    assert kept.failed == ("nano",)


def test_a_device_that_a_trimmed_plan_left_out_is_part_of_its_round_still(store: Store) -> None:
    planned = planned_round()
    trimmed = dataclasses.replace(planned.plan, assignments=planned.plan.assignments[:1])
    record = dataclasses.replace(planned, plan=trimmed)
    store.save(record)
    assert rounds_of(store, RUN) == [record]


def test_metrics_that_are_no_numbers_come_back(store: Store) -> None:
    store.save(dataclasses.replace(planned_round(), metrics={"loss": math.nan, "best": -math.inf}))
    store.save(RunRecord("r", "FedAvg", 1, {"loss": math.inf}))
    kept = store.load()
    [of_round] = rounds_of(store, RUN)
    assert math.isnan(of_round.metrics["loss"])
    assert (of_round.metrics["best"], kept.runs[0].initial_metrics) == (-math.inf, {"loss": math.inf})


def test_an_observation_alone_is_part_of_its_round(store: Store, reopen: Callable[[], Store]) -> None:
    first, second = planned_round(1), planned_round(2)
    store.save(first, second)
    store.save(RoundObservation(first.plan_id, ObservedTraining("orin", 1.0, 2.0)))
    store.save(RoundObservation(second.plan_id, ObservedTraining("orin", 3.0, 4.0)))
    store.save(RoundObservation(second.plan_id, ObservedTraining("nano", 5.0, 6.0)))
    store.save(dataclasses.replace(second, results=(DeviceResult("nano"),)))
    kept = rounds_of(reopen(), RUN)
    assert [{name: seen.power_w for name, seen in each.observations.items()} for each in kept] == [
        {"orin": 2.0},
        {"orin": 4.0, "nano": 6.0},
    ]


# --- what replaces what -------------------------------------------------------------------------------------------


def test_a_device_is_kept_once_in_its_newest_state(store: Store, reopen: Callable[[], Store]) -> None:
    store.save(BLANK)
    ready = dataclasses.replace(BLANK, state=DeviceState.READY, profiled_modes=50, front=front((1, 2)), idle_w=1.0)
    store.save(ready)
    newest = dataclasses.replace(ready, state=DeviceState.TRAINING)
    store.save(newest)
    assert_devices(reopen().load(), newest)


def test_a_front_is_replaced_and_removed_with_what_the_device_reports(store: Store) -> None:
    for each in (front((1, 2)), front((1, 3), (2, 2)), None, front((5, 2))):
        record = dataclasses.replace(BLANK, front=each)
        store.save(record)
        assert_devices(store.load(), record)


def test_of_several_states_saved_at_once_the_last_one_stays(store: Store) -> None:
    states = [dataclasses.replace(BLANK, detail=str(k), front=front((1, k + 1))) for k in range(3)]
    store.save(*states)
    assert_devices(store.load(), states[-1])


def test_runs_and_rounds_keep_the_order_in_which_they_began(store: Store, reopen: Callable[[], Store]) -> None:
    names = ["9", "10", "a", "1", "Z"]
    store.save(*(RunRecord(name, "FedAvg", 1) for name in names))
    rounds = [planned_round(number) for number in (3, 1, 11, 2)]
    for record in rounds:
        store.save(record)
    store.save(RunRecord("a", "FedAvg", 1, finished=True))  # what is saved again keeps its place
    store.save(dataclasses.replace(rounds[1], wall_s=5.0))
    store = reopen()
    after = store.load()
    assert [record.run_id for record in after.runs] == names
    assert [record.number for record in rounds_of(store, RUN)] == [3, 1, 11, 2]
    assert [record.finished for record in after.runs] == [False, False, True, False, False]


def test_records_are_saved_all_or_none(store: Store, reopen: Callable[[], Store]) -> None:
    store.save(BLANK)
    newer = dataclasses.replace(BLANK, detail="newer", front=front((1, 2)))
    no_number = dataclasses.replace(planned_round(), epochs=None)  # type: ignore[arg-type]
    with pytest.raises(UnstorableRecordError, match="cannot store a value"):
        store.save(newer, RunRecord(RUN, "FedAvg", 1), NodeRecord(1, "nano"), no_number)
    after = reopen()
    assert (after.load().runs, after.load().nodes) == ([], {})
    assert_devices(after.load(), BLANK)


def test_a_front_that_could_not_be_saved_is_saved_with_the_device_the_next_time(store: Store) -> None:
    newer = dataclasses.replace(BLANK, front=front((1, 2)))
    with pytest.raises(UnstorableRecordError):
        store.save(newer, dataclasses.replace(planned_round(), epochs=None))  # type: ignore[arg-type]
    store.save(newer)
    assert_devices(store.load(), newer)


# --- history ------------------------------------------------------------------------------------------------------


def test_a_coordinator_goes_on_with_the_newest_rounds_and_others_are_read_when_they_are_asked_for(
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


def test_a_round_that_was_not_finished_is_gone_on_with_until_others_have_all_of_its_devices(store: Store) -> None:
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


def test_the_store_notes_when_things_happened(store: Store, location: Path | URL, clock: Clock) -> None:
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
    store: Store, reopen: Callable[[], Store], location: Path | URL, clock: Clock
) -> None:
    for name in ("old", "unfinished", "recent"):
        store.save(RunRecord(name, "FedAvg", 1), finished_round(1, name), NodeRecord(1, "nano"))
    store.save(BLANK, RunRecord("old", "FedAvg", 1, finished=True))
    clock.pass_days(20)
    store.save(finished_round(2, "unfinished"))
    store.save(RunRecord("recent", "FedAvg", 1, finished=True))
    clock.pass_days(10.5)
    assert store.delete_old_runs(timedelta(days=31)) == []
    assert store.delete_old_runs(timedelta(days=30)) == ["old"]
    assert store.delete_old_runs(timedelta(days=30)) == []
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


def test_runs_that_never_ended_are_forgotten_once_they_were_left_alone_for_as_long(store: Store, clock: Clock) -> None:
    store.save(
        RunRecord("never planned", "FedAvg", 1), RunRecord("killed", "FedAvg", 1), RunRecord("slow", "FedAvg", 1)
    )
    store.save(planned_round(1, "killed"), planned_round(1, "slow"))
    clock.pass_days(2)
    store.save(planned_round(2, "killed"))
    clock.pass_days(2)
    store.save(finished_round(1, "slow"))
    assert store.delete_old_runs(timedelta(days=3)) == ["never planned"]
    clock.pass_days(2)
    assert store.delete_some(timedelta(days=1), except_runs=["killed", "slow"]) is None
    assert store.delete_old_runs(timedelta(days=3)) == ["killed"]
    clock.pass_days(2)
    assert store.delete_old_runs(timedelta(days=3)) == ["slow"]
    kept = store.load()
    assert (kept.runs, kept.rounds, store.plan_ids_of("killed")) == ([], [], [])


def test_a_long_run_is_forgotten_in_several_transactions(store: Store, clock: Clock) -> None:
    store.save(RunRecord("long", "FedAvg", 20, finished=True), *(finished_round(n, "long") for n in range(1, 21)))
    clock.pass_days(10)
    left = []
    while (some := store.delete_some(timedelta(days=1))) is not None:
        left.append(len(store.plan_ids_of("long")))
        assert some == (["long"] if left[-1] == 0 else [])
        assert bool(store.load().runs) == (left[-1] > 0), "the run goes with the last of its rounds"
    assert len(left) > 2 and left == sorted(left, reverse=True)


def test_a_run_that_began_anew_is_not_over(store: Store, clock: Clock) -> None:
    store.save(RunRecord(RUN, "FedAvg", 1, finished=True), finished_round(1))
    clock.pass_days(100)
    store.save(RunRecord(RUN, "FedAvg", 1), planned_round(2))
    clock.pass_days(1)
    assert store.delete_old_runs(timedelta(days=2)) == []
