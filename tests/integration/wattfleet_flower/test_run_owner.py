"""A run belongs to the ServerApp that started it; a restarted ServerApp continues under an id of its own."""

from __future__ import annotations

import grpc
import pytest
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import RUN_ID, GridOfNodes, PlannerStub
from tests.fakes.power_aware_runs import ARRAYS, WarningLog, fleet, run
from wattfleet_flower import PowerAware
from wattfleet_flower.server.coordinator_run import ActiveRuns
from wattfleet_flower.server.errors import RefusedError

_CHANGES = ("StartRun", "PlanRound", "FinishRound", "ReportMetrics", "FinishRun")


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as if no other test had run a strategy for this run in this process."""
    monkeypatch.setattr("wattfleet_flower.server.rounds.ACTIVE_RUNS", ActiveRuns())


def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"accuracy": 0.1})


def test_every_change_of_a_run_carries_the_secret_of_its_app() -> None:
    tokens = []
    for _ in range(2):
        grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"])
        strategy = PowerAware(
            FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock, survey_s=None, measures_left_out=False
        )
        strategy.start(grid, ARRAYS, num_rounds=1, evaluate_fn=evaluated)
        sent = {method: {request.run_token for request in planner.asked(method)} for method in _CHANGES}
        [token] = set().union(*sent.values())
        assert all(sent.values()) and len(token) >= 32
        tokens.append(token)
    assert tokens[0] != tokens[1]


def test_a_process_that_comes_anew_to_a_run_goes_on_under_the_next_id(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], taken={f"{RUN_ID}", f"{RUN_ID}-2"})
    run(grid, planner)
    assert [request.run_id for request in planner.asked("StartRun")] == [f"{RUN_ID}-3"]
    assert [request.run_id for request in planner.asked("PlanRound")] == [f"{RUN_ID}-3"]
    assert [request.run_id for request in planner.asked("FinishRun")] == [f"{RUN_ID}-3"]
    assert len(grid.trainings()) == 2
    assert warnings.about(f"run {RUN_ID} was started by another process: this one continues as run {RUN_ID}-2")
    assert warnings.about(f"run {RUN_ID}-2 was started by another process: this one continues as run {RUN_ID}-3")


def test_a_start_that_was_kept_and_then_refused_goes_on_under_the_next_id(warnings: WarningLog) -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(chosen=["b", "d"], taken={f"{RUN_ID}"}, away=True)

    def back(number: int, arrays: ArrayRecord) -> MetricRecord:
        planner.away = number == 0
        return MetricRecord({"accuracy": 0.1})

    strategy = PowerAware(
        FedAvg(fraction_evaluate=0.0),
        planner,
        on_coordinator_away="unplanned",
        clock=grid.clock,
        survey_s=None,
        measures_left_out=False,
    )
    strategy.start(grid, ARRAYS, num_rounds=2, evaluate_fn=back)
    assert [request.run_id for request in planner.asked("PlanRound")] == [f"{RUN_ID}-2"]
    assert [request.run_id for request in planner.asked("FinishRun")] == [f"{RUN_ID}-2"]
    [kept] = planner.asked("ReportUnplannedRound")
    assert (kept.run_id, kept.round) == (f"{RUN_ID}-2", 1)
    assert [(each.run_id, each.round) for each in planner.asked("ReportMetrics")] == [
        (f"{RUN_ID}-2", number) for number in range(3)
    ]


def test_a_coordinator_that_lets_this_app_start_no_run_ends_it() -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(taken={f"{RUN_ID}", *(f"{RUN_ID}-{k}" for k in range(2, 1000))})
    with pytest.raises(RefusedError) as refused:
        run(grid, planner)
    assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
