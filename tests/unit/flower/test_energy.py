"""The energy budget of a run at the app: what the coordinator is told, and how the run ends."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from tests.fakes.flower_in_process import KNOWN, ZERO, GridOfNodes, PlannerStub, StatusError, nodes_of
from wattfleet.core.errors import InvalidInputError
from wattfleet.flower import EnergyUsedUpError, FedBuff, PowerAware
from wattfleet_proto.v1 import planning_pb2

SPENT = "90 J of the energy budget are left, and the training that takes the least needs 148 J"


class Planner(PlannerStub):
    """A coordinator whose energy suffices for some rounds."""

    lasts_for = 2

    def _plan(self, request: planning_pb2.PlanRoundRequest) -> planning_pb2.PlanRoundResponse:
        if request.round > self.lasts_for:
            raise StatusError(grpc.StatusCode.OUT_OF_RANGE, SPENT)
        return super()._plan(request)


def strategy(planner: PlannerStub, grid: GridOfNodes, **options: Any) -> PowerAware:
    wrapped = options.pop("wrapped", None) or FedAvg(fraction_evaluate=0.0)
    return PowerAware(wrapped, planner, survey_s=None, measures_left_out=False, clock=grid.clock, **options)


@pytest.mark.parametrize(("budget", "joules"), [("2 kWh", 7.2e6), ("500kJ", 5e5), (250.0, 250.0), (None, 0.0)])
def test_the_coordinator_learns_the_budget(budget: Any, joules: float) -> None:
    planner, grid = PlannerStub(nodes=dict(KNOWN)), GridOfNodes(nodes_of(a=1.0))
    strategy(planner, grid, energy_budget=budget).start(grid, ZERO, num_rounds=1)
    [started] = planner.asked("StartRun")
    assert started.energy_budget_j == pytest.approx(joules)


def test_a_run_whose_energy_is_used_up_ends_with_the_result_until_then() -> None:
    planner, grid = Planner(nodes=dict(KNOWN)), GridOfNodes(nodes_of(a=1.0, b=1.0))

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"weight": float(arrays["w"].numpy()[0])})

    result = strategy(planner, grid, energy_budget="1 kJ").start(grid, ZERO, num_rounds=9, evaluate_fn=evaluate)
    assert float(result.arrays["w"].numpy()[0]) == pytest.approx(3.0)  # two rounds of 1.5 each
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2]
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    [finished] = planner.asked("FinishRun")
    assert finished.error == "", "the run has ended as planned"


def test_a_budget_that_suffices_for_no_round_is_an_error() -> None:
    planner, grid = Planner(nodes=dict(KNOWN)), GridOfNodes(nodes_of(a=1.0))
    planner.lasts_for = 0
    with pytest.raises(EnergyUsedUpError, match="needs 148 J"):
        strategy(planner, grid, energy_budget="90 J").start(grid, ZERO, num_rounds=3)
    assert grid.waited_s == [], "no amount of waiting brings energy"
    [finished] = planner.asked("FinishRun")
    assert "EnergyUsedUpError" in finished.error


def test_the_second_start_of_a_strategy_does_not_return_the_first_ones_result() -> None:
    planner, grid = Planner(nodes=dict(KNOWN)), GridOfNodes(nodes_of(a=1.0))
    used = strategy(planner, grid, energy_budget="1 kJ")
    used.start(grid, ZERO, num_rounds=5)
    planner.lasts_for = 0
    with pytest.raises(EnergyUsedUpError):
        used.start(grid, ZERO, num_rounds=5)


@pytest.mark.parametrize("budget", ["2", "-3 kJ", 0.0, math.nan, math.inf, "many J"])
def test_a_budget_that_is_no_energy_is_refused_at_once(budget: Any) -> None:
    with pytest.raises(InvalidInputError, match="energy_budget"):
        PowerAware(FedAvg(), PlannerStub(), energy_budget=budget)


@pytest.mark.parametrize(
    "options",
    [
        {"wrapped": FedBuff(buffer_size=2)},
        {"wrapped": DifferentialPrivacyServerSideFixedClipping(FedBuff(1), 0.0, 1.0, 1)},
        {"on_coordinator_away": "unplanned"},
    ],
)
def test_a_budget_needs_rounds_that_are_all_planned(options: dict[str, Any]) -> None:
    wrapped = options.pop("wrapped", None) or FedAvg()
    with pytest.raises(InvalidInputError, match="an energy budget needs rounds that are all planned"):
        PowerAware(wrapped, PlannerStub(), energy_budget="1 kWh", **options)
