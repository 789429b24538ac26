"""The contract of every store, in SQLite and in PostgreSQL: saved records are unchanged after a restart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import URL, create_engine, text

from coordinator.errors import UnstorableRecordError
from coordinator.state.records import (
    DeviceOverrides,
    DeviceRecord,
    DeviceResult,
    NodeRecord,
    ObservedTraining,
    PinnedReferences,
    PublishedReference,
    RoundObservation,
    RunRecord,
    SupplyOverride,
)
from coordinator.state.workload_fronts import WorkloadFront
from coordinator.store.database import database_url
from coordinator.store.store import Store
from tests.fakes.fronts import front, of_batches
from tests.fakes.records_to_store import (
    BLANK,
    assert_devices,
    comparable,
    finished_round,
    planned_round,
    rounds_of,
)
from tests.fakes.small_fleet import NANO_NODE, ORIN_NODE, RUN
from tests.fakes.store_clock import StoreClock
from tests.fakes.workload_fronts import for_all, known_fronts, of_workloads
from wattfleet.budgets import Override
from wattfleet.modes import BatchOptions, Workload, WorkloadFacts
from wattfleet_proto.device_state import DeviceState

CHOOSES = Workload("digits", WorkloadFacts(batch=16), BatchOptions((16, 64), (0.123456789012345, 1.0)))


def sql(location: Path | URL, query: str) -> list[tuple[object, ...]]:
    """Rows as another client of the database reads them."""
    engine = create_engine(location if isinstance(location, URL) else database_url(location))
    with engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(text(query))]
    engine.dispose()
    return found


def test_a_new_store_is_empty(store: Store) -> None:
    kept = store.load()
    assert (kept.devices, kept.nodes, kept.runs, kept.rounds) == ([], {}, [], [])
    assert (kept.overrides, kept.budget_overrides, kept.references, kept.pinned) == ([], {}, [], [])


# --- the operator's settings --------------------------------------------------------------------------------------


def test_what_the_operator_said_comes_back_in_its_newest_state(
    store: Store, reopen: Callable[[], Store], clock: StoreClock
) -> None:
    until = clock.now + timedelta(hours=2)
    references = [PublishedReference(digit * 64, b"{}\n", bytes(range(256))) for digit in "ab"]
    store.save(
        DeviceOverrides("orin", frozenset({"lab", "ü ö"})),
        DeviceOverrides("nano", drained=True),
        SupplyOverride("rack", Override(40.1, until)),
        SupplyOverride("roof", Override(30.0)),
        *references,
        PinnedReferences(("c" * 64, "a" * 64, "b" * 64)),
    )
    store.save(
        DeviceOverrides("nano"),
        SupplyOverride("roof", Override(20.0)),
        references[0],
        PinnedReferences(("b" * 64, "a" * 64)),
    )
    kept = reopen().load()
    assert {say.device_id: say for say in kept.overrides} == {
        "orin": DeviceOverrides("orin", frozenset({"lab", "ü ö"})),
        "nano": DeviceOverrides("nano"),
    }
    assert kept.budget_overrides == {"rack": Override(40.1, until), "roof": Override(20.0)}
    assert sorted(kept.references, key=lambda each: each.digest) == references
    assert kept.pinned == ["b" * 64, "a" * 64]


def test_what_the_operator_takes_back_is_gone(store: Store, reopen: Callable[[], Store]) -> None:
    store.save(SupplyOverride("rack", Override(40.0)), SupplyOverride("roof", Override(40.0)), PinnedReferences(("a",)))
    store.save(SupplyOverride("rack", None), PinnedReferences(()))
    store.save(SupplyOverride("rack", None), PinnedReferences(()))
    kept = reopen().load()
    assert (set(kept.budget_overrides), kept.pinned) == ({"roof"}, [])


# --- saved records after a restart --------------------------------------------------------------------------------


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
            (
                *for_all(front((10.1, 50.3), (20.2, 30.7), power_log_sd=0.0371, epoch_log_sd=1 / 3)),
                *of_workloads(bert=(front((1.0, 2.0)), None, 0), resnet18=(front((3.0, 4.0)), 2**32 - 1, 50)),
            ),
            5.123456789012345,
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
        fronts=known_fronts(power_log_sd=0.1),
        idle_w=st.none() | st.floats(0, 1e3),
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
    record = dataclasses.replace(BLANK, fronts=for_all(kept))
    store.save(record)
    assert_devices(reopen().load(), record)


def test_a_front_keeps_the_batches_that_plans_may_choose(store: Store, reopen: Callable[[], Store]) -> None:
    fronts = [
        WorkloadFront(of_batches(front((1, 30), (2, 20), (3, 10)), [64, 16, 64]), CHOOSES, 100, 5),
        WorkloadFront(front((1, 30), (2, 20)), dataclasses.replace(CHOOSES, name="not fitted yet"), 100, 5),
        WorkloadFront(front((1, 30), (2, 20)), dataclasses.replace(CHOOSES, name="chooses none", batches=None), 100, 5),
    ]
    record = dataclasses.replace(BLANK, fronts=tuple(fronts))
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
        RunRecord("y", "FedAvg", 3, workload=Workload("digits", WorkloadFacts(batch=16))),
        RunRecord("z", "FedAvg", 3, workload=CHOOSES),
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
    store.save(RoundObservation(second.plan_id, ObservedTraining("orin", 3.0, 4.0, beside_duty=True)))
    store.save(RoundObservation(second.plan_id, ObservedTraining("nano", 5.0, 6.0)))
    store.save(dataclasses.replace(second, results=(DeviceResult("nano"),)))
    kept = rounds_of(reopen(), RUN)
    assert [{name: seen.power_w for name, seen in each.observations.items()} for each in kept] == [
        {"orin": 2.0},
        {"orin": 4.0, "nano": 6.0},
    ]
    assert [name for name, seen in kept[1].observations.items() if seen.beside_duty] == ["orin"]


# --- which record replaces which ----------------------------------------------------------------------------------


def test_a_device_is_kept_once_in_its_newest_state(store: Store, reopen: Callable[[], Store]) -> None:
    store.save(BLANK)
    ready = dataclasses.replace(
        BLANK, state=DeviceState.READY, profiled_modes=50, fronts=for_all(front((1, 2))), idle_w=1.0
    )
    store.save(ready)
    newest = dataclasses.replace(ready, state=DeviceState.TRAINING)
    store.save(newest)
    assert_devices(reopen().load(), newest)


def test_a_front_is_replaced_and_removed_with_what_the_device_reports(store: Store) -> None:
    for each in (front((1, 2)), front((1, 3), (2, 2)), None, front((5, 2))):
        record = dataclasses.replace(BLANK, fronts=for_all(each))
        store.save(record)
        assert_devices(store.load(), record)


def test_of_several_states_saved_at_once_the_last_one_stays(store: Store) -> None:
    states = [dataclasses.replace(BLANK, detail=str(k), fronts=for_all(front((1, k + 1)))) for k in range(3)]
    store.save(*states)
    assert_devices(store.load(), states[-1])


def test_runs_and_rounds_keep_the_order_in_which_they_began(store: Store, reopen: Callable[[], Store]) -> None:
    names = ["9", "10", "a", "1", "Z"]
    store.save(*(RunRecord(name, "FedAvg", 1) for name in names))
    rounds = [planned_round(number) for number in (3, 1, 11, 2)]
    for record in rounds:
        store.save(record)
    store.save(RunRecord("a", "FedAvg", 1, finished=True))  # a record that is saved again keeps its position
    store.save(dataclasses.replace(rounds[1], wall_s=5.0))
    store = reopen()
    after = store.load()
    assert [record.run_id for record in after.runs] == names
    assert [record.number for record in rounds_of(store, RUN)] == [3, 1, 11, 2]
    assert [record.finished for record in after.runs] == [False, False, True, False, False]


def test_records_are_saved_all_or_none(store: Store, reopen: Callable[[], Store]) -> None:
    store.save(BLANK)
    newer = dataclasses.replace(BLANK, detail="newer", fronts=for_all(front((1, 2))))
    no_number = dataclasses.replace(planned_round(), epochs=None)  # type: ignore[arg-type]
    with pytest.raises(UnstorableRecordError, match="cannot store a value"):
        store.save(newer, RunRecord(RUN, "FedAvg", 1), NodeRecord(1, "nano"), no_number)
    after = reopen()
    assert (after.load().runs, after.load().nodes) == ([], {})
    assert_devices(after.load(), BLANK)


def test_a_front_that_could_not_be_saved_is_saved_with_the_device_the_next_time(store: Store) -> None:
    newer = dataclasses.replace(BLANK, fronts=for_all(front((1, 2))))
    with pytest.raises(UnstorableRecordError):
        store.save(newer, dataclasses.replace(planned_round(), epochs=None))  # type: ignore[arg-type]
    store.save(newer)
    assert_devices(store.load(), newer)
