"""The batch sizes that an app lets the plan choose from, and the one that each device gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import GridOfNodes, PlannerStub, trained
from tests.fakes.power_aware_runs import ARRAYS, KNOWN, A, B, C, D, fleet
from wattfleet.choosing import BatchEfficiency
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BatchOptions, Workload, WorkloadFacts
from wattfleet_flower import BatchChoice, PowerAware
from wattfleet_proto.assignment import WORK_KEY, AssignedWork
from wattfleet_proto.v1 import planning_pb2

# To reach the same accuracy, a batch size of 64 needs twice as many samples as one of 16.
EFFICIENCY = BatchEfficiency("m", (16, 32, 64), (0.5, 0.75, 1.0), (0.0,) * 3, "test", unreached=(128,))
CHOICE = BatchChoice([64, 16, 32], base_batch=32, efficiency=EFFICIENCY)


def assigned(batch: int, device_id: str = "a") -> planning_pb2.Assignment:
    return planning_pb2.Assignment(device_id=device_id, batch=batch)


# --- the choice ---------------------------------------------------------------------------------------------------


def test_devices_learn_the_batches_with_their_samples() -> None:
    assert CHOICE.options == BatchOptions((16, 32, 64), (0.5, 0.75, 1.0))


def test_without_an_efficiency_all_batches_need_the_same_samples() -> None:
    assert BatchChoice((8, 4), base_batch=8).options == BatchOptions((4, 8), (1.0, 1.0))


def test_batches_that_can_be_read_only_once_are_kept() -> None:
    choice = BatchChoice(map(int, "16,32".split(",")), base_batch=16)
    assert choice.options == choice.options == BatchOptions((16, 32), (1.0, 1.0))
    assert choice == BatchChoice((32, 16), base_batch=16)


@pytest.mark.parametrize(
    ("optimizer", "scales"),
    [
        ("sgd", {16: 0.5, 32: 1.0, 64: 2.0}),
        ("adam", {16: 0.5**0.5, 32: 1.0, 64: 2.0**0.5}),
        ("adamw", {16: 0.5**0.5, 32: 1.0, 64: 2.0**0.5}),
        ("none", {16: 1.0, 32: 1.0, 64: 1.0}),
    ],
)
def test_the_learning_rate_is_scaled_from_the_apps_own_batch(optimizer: str, scales: Mapping[int, float]) -> None:
    choice = BatchChoice((16, 32, 64), base_batch=32, optimizer=optimizer)
    assert {batch: choice.lr_scale(batch) for batch in scales} == pytest.approx(scales)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"base_batch": 48}, "base_batch: 48 is not among the batches"),
        ({"batches": ()}, "is not among the batches"),
        ({"batches": (16, 16, 32)}, "batches: .*16, 16, 32"),
        ({"batches": (0, 32)}, "must be a whole number of samples"),
        ({"batches": (32, 2.5)}, "must be a whole number of samples"),
        ({"batches": range(1, 40)}, "1 to 16 batch sizes, not 39"),
        ({"optimizer": "lion"}, "no scaling is known for the optimizer 'lion'"),
        ({"efficiency": EFFICIENCY, "batches": (8, 32)}, "the efficiency of batch 8 is not known"),
        ({"efficiency": EFFICIENCY, "batches": (32, 128)}, "batch 128 did not reach the target accuracy"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_at_once(wrong: Mapping[str, Any], error: str) -> None:
    with pytest.raises(InvalidInputError, match=error):
        BatchChoice(**{"batches": (16, 32), "base_batch": 32, **wrong})


# --- the workload of the run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stated", [None, 32])
def test_the_workload_states_the_apps_own_batch_and_the_options(stated: int | None) -> None:
    workload = CHOICE.of_workload(Workload("digits", WorkloadFacts(batch=stated, parameters=1e6)))
    assert workload == Workload("digits", WorkloadFacts(batch=32, parameters=1e6), CHOICE.options)
    assert workload.choice == CHOICE.options


def test_a_workload_of_another_batch_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="states batches of 16 samples, but base_batch is 32: state only one"):
        CHOICE.of_workload(Workload("digits", WorkloadFacts(batch=16)))


# --- the work of a device -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "work"),
    [
        (16, AssignedWork(16, lr_scale=0.5, passes=2 / 3)),
        (32, AssignedWork(32, lr_scale=1.0, passes=1.0)),
        (64, AssignedWork(64, lr_scale=2.0, passes=4 / 3)),
    ],
)
def test_the_work_of_each_batch_by_hand(batch: int, work: AssignedWork) -> None:
    assert CHOICE.work_of(assigned(batch)) == work


@pytest.mark.parametrize("batch", [0, 48])
def test_a_device_whose_batch_was_not_chosen_trains_with_its_own(batch: int) -> None:
    assert CHOICE.work_of(assigned(batch)) == AssignedWork()


class PlannerOfBatches(PlannerStub):
    """Plans a batch size for each device."""

    batches: Mapping[str, int] = {}

    def _assignment(self, node_id: int) -> planning_pb2.Assignment:
        made = super()._assignment(node_id)
        made.batch = self.batches[self.nodes[node_id]]
        return made


@pytest.fixture
def planner() -> Iterator[PlannerOfBatches]:
    planner = PlannerOfBatches(nodes=dict(KNOWN))
    planner.batches = {"a": 16, "b": 32, "c": 64, "d": 48}
    yield planner


def run(grid: GridOfNodes, planner: PlannerStub, rounds: int = 1, **options: Any) -> None:
    strategy = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock, workload="digits", **options)
    strategy.start(grid, ARRAYS, num_rounds=rounds)


def test_each_node_is_told_its_own_work(planner: PlannerOfBatches) -> None:
    grid = GridOfNodes(fleet())
    run(grid, planner, batches=CHOICE)
    told = {message.metadata.dst_node_id: message.content.get(WORK_KEY) for message in grid.trainings()}
    assert set(told) == {A, B, C, D}
    assert told.pop(D) is None, "no option: it trains with the app's own batch"
    read = {node: AssignedWork.from_record(record) for node, record in told.items() if record is not None}
    assert {node: (work.batch, work.lr_scale) for node, work in read.items()} == {A: (16, 0.5), B: (32, 1), C: (64, 2)}
    assert {node: work.passes for node, work in read.items()} == pytest.approx({A: 2 / 3, B: 1.0, C: 4 / 3})


def test_the_coordinator_is_told_the_options_when_the_run_starts(planner: PlannerOfBatches) -> None:
    run(GridOfNodes(fleet()), planner, batches=CHOICE)
    [started] = planner.asked("StartRun")
    assert started.workload.batch == 32
    assert [(each.batch, each.relative_samples) for each in started.workload.batches] == [
        (16, 0.5),
        (32, 0.75),
        (64, 1.0),
    ]


def test_without_a_choice_nothing_is_told_of_batches(planner: PlannerOfBatches) -> None:
    grid = GridOfNodes(fleet())
    run(grid, planner)
    assert not any(WORK_KEY in message.content for message in grid.trainings())
    [started] = planner.asked("StartRun")
    assert not started.workload.batches


def test_a_rounds_message_has_no_work_of_the_round_before(planner: PlannerOfBatches) -> None:
    """In round 2, the coordinator plans batch sizes that are not among the options."""

    def forgets(message: Message) -> Message:
        planner.batches = dict.fromkeys("abcd", 48)
        return trained(message)

    grid = GridOfNodes(fleet(a={"train": forgets}))
    run(grid, planner, rounds=2, batches=CHOICE)
    told = [WORK_KEY in message.content for message in grid.trainings()]
    assert (sum(told[:4]), sum(told[4:])) == (3, 0)
