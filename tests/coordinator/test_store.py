"""The coordinator's store: what was saved is there after a restart, as it was."""

from __future__ import annotations

import dataclasses
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.records import DeviceRecord, DeviceResult, DeviceState, ObservedTraining, RoundRecord, RunRecord
from coordinator.store import Store
from tests.coordinator.small_fleet import NANO_NODE, NODES, ORIN_NODE, RUN, small_fleet
from tests.fronts import front, fronts
from wattfleet.errors import InvalidInputError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "coordinator.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    store = Store(path)
    yield store
    store.close()


@pytest.fixture
def reopen(store: Store, path: Path) -> Iterator[Callable[[], Store]]:
    """What the next process finds: the store closed and opened anew."""
    with ExitStack() as opened:

        def again() -> Store:
            store.close()
            after = Store(path)
            opened.callback(after.close)
            return after

        yield again


def comparable(record: DeviceRecord) -> tuple[Any, ...]:
    """A device's values; arrays do not compare as one."""
    columns = None if record.front is None else {k: v.tolist() for k, v in vars(record.front).items()}
    return (*(getattr(record, field.name) for field in dataclasses.fields(record) if field.name != "front"), columns)


def assert_devices(store: Store, *expected: DeviceRecord) -> None:
    assert [comparable(record) for record in store.devices()] == [comparable(record) for record in expected]


def planned_round(number: int = 1) -> RoundRecord:
    return small_fleet().plan(RUN, number, NODES, 1.5)


BLANK = DeviceRecord("nano", "orin-nano", "simulated", 1_800)


@pytest.mark.parametrize(
    "record",
    [
        BLANK,
        DeviceRecord(
            "orin",
            "agx-orin",
            "hardware",
            18_096,
            DeviceState.DEGRADED,
            50,
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
    assert_devices(reopen(), record)


text = st.text(st.characters(exclude_categories=("Cs",)))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    device=st.builds(
        DeviceRecord,
        device_id=text.filter(bool),
        board=text,
        evidence=st.sampled_from(["simulated", "replayed", "hardware"]),
        mode_count=st.integers(1, 2**31 - 1),
        state=st.sampled_from(DeviceState),
        profiled_modes=st.integers(0, 2**31 - 1),
        detail=text,
        front=st.none() | fronts(power_log_sd=0.1),
        idle_w=st.none() | st.floats(0, 1e3),
        reference_digest=text,
    ),
    node_id=st.integers(0, 2**64 - 1),
)
def test_any_device_and_node_come_back(store: Store, device: DeviceRecord, node_id: int) -> None:
    store.save(device)
    store.save_node(node_id, device.device_id)
    [kept] = [record for record in store.devices() if record.device_id == device.device_id]
    assert comparable(kept) == comparable(device)
    assert store.nodes()[node_id] == device.device_id


def test_a_device_is_kept_once_in_its_newest_state(store: Store, reopen: Callable[[], Store]) -> None:
    store.save(BLANK)
    newest = dataclasses.replace(BLANK, state=DeviceState.READY, profiled_modes=50, front=front((1, 2)), idle_w=1.0)
    store.save(newest)
    assert_devices(reopen(), newest)


def test_node_ids_keep_all_64_bits(store: Store, reopen: Callable[[], Store]) -> None:
    nodes = {0: "a", 1: "b", 2**63 - 1: "c", 2**63: "d", 2**64 - 1: "e"}
    for node_id, device_id in nodes.items():
        store.save_node(node_id, device_id)
    store.save_node(1, "another")
    assert reopen().nodes() == {**nodes, 1: "another"}


@pytest.mark.parametrize(
    "record",
    [
        RunRecord("4711", "FedAvg", 3),
        RunRecord("18446744073709551615", "FedAdam", 0, {"accuracy": 0.1, "loss": 2.302585092994046}, "", True),
        RunRecord("x", "Mine", 9, {}, "ValueError: 'nothing' came back\nat all", True),
    ],
)
def test_a_run_comes_back_as_it_was(store: Store, reopen: Callable[[], Store], record: RunRecord) -> None:
    store.save(record)
    assert reopen().runs() == [record]


def test_a_round_comes_back_as_it_was(store: Store, reopen: Callable[[], Store]) -> None:
    planned = planned_round()
    assert set(planned.nodes.values()) == {ORIN_NODE, NANO_NODE}
    store.save(planned)
    assert store.rounds() == [planned]

    done = dataclasses.replace(
        planned,
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
    store.save(done)
    [kept] = reopen().rounds()
    assert kept == done
    assert kept.observed_site_w == 31.25 + 14.75
    assert kept.failed == ("nano",)


def test_a_file_from_before_results_were_kept_still_tells_who_failed(
    store: Store, reopen: Callable[[], Store], path: Path
) -> None:
    store.save(dataclasses.replace(planned_round(), results=(DeviceResult("nano", "the node is gone"),), wall_s=2.0))
    with closing(sqlite3.connect(path)) as old:
        old.execute("DROP TABLE round_results")
        old.commit()
    [kept] = reopen().rounds()
    assert (kept.failed, kept.results[0].failure) == (("nano",), "no usable reply")


def test_observations_belong_to_their_round(store: Store) -> None:
    first, second = planned_round(1), planned_round(2)
    store.save(dataclasses.replace(first, observations={"orin": ObservedTraining("orin", 1.0, 2.0)}))
    store.save(dataclasses.replace(second, observations={"orin": ObservedTraining("orin", 3.0, 4.0)}))
    assert [record.observations["orin"].power_w for record in store.rounds()] == [2.0, 4.0]


def test_runs_and_rounds_keep_the_order_in_which_they_began(store: Store, reopen: Callable[[], Store]) -> None:
    names = ["9", "10", "a", "1", "Z"]
    for name in names:
        store.save(RunRecord(name, "FedAvg", 1))
    rounds = [planned_round(number) for number in (3, 1, 11, 2)]
    for record in rounds:
        store.save(record)
    store.save(RunRecord("a", "FedAvg", 1, finished=True))  # what is saved again keeps its place
    store.save(dataclasses.replace(rounds[1], wall_s=5.0))
    after = reopen()
    assert [record.run_id for record in after.runs()] == names
    assert [record.number for record in after.rounds()] == [3, 1, 11, 2]
    assert [record.finished for record in after.runs()] == [False, False, True, False, False]


def test_a_new_store_is_empty_and_makes_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "var" / "lib" / "wattfleet" / "fleet.db"
    store = Store(path)
    assert (store.devices(), store.nodes(), store.runs(), store.rounds()) == ([], {}, [], [])
    store.close()
    assert path.is_file()


@pytest.mark.parametrize("name", ["what?.db", "50%20W.db", "a #b.db"])
def test_the_file_has_the_name_that_was_given(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / name)
    store.save(BLANK)
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_is_saved_survives_a_process_that_is_killed(store: Store, path: Path, tmp_path: Path) -> None:
    # The files as they lie while the first process still has them open: what a kill leaves behind.
    store.save(BLANK)
    store.save_node(2**64 - 1, "nano")
    left = tmp_path / "left"
    left.mkdir()
    for file in tmp_path.glob("coordinator.db*"):
        shutil.copy(file, left)
    after = Store(left / path.name)
    assert_devices(after, BLANK)
    assert after.nodes() == {2**64 - 1: "nano"}
    after.close()


def test_a_front_keeps_every_bit(store: Store, reopen: Callable[[], Store]) -> None:
    values = np.random.default_rng(5).random(64)
    kept = front(*zip(np.sort(values).tolist(), np.sort(values)[::-1].tolist(), strict=True), epoch_log_sd=0.1)
    record = dataclasses.replace(BLANK, front=kept)
    store.save(record)
    assert_devices(reopen(), record)


def no_database(path: Path) -> None:
    path.write_bytes(b"cores,cpu_khz\n" * 100)


def a_directory(path: Path) -> None:
    path.mkdir()


def below_a_file(path: Path) -> None:
    path.parent.write_text("")


@pytest.mark.parametrize("made", [no_database, a_directory, below_a_file])
def test_what_is_no_database_is_refused_and_left_alone(tmp_path: Path, made: Any) -> None:
    path = tmp_path / "here" / "coordinator.db"
    if made is not below_a_file:
        path.parent.mkdir()
    made(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(InvalidInputError) as refusal:
        Store(path)
    assert str(refusal.value).startswith(f"{path}: cannot be used as the coordinator's store: ")
    assert "\n" not in str(refusal.value)
    assert (path.read_bytes() if path.is_file() else None) == before
