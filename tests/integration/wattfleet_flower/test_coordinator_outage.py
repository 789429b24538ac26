"""PowerAware while the coordinator is unreachable, restarts, or cannot store reports."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import (
    GridOfNodes,
    PlannerStub,
    StatusError,
    trained,
)
from tests.fakes.power_aware_runs import ARRAYS, KNOWN, B, WarningLog, fleet, run, unsurveyed
from wattfleet_flower import FedBuff, PlanningError, PowerAware
from wattfleet_proto.assignment import RECORD_KEY
from wattfleet_proto.v1 import planning_pb2


def test_without_a_coordinator_the_plain_strategy_trains_with_one_warning(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(away=True)
    strategy = FedAvg(fraction_train=0.5, fraction_evaluate=0.0)
    result = run(grid, planner, rounds=3, strategy=strategy, on_coordinator_away="unplanned")
    assert result.arrays
    assert len(grid.trainings()) == 3 * 2, "the strategy's own sampling counts"
    assert not any(RECORD_KEY in message.content for message in grid.sent)
    [said] = warnings.about("NO BUDGET IS KEPT")
    assert "wattfleet coordinator serve" in said and "plain FedAvg" in said


def test_the_plain_strategy_does_not_wait_for_missing_nodes(warnings: WarningLog) -> None:
    grid = GridOfNodes(fleet())
    strategy = FedAvg(min_available_nodes=9, min_train_nodes=9, fraction_evaluate=0.0)
    run(grid, PlannerStub(away=True), rounds=2, strategy=strategy, on_coordinator_away="unplanned")
    assert len(grid.trainings()) == 2 * 4


def test_a_coordinator_that_is_back_plans_again_and_gets_pending_reports(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"])
    strategy = unsurveyed(FedAvg(fraction_evaluate=0.0), planner, grid.clock, on_coordinator_away="unplanned")
    away = {1: True, 2: False}

    def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        planner.away = away.get(server_round, planner.away)
        return MetricRecord({"accuracy": 0.1 * server_round})

    strategy.start(grid, ARRAYS, num_rounds=3, evaluate_fn=evaluated)
    trained_in = [len([m for m in grid.trainings() if m.content["config"]["server-round"] == n]) for n in (1, 2, 3)]
    assert trained_in == [2, 4, 2]
    assert [request.round for request in planner.asked("PlanRound")] == [1, 3]
    assert [request.round for request in planner.asked("ReportMetrics")] == [0, 1, 2, 3]
    assert len(warnings.about("NO BUDGET IS KEPT")) == 1


def test_a_coordinator_lost_during_a_round_gets_its_results_later() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"])

    def train(message: Any) -> Any:
        planner.away = message.content["config"]["server-round"] == 1
        return trained(message)

    grid.nodes[B].train = train
    strategy = unsurveyed(FedAvg(fraction_evaluate=0.0), planner, grid.clock, on_coordinator_away="unplanned")
    strategy.start(grid, ARRAYS, num_rounds=3)
    assert [request.round for request in planner.asked("PlanRound")] == [1, 3], "the second round is not planned"
    told = [request.plan_id.split("/")[1] for request in planner.asked("FinishRound")]
    assert told == ["1", "3"]


class FullFor:
    """A clock under which a coordinator's disk has room again after a while."""

    def __init__(self, clock: Any, planner: PlannerStub, seconds: float) -> None:
        self._clock, self._planner = clock, planner
        self._seconds = seconds
        self._full_since_s: float | None = None

    def now_s(self) -> float:
        return float(self._clock.now_s())

    def sleep_s(self, seconds: float) -> None:
        self._clock.sleep_s(seconds)
        if self._planner.full:
            self._full_since_s = self._full_since_s or self.now_s()
            self._planner.full = self.now_s() - self._full_since_s < self._seconds


@pytest.mark.parametrize(("rounds", "full_in"), [(2, 1), (2, 2)])
def test_reports_wait_in_order_while_the_coordinators_disk_is_full(rounds: int, full_in: int) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN))

    def train(message: Any) -> Any:
        planner.full |= message.content["config"]["server-round"] == full_in
        return trained(message)

    grid.nodes[B].train = train
    clock = FullFor(grid.clock, planner, 20.0)
    strategy = unsurveyed(FedAvg(fraction_evaluate=0.0), planner, clock)
    strategy.start(grid, ARRAYS, num_rounds=rounds, evaluate_fn=lambda number, arrays: MetricRecord({"accuracy": 0.1}))
    round_by_round = ["PlanRound", "FinishRound", "ReportMetrics"]
    told = [method for method, _ in planner.calls if method != "ResolveNodes"]
    assert told == ["StartRun", "ReportMetrics", *(rounds * round_by_round), "FinishRun"]


def test_a_run_ends_even_if_the_coordinators_disk_stays_full(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN))

    def train(message: Any) -> Any:
        planner.full = True
        return trained(message)

    grid.nodes[B].train = train
    assert run(grid, planner).arrays
    assert warnings.about("no complete record of this run: 2 reports could not be sent")


@pytest.mark.parametrize("strategy", [FedAvg(fraction_evaluate=0.0), FedBuff(buffer_size=2)])
def test_a_run_that_the_coordinator_does_not_know_any_more_ends_with_the_reason(strategy: Any) -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(refusals=[StatusError(grpc.StatusCode.NOT_FOUND, "unknown run '7': it never started")])
    with pytest.raises(PlanningError, match=r"does not know run 7\S* any more.*Start the run again"):
        run(grid, planner, strategy=strategy)
    assert len(planner.asked("StartRun")) == 1, "it is not started anew: devices may hold grants of its plans"
    assert "does not know run 7" in planner.asked("FinishRun")[-1].error
    assert grid.trainings() == []


def test_nodes_that_a_restored_coordinator_does_not_know_are_bound_again() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()

    def restored(number: int, arrays: ArrayRecord) -> MetricRecord:
        if number == 1:
            planner.nodes.clear()
        return MetricRecord({"accuracy": 0.1})

    strategy = unsurveyed(FedAvg(fraction_evaluate=0.0), planner, grid.clock)
    strategy.start(grid, ARRAYS, num_rounds=2, evaluate_fn=restored)
    assert planner.nodes == KNOWN
    assert len(grid.trainings()) == 2 * len(KNOWN)
    assert len(grid.identifications()) == len(KNOWN), "each node is asked once"


def test_an_app_that_configures_rounds_after_its_run_starts_it_again() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    strategy = unsurveyed(FedAvg(fraction_evaluate=0.0), planner, grid.clock)
    strategy.start(grid, ARRAYS, num_rounds=1)
    assert list(strategy.configure_train(2, ARRAYS, ConfigRecord(), grid))
    assert [method for method, _ in planner.calls if method != "ResolveNodes"][-3:] == [
        *("FinishRun", "StartRun", "PlanRound")
    ]


def served(planner: PlannerStub, port: int = 0) -> tuple[grpc.Server, int]:
    """The planner behind a port."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            lambda request, _, method=name: getattr(planner, method)(request, 1.0, True) or _EMPTY[method](),
            getattr(planning_pb2, f"{name}Request").FromString,
            lambda response: response.SerializeToString(),
        )
        for name in _EMPTY
    }
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    service = planning_pb2.DESCRIPTOR.services_by_name["PlanningService"].full_name
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, bound


_EMPTY = {
    method: getattr(planning_pb2, f"{method}Response")
    for method in planning_pb2.DESCRIPTOR.services_by_name["PlanningService"].methods_by_name
}


def test_a_restarted_coordinator_is_reached_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattfleet_flower.server.planning_client._CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr("wattfleet_flower.server.planning_client._RECONNECT_TIMEOUT_S", 5.0)
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"])
    server, port = served(planner)
    servers = [server]
    strategy = PowerAware(
        FedAvg(fraction_evaluate=0.0),
        f"127.0.0.1:{port}",
        clock=grid.clock,
        on_coordinator_away="unplanned",
        survey_s=None,
        measures_left_out=False,
    )

    def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == 1:
            servers[-1].stop(None).wait()
            monkeypatch.setattr("wattfleet_flower.server.planning_client._RECONNECT_TIMEOUT_S", 0.1)
        if server_round == 2:
            servers.append(served(planner, port)[0])
            monkeypatch.setattr("wattfleet_flower.server.planning_client._RECONNECT_TIMEOUT_S", 20.0)
        return MetricRecord({"accuracy": 0.5})

    try:
        strategy.start(grid, ARRAYS, num_rounds=3, evaluate_fn=evaluated)
    finally:
        servers[-1].stop(None).wait()
    assert [request.round for request in planner.asked("PlanRound")] == [1, 3]
    assert len(grid.trainings()) == 2 + 4 + 2
    assert planner.asked("FinishRun")[-1].error == ""
