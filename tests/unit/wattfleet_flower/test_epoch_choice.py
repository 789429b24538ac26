"""The local epochs that a strategy lets the plan choose: the requests to the coordinator, and each node's epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import GridOfNodes, PlannerStub, trained
from tests.fakes.power_aware_runs import KNOWN, A, B, C, D, SeesContents, WarningLog, fleet, run
from wattfleet.errors import InvalidInputError
from wattfleet.planning import EpochChoice
from wattfleet_flower import BatchChoice, PowerAware
from wattfleet_proto.assignment import PREDICTION_KEY, RECORD_KEY, WORK_KEY, AssignedWork, RoundAssignment
from wattfleet_proto.v1 import planning_pb2

CHOICE = EpochChoice.of({2: 1.5, 4: 2.5, 8: 3.0}, half_devices={8: 6.0}, is_per_device=True)
BATCHES = BatchChoice([16, 32], base_batch=32)
OF_DEVICES = {"a": 8, "b": 2, "c": 4, "d": 2}
OF_NODES = {A: 8, B: 2, C: 4, D: 2}
IGNORED = "the app does not follow the plan's local epochs"


class PlannerOfEpochs(PlannerStub):
    """Plans each device's `chosen_epochs` if the request has a choice of epochs."""

    chosen_epochs: Mapping[str, float] = OF_DEVICES
    is_older = False
    batch = 16

    def _plan(self, request: planning_pb2.PlanRoundRequest) -> planning_pb2.PlanRoundResponse:
        plan = super()._plan(request)
        for each in plan.assignments:
            each.batch = self.batch
            if not self.is_older:
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


def assigned(grid: GridOfNodes) -> dict[int, float]:
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
    run(GridOfNodes(fleet(**FOLLOWING)), planner, rounds=3, local_epochs=CHOICE)
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
    assert assigned(grid) == dict.fromkeys((A, B, C, D), requested)
    assert work(grid) == {}


@pytest.mark.parametrize("epochs", [0, -1.0, 2e6, float("nan"), float("inf")])
def test_numbers_that_cannot_be_are_refused_at_once(epochs: float) -> None:
    with pytest.raises(InvalidInputError, match="a round needs a number of epochs above 0"):
        PowerAware(FedAvg(), planner_of(), local_epochs=epochs)


# --- the nodes' work ------------------------------------------------------------------------------------------------


def test_each_node_is_told_its_own_epochs() -> None:
    grid = GridOfNodes(fleet())
    run(grid, planner_of(), local_epochs=CHOICE)
    assert assigned(grid) == OF_NODES
    assert work(grid) == {node: AssignedWork(epochs=epochs) for node, epochs in OF_NODES.items()}


def test_epochs_and_batch_are_told_together() -> None:
    grid = GridOfNodes(fleet())
    run(grid, planner_of(), local_epochs=CHOICE, batches=BATCHES, workload="digits")
    expected = BATCHES.work_of(planning_pb2.Assignment(batch=16))
    assert expected.batch == 16 and expected.lr_scale == 0.5, "SGD"
    assert work(grid) == {
        node: AssignedWork(16, expected.lr_scale, expected.passes, epochs) for node, epochs in OF_NODES.items()
    }


def test_epochs_are_told_where_no_batch_is_chosen() -> None:
    grid = GridOfNodes(fleet())
    run(grid, planner_of(batch=48), local_epochs=CHOICE, batches=BATCHES, workload="digits")
    assert work(grid) == {node: AssignedWork(epochs=epochs) for node, epochs in OF_NODES.items()}


def test_a_batch_is_told_without_epochs_where_one_number_is_given() -> None:
    grid = GridOfNodes(fleet())
    run(grid, planner_of(), local_epochs=3, batches=BATCHES, workload="digits")
    assert {(each.batch, each.epochs) for each in work(grid).values()} == {(16, None)}
    assert set(assigned(grid).values()) == {3.0}


def test_an_older_coordinator_plans_the_fewest() -> None:
    planner, grid = planner_of(is_older=True), GridOfNodes(fleet())
    run(grid, planner, rounds=2, local_epochs=CHOICE)
    assert assigned(grid) == dict.fromkeys((A, B, C, D), 2.0)
    assert work(grid) == {}
    assert all(request.HasField("epoch_choice") for request in planner.asked("PlanRound")), "it may be updated"


# --- predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_older", "epochs"), [(False, OF_DEVICES), (True, dict.fromkeys("abcd", 2))])
def test_what_is_predicted_of_a_node_is_of_its_own_epochs(is_older: bool, epochs: Mapping[str, float]) -> None:
    grid = GridOfNodes(fleet())
    run(grid, planner_of(is_older=is_older), local_epochs=CHOICE)
    for message in grid.trainings():
        node = message.metadata.dst_node_id
        record = message.content[PREDICTION_KEY]
        epoch_s = 20.0 + node % 7  # the planner's prediction, with a start of 3 s and 8 W
        training_s = 3.0 + epochs[KNOWN[node]] * epoch_s
        assert (record["epoch-s"], record["training-s"]) == (epoch_s, training_s)
        assert record["training-kj"] == pytest.approx(training_s * 8.0 / 1e3)
        assert record["epoch-kj"] == pytest.approx(epoch_s * 8.0 / 1e3)
        # The time of the start is certain; that of the epochs has a standard deviation of 10 %.
        high_s = 3.0 + epochs[KNOWN[node]] * epoch_s * math.exp(0.1 * NormalDist().inv_cdf(0.95))
        assert record["training-s-high"] == pytest.approx(high_s)


# --- an app that ignores the plan -----------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return WarningLog(caplog).about(IGNORED)


def test_an_app_that_never_asks_is_warned_of_once_and_the_choice_is_over(caplog: pytest.LogCaptureFixture) -> None:
    planner, grid = planner_of(), GridOfNodes(fleet(**{each: {"train": takes(False)} for each in "abcd"}))
    run(grid, planner, rounds=3, local_epochs=CHOICE)
    assert [request.HasField("epoch_choice") for request in planner.asked("PlanRound")] == [True, False, False]
    assert {request.epochs for request in planner.asked("PlanRound")} == {2}
    assert assigned(grid) == dict.fromkeys((A, B, C, D), 2.0)
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
    run(GridOfNodes(nodes), planner, rounds=2, local_epochs=CHOICE)
    assert [request.HasField("epoch_choice") for request in planner.asked("PlanRound")] == [True, True]
    warnings = WarningLog(caplog).about("the plan's local epochs were not followed by")
    assert [f"not followed by {ignoring}: train for planned_work" in each for each in warnings] == [True] * 2


def test_an_app_that_asks_keeps_the_choice(caplog: pytest.LogCaptureFixture) -> None:
    planner, grid = planner_of(), GridOfNodes(fleet(**FOLLOWING))
    run(grid, planner, rounds=2, local_epochs=CHOICE)
    assert [request.HasField("epoch_choice") for request in planner.asked("PlanRound")] == [True, True]
    assert assigned(grid) == OF_NODES
    assert warnings_of(caplog) == []


def test_devices_before_protocol_2_4_end_the_choice(caplog: pytest.LogCaptureFixture) -> None:
    planner = planner_of()
    run(GridOfNodes(fleet()), planner, rounds=2, local_epochs=CHOICE)
    assert [request.HasField("epoch_choice") for request in planner.asked("PlanRound")] == [True, False]
    [warning] = warnings_of(caplog)
    assert "with protocol 2.4 or newer on the device" in warning


def test_batches_are_chosen_further_where_epochs_are_not() -> None:
    grid = GridOfNodes(fleet(**{each: {"train": takes(False)} for each in "abcd"}))
    run(grid, planner_of(), rounds=2, local_epochs=CHOICE, batches=BATCHES, workload="digits")
    assert {(each.batch, each.epochs) for each in work(grid).values()} == {(16, None)}


def test_without_a_choice_nobody_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    grid = GridOfNodes(fleet(**{each: {"train": takes(False)} for each in "abcd"}))
    run(grid, planner_of(), rounds=2, local_epochs=3)
    assert warnings_of(caplog) == []


def test_strategies_do_not_see_what_the_reply_says_of_epochs() -> None:
    strategy = SeesContents()
    grid = GridOfNodes(fleet(**{each: {"train": takes(True)} for each in "abcd"}))
    run(grid, planner_of(), strategy=strategy, local_epochs=CHOICE)
    assert strategy.seen == [{"arrays", "metrics"}] * 4
