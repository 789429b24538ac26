"""PowerAware sends trainings to the selected devices only, and leaves the wrapped strategy unchanged."""

from __future__ import annotations

import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from tests.fakes.flower_in_process import (
    RUN_ID,
    GridOfNodes,
    PlannerStub,
)
from tests.fakes.power_aware_runs import ARRAYS, A, B, C, D, WarningLog, first_value, fleet, run
from wattfleet_flower import PowerAware, TwoStrategiesError
from wattfleet_proto.assignment import RECORD_KEY, RoundAssignment


def test_only_selected_nodes_are_sent_a_training_with_their_assignment() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], deadline_s=40.0)
    result = run(grid, planner, rounds=2, local_epochs=3)
    assert sorted(m.metadata.dst_node_id for m in grid.trainings()) == [B, B, D, D]
    for message in grid.trainings():
        assignment = RoundAssignment.from_record(message.content[RECORD_KEY])
        assert assignment.device_id == {B: "b", D: "d"}[message.metadata.dst_node_id]
        assert (assignment.epochs, assignment.deadline_s) == (3.0, 40.0)
        assert "config" in message.content, "the strategy's own content is kept"
    assert sorted(grid.identifications()) == [A, B, C, D], "each node is asked who it is once"
    # 0.2 and 0.4 in each round, weighted by 20 and 40 examples.
    assert first_value(result) == pytest.approx(2 * (0.2 * 20 + 0.4 * 40) / 60)
    assert [method for method, _ in planner.calls][-1] == "FinishRun"


def test_a_strategy_that_trains_nothing_needs_no_plan() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    run(grid, planner, strategy=FedAvg(fraction_train=0.0))
    assert grid.trainings() == [] and planner.asked("PlanRound") == []


def test_the_wrapped_strategy_is_unchanged_afterwards() -> None:
    inner = FedAvg(fraction_train=0.5, min_train_nodes=3, min_available_nodes=4)
    strategy = DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 10.0, 2)
    grid = GridOfNodes(fleet())
    run(grid, PlannerStub(chosen=["b", "d"]), strategy=strategy)
    assert len(grid.trainings()) == 2, "also what a strategy wraps takes all that were chosen"
    assert (inner.fraction_train, inner.min_train_nodes, inner.min_available_nodes) == (0.5, 3, 4)


def test_messages_to_nodes_outside_the_plan_are_dropped(warnings: WarningLog) -> None:
    class OwnPick(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):  # type: ignore[no-untyped-def]
            messages = list(super().configure_train(server_round, arrays, config, grid))
            other = self._construct_messages(messages[0].content, [A], "train")
            return [*messages, *other]

    grid = GridOfNodes(fleet())
    run(grid, PlannerStub(chosen=["b", "d"]), strategy=OwnPick(fraction_evaluate=0.0))
    assert sorted(m.metadata.dst_node_id for m in grid.trainings()) == [B, D]
    assert warnings.about(f"the message to node {A} is dropped")


def test_a_power_aware_strategy_around_another_is_refused() -> None:
    inner = PowerAware(FedAvg(), PlannerStub())
    with pytest.raises(TwoStrategiesError, match="use PowerAware only once"):
        PowerAware(inner, PlannerStub())
    with pytest.raises(TwoStrategiesError, match="use PowerAware only once"):
        PowerAware(DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 10.0, 2), PlannerStub())


def test_two_strategies_may_run_in_sequence_but_not_at_once() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    outer = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock)

    def meanwhile(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round == 1:
            with pytest.raises(TwoStrategiesError, match="two power-aware strategies are running in run 7"):
                run(grid, planner)
        return None

    outer.start(grid, ARRAYS, num_rounds=1, evaluate_fn=meanwhile)
    run(grid, planner)
    names = [request.run_id for request in planner.asked("StartRun")]
    assert len(set(names)) == 2, "each has rounds of its own"
    assert all(name.split("-")[0] == str(RUN_ID) for name in names)


def test_a_power_aware_strategy_inside_flowers_own_plans_too() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"])
    inner = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock)
    DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 10.0, 2).start(
        grid, ARRAYS, num_rounds=1, train_config=ConfigRecord()
    )
    assert len(grid.trainings()) == 2
    assert not any(told.failure for told in planner.results()[0].values())
