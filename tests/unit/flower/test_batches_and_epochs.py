"""Batch sizes and epochs that an app lets the plan choose, those of each node, and the predictions for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import (
    ARRAYS,
    KNOWN,
    A,
    B,
    C,
    D,
    GridOfNodes,
    PlannerStub,
    SeesContents,
    WarningLog,
    fleet,
    run,
    trained,
)
from wattfleet.core.choosing import BatchEfficiency
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BatchOptions, Workload, WorkloadFacts
from wattfleet.core.planning import EpochChoice
from wattfleet.flower import BatchChoice, PowerAware, Quantiles
from wattfleet.flower.server.predictions import training_prediction
from wattfleet_proto.assignment import PREDICTION_KEY, RECORD_KEY, WORK_KEY, AssignedWork, RoundAssignment
from wattfleet_proto.v1 import planning_pb2, power_pb2

# --- Batch choice -----------------------------------------------------------------------------------------------------
# The batch sizes that an app lets the plan choose from, and the one that each device gets.


# To reach the same accuracy, a batch size of 64 needs twice as many samples as one of 16.
EFFICIENCY = BatchEfficiency("m", (16, 32, 64), (0.5, 0.75, 1.0), (0.0,) * 3, "test", unreached=(128,))
BATCH_CHOICE = BatchChoice([64, 16, 32], base_batch=32, efficiency=EFFICIENCY)


def assigned(batch: int, device_id: str = "a") -> planning_pb2.Assignment:
    return planning_pb2.Assignment(device_id=device_id, batch=batch)


# --- the choice ---------------------------------------------------------------------------------------------------


def test_devices_learn_the_batches_with_their_samples() -> None:
    assert BATCH_CHOICE.options == BatchOptions((16, 32, 64), (0.5, 0.75, 1.0))


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
    workload = BATCH_CHOICE.of_workload(Workload("digits", WorkloadFacts(batch=stated, parameters=1e6)))
    assert workload == Workload("digits", WorkloadFacts(batch=32, parameters=1e6), BATCH_CHOICE.options)
    assert workload.choice == BATCH_CHOICE.options


def test_a_workload_of_another_batch_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="states batches of 16 samples, but base_batch is 32: state only one"):
        BATCH_CHOICE.of_workload(Workload("digits", WorkloadFacts(batch=16)))


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
    assert BATCH_CHOICE.work_of(assigned(batch)) == work


@pytest.mark.parametrize("batch", [0, 48])
def test_a_device_whose_batch_was_not_chosen_trains_with_its_own(batch: int) -> None:
    assert BATCH_CHOICE.work_of(assigned(batch)) == AssignedWork()


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


def run_digits(grid: GridOfNodes, planner: PlannerStub, rounds: int = 1, **options: Any) -> None:
    strategy = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock, workload="digits", **options)
    strategy.start(grid, ARRAYS, num_rounds=rounds)


def test_each_node_is_told_its_own_work(planner: PlannerOfBatches) -> None:
    grid = GridOfNodes(fleet())
    run_digits(grid, planner, batches=BATCH_CHOICE)
    told = {message.metadata.dst_node_id: message.content.get(WORK_KEY) for message in grid.trainings()}
    assert set(told) == {A, B, C, D}
    assert told.pop(D) is None, "no option: it trains with the app's own batch"
    read = {node: AssignedWork.from_record(record) for node, record in told.items() if record is not None}
    assert {node: (work.batch, work.lr_scale) for node, work in read.items()} == {A: (16, 0.5), B: (32, 1), C: (64, 2)}
    assert {node: work.passes for node, work in read.items()} == pytest.approx({A: 2 / 3, B: 1.0, C: 4 / 3})


def test_the_coordinator_is_told_the_options_when_the_run_starts(planner: PlannerOfBatches) -> None:
    run_digits(GridOfNodes(fleet()), planner, batches=BATCH_CHOICE)
    [started] = planner.asked("StartRun")
    assert started.workload.batch == 32
    assert [(each.batch, each.relative_samples) for each in started.workload.batches] == [
        (16, 0.5),
        (32, 0.75),
        (64, 1.0),
    ]


def test_without_a_choice_nothing_is_told_of_batches(planner: PlannerOfBatches) -> None:
    grid = GridOfNodes(fleet())
    run_digits(grid, planner)
    assert not any(WORK_KEY in message.content for message in grid.trainings())
    [started] = planner.asked("StartRun")
    assert not started.workload.batches


def test_a_rounds_message_has_no_work_of_the_round_before(planner: PlannerOfBatches) -> None:
    """In round 2, the coordinator plans batch sizes that are not among the options."""

    def forgets(message: Message) -> Message:
        planner.batches = dict.fromkeys("abcd", 48)
        return trained(message)

    grid = GridOfNodes(fleet(a={"train": forgets}))
    run_digits(grid, planner, rounds=2, batches=BATCH_CHOICE)
    told = [WORK_KEY in message.content for message in grid.trainings()]
    assert (sum(told[:4]), sum(told[4:])) == (3, 0)


# --- Epoch choice -----------------------------------------------------------------------------------------------------
# The local epochs that a strategy lets the plan choose: the requests to the coordinator, and each node's epochs.

EPOCH_CHOICE = EpochChoice.of({2: 1.5, 4: 2.5, 8: 3.0}, half_devices={8: 6.0}, is_per_device=True)
BATCHES = BatchChoice([16, 32], base_batch=32)
OF_DEVICES = {"a": 8, "b": 2, "c": 4, "d": 2}
OF_NODES = {A: 8, B: 2, C: 4, D: 2}
IGNORED = "the app does not follow the plan's local epochs"


class PlannerOfEpochs(PlannerStub):
    """Plans each device's `chosen_epochs` if the request has a choice of epochs."""

    chosen_epochs: Mapping[str, float] = OF_DEVICES
    batch = 16

    def _plan(self, request: planning_pb2.PlanRoundRequest) -> planning_pb2.PlanRoundResponse:
        plan = super()._plan(request)
        for each in plan.assignments:
            each.batch = self.batch
            has_choice = request.HasField("epoch_choice")
            each.epochs = self.chosen_epochs[each.device_id] if has_choice else request.epochs
        return plan


def planner_of(**attributes: Any) -> PlannerOfEpochs:
    planner = PlannerOfEpochs(nodes=dict(KNOWN))
    vars(planner).update(attributes)
    return planner


def takes(took: bool | None) -> Callable[[Message], Message]:
    """A training whose reply states whether its app asked for the planned epochs; None if it states nothing."""

    def train(message: Message) -> Message:
        reply = trained(message)
        if took is not None:
            reply.content[RECORD_KEY] = ConfigRecord({"took-epochs": took})
        return reply

    return train


FOLLOWING = {device: {"train": takes(True)} for device in "abcd"}
"""Nodes whose app asks for its epochs."""


def assigned_epochs(grid: GridOfNodes) -> dict[int, float]:
    """The epochs in each node's assignment in the last round."""
    messages = grid.trainings()[-len(grid.nodes) :]
    return {m.metadata.dst_node_id: RoundAssignment.from_record(m.content[RECORD_KEY]).epochs for m in messages}


def work(grid: GridOfNodes) -> dict[int, AssignedWork]:
    """The work that each node gets in the last round."""
    messages = [m for m in grid.trainings()[-len(grid.nodes) :] if WORK_KEY in m.content]
    return {m.metadata.dst_node_id: AssignedWork.from_record(m.content[WORK_KEY]) for m in messages}


# --- requests to the coordinator ------------------------------------------------------------------------------------


def test_each_round_is_requested_with_the_choice_and_the_fewest_epochs() -> None:
    planner = planner_of()
    run(GridOfNodes(fleet(**FOLLOWING)), planner, rounds=3, local_epochs=EPOCH_CHOICE)
    requests = planner.asked("PlanRound")
    assert [request.round for request in requests] == [1, 2, 3]
    for request in requests:
        assert request.epochs == 2, "which a coordinator plans that knows no choice"
        assert request.epoch_choice == planning_pb2.EpochChoice(
            options=[
                planning_pb2.EpochOption(epochs=2, progress=1.5),
                planning_pb2.EpochOption(epochs=4, progress=2.5),
                planning_pb2.EpochOption(epochs=8, progress=3.0, half_devices=6.0),
            ],
            per_device=True,
        )


def test_the_same_epochs_for_all_are_requested_as_such() -> None:
    planner = planner_of()
    run(GridOfNodes(fleet()), planner, local_epochs=EpochChoice.of([2, 4, 8]))
    [request] = planner.asked("PlanRound")
    assert not request.epoch_choice.per_device
    assert [option.progress for option in request.epoch_choice.options] == pytest.approx([2**0.5, 2.0, 8**0.5])


@pytest.mark.parametrize(("epochs", "requested"), [(3, 3.0), (0.5, 0.5), (EpochChoice.of([3]), 3.0)])
def test_one_number_leaves_no_choice(epochs: float | EpochChoice, requested: float) -> None:
    planner, grid = planner_of(), GridOfNodes(fleet())
    run(grid, planner, local_epochs=epochs)
    [request] = planner.asked("PlanRound")
    assert request.epochs == requested
    assert not request.HasField("epoch_choice")
    assert assigned_epochs(grid) == dict.fromkeys((A, B, C, D), requested)
    assert work(grid) == {}


@pytest.mark.parametrize("epochs", [0, -1.0, 2e6, float("nan"), float("inf")])
def test_numbers_that_cannot_be_are_refused_at_once(epochs: float) -> None:
    with pytest.raises(InvalidInputError, match="a round needs a number of epochs above 0"):
        PowerAware(FedAvg(), planner_of(), local_epochs=epochs)


# --- the nodes' work ------------------------------------------------------------------------------------------------


def test_each_node_is_told_its_own_epochs() -> None:
    grid = GridOfNodes(fleet())
    run(grid, planner_of(), local_epochs=EPOCH_CHOICE)
    assert assigned_epochs(grid) == OF_NODES
    assert work(grid) == {node: AssignedWork(epochs=epochs) for node, epochs in OF_NODES.items()}


def test_epochs_and_batch_are_told_together() -> None:
    grid = GridOfNodes(fleet())
    run(grid, planner_of(), local_epochs=EPOCH_CHOICE, batches=BATCHES, workload="digits")
    expected = BATCHES.work_of(planning_pb2.Assignment(batch=16))
    assert expected.batch == 16 and expected.lr_scale == 0.5, "SGD"
    assert work(grid) == {
        node: AssignedWork(16, expected.lr_scale, expected.passes, epochs) for node, epochs in OF_NODES.items()
    }


def test_epochs_are_told_where_no_batch_is_chosen() -> None:
    grid = GridOfNodes(fleet())
    run(grid, planner_of(batch=48), local_epochs=EPOCH_CHOICE, batches=BATCHES, workload="digits")
    assert work(grid) == {node: AssignedWork(epochs=epochs) for node, epochs in OF_NODES.items()}


def test_a_batch_is_told_without_epochs_where_one_number_is_given() -> None:
    grid = GridOfNodes(fleet())
    run(grid, planner_of(), local_epochs=3, batches=BATCHES, workload="digits")
    assert {(each.batch, each.epochs) for each in work(grid).values()} == {(16, None)}
    assert set(assigned_epochs(grid).values()) == {3.0}


# --- predictions ----------------------------------------------------------------------------------------------------


def test_what_is_predicted_of_a_node_is_of_its_own_epochs() -> None:
    grid = GridOfNodes(fleet())
    run(grid, planner_of(), local_epochs=EPOCH_CHOICE)
    for message in grid.trainings():
        node = message.metadata.dst_node_id
        record = message.content[PREDICTION_KEY]
        epoch_s = 20.0 + node % 7  # the planner's prediction, with a start of 3 s and 8 W
        training_s = 3.0 + OF_DEVICES[KNOWN[node]] * epoch_s
        assert (record["epoch-s"], record["training-s"]) == (epoch_s, training_s)
        assert record["training-kj"] == pytest.approx(training_s * 8.0 / 1e3)
        assert record["epoch-kj"] == pytest.approx(epoch_s * 8.0 / 1e3)
        # The time of the start is certain; that of the epochs has a standard deviation of 10 %.
        high_s = 3.0 + OF_DEVICES[KNOWN[node]] * epoch_s * math.exp(0.1 * NormalDist().inv_cdf(0.95))
        assert record["training-s-high"] == pytest.approx(high_s)


# --- an app that ignores the plan -----------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return WarningLog(caplog).about(IGNORED)


def test_an_app_that_never_asks_is_warned_of_once_and_the_choice_is_over(caplog: pytest.LogCaptureFixture) -> None:
    planner, grid = planner_of(), GridOfNodes(fleet(**{each: {"train": takes(False)} for each in "abcd"}))
    run(grid, planner, rounds=3, local_epochs=EPOCH_CHOICE)
    assert [request.HasField("epoch_choice") for request in planner.asked("PlanRound")] == [True, False, False]
    assert {request.epochs for request in planner.asked("PlanRound")} == {2}
    assert assigned_epochs(grid) == dict.fromkeys((A, B, C, D), 2.0)
    assert work(grid) == {}
    [warning] = warnings_of(caplog)
    assert "later rounds are planned with 2: train for planned_work(batch_size, epochs=...)" in warning


@pytest.mark.parametrize("took", [False, None], ids=["does not ask", "cannot say"])
@pytest.mark.parametrize("ignoring", "abcd")
def test_one_device_that_does_not_follow_is_named(
    ignoring: str, took: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = fleet(**FOLLOWING | {ignoring: {"train": takes(took)}})
    planner = planner_of()
    run(GridOfNodes(nodes), planner, rounds=2, local_epochs=EPOCH_CHOICE)
    assert [request.HasField("epoch_choice") for request in planner.asked("PlanRound")] == [True, True]
    warnings = WarningLog(caplog).about("the plan's local epochs were not followed by")
    assert [f"not followed by {ignoring}: train for planned_work" in each for each in warnings] == [True] * 2


def test_an_app_that_asks_keeps_the_choice(caplog: pytest.LogCaptureFixture) -> None:
    planner, grid = planner_of(), GridOfNodes(fleet(**FOLLOWING))
    run(grid, planner, rounds=2, local_epochs=EPOCH_CHOICE)
    assert [request.HasField("epoch_choice") for request in planner.asked("PlanRound")] == [True, True]
    assert assigned_epochs(grid) == OF_NODES
    assert warnings_of(caplog) == []


def test_devices_that_say_nothing_of_epochs_end_the_choice(caplog: pytest.LogCaptureFixture) -> None:
    planner = planner_of()
    run(GridOfNodes(fleet()), planner, rounds=2, local_epochs=EPOCH_CHOICE)
    assert [request.HasField("epoch_choice") for request in planner.asked("PlanRound")] == [True, False]
    [warning] = warnings_of(caplog)
    assert "the app does not follow the plan's local epochs" in warning


def test_batches_are_chosen_further_where_epochs_are_not() -> None:
    grid = GridOfNodes(fleet(**{each: {"train": takes(False)} for each in "abcd"}))
    run(grid, planner_of(), rounds=2, local_epochs=EPOCH_CHOICE, batches=BATCHES, workload="digits")
    assert {(each.batch, each.epochs) for each in work(grid).values()} == {(16, None)}


def test_without_a_choice_nobody_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    grid = GridOfNodes(fleet(**{each: {"train": takes(False)} for each in "abcd"}))
    run(grid, planner_of(), rounds=2, local_epochs=3)
    assert warnings_of(caplog) == []


def test_strategies_do_not_see_what_the_reply_says_of_epochs() -> None:
    strategy = SeesContents()
    grid = GridOfNodes(fleet(**{each: {"train": takes(True)} for each in "abcd"}))
    run(grid, planner_of(), strategy=strategy, local_epochs=EPOCH_CHOICE)
    assert strategy.seen == [{"arrays", "metrics"}] * 4


# --- Predictions ------------------------------------------------------------------------------------------------------
# The quantiles of time, power and energy that apps and strategies get, compared with samples.

MODE = power_pb2.PowerMode(cores=4, cpu_khz=1_510_400, gpu_hz=624_750_000, mem_hz=2_133_000_000)


def assignment(**predicted: float) -> planning_pb2.Assignment:
    fields = {"epoch_s": 40.0, "power_w": 12.0, "warmup_s": 5.0, "epoch_log_sd": 0.2, "power_log_sd": 0.1}
    return planning_pb2.Assignment(mode=MODE, **{**fields, **predicted})  # type: ignore[arg-type]


def of_samples(samples: np.ndarray) -> list[float]:
    return [float(each) for each in np.quantile(samples, (0.05, 0.5, 0.95))]


def values(quantiles: Quantiles) -> list[float]:
    return [quantiles.low, quantiles.median, quantiles.high]


def test_quantiles_are_those_of_lognormal_errors() -> None:
    rng = np.random.default_rng(0)
    epoch_s = 40.0 * np.exp(0.2 * rng.standard_normal(1_000_000))
    power_w = 12.0 * np.exp(0.1 * rng.standard_normal(1_000_000))
    predicted = training_prediction(assignment(epochs=3.0))
    assert values(predicted.epoch_s) == pytest.approx(of_samples(epoch_s), rel=0.01)
    assert values(predicted.training_s) == pytest.approx(of_samples(5.0 + 3.0 * epoch_s), rel=0.01)
    assert values(predicted.power_w) == pytest.approx(of_samples(power_w), rel=0.01)
    assert values(predicted.epoch_kj) == pytest.approx(of_samples(epoch_s * power_w / 1e3), rel=0.01)
    # The start's time is certain, but the energy's interval treats it as uncertain and is slightly too wide.
    energy = of_samples((5.0 + 3.0 * epoch_s) * power_w / 1e3)
    assert values(predicted.training_kj) == pytest.approx(energy, rel=0.02)
    assert predicted.training_kj.low <= energy[0] and energy[2] <= predicted.training_kj.high


def test_what_is_not_known_is_none_or_without_an_interval() -> None:
    predicted = training_prediction(assignment(epoch_log_sd=0.0, power_log_sd=0.0))
    assert values(predicted.epoch_s) == [40.0] * 3
    assert (predicted.batch, predicted.profiled_modes) == (None, 0)
    assert training_prediction(assignment(batch=16, profiled_modes=7)).batch == 16
    assert not predicted.is_length_assumed
    assumed = training_prediction(assignment(length_assumed=True))
    assert assumed.is_length_assumed and assumed.to_record("")["length-assumed"] is True
