"""PowerAware while the coordinator is away, restarts or cannot store reports: wait, stop, or train without plans."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import (
    ARRAYS,
    KNOWN,
    A,
    B,
    C,
    D,
    GridOfNodes,
    Node,
    PlannerStub,
    RecordingClock,
    StatusError,
    WarningLog,
    fleet,
    raised,
    run,
    trained,
    unsurveyed,
)
from wattfleet.flower import FedBuff, PlanningError, PowerAware
from wattfleet_proto.assignment import IDENTIFY_KEY, RECORD_KEY
from wattfleet_proto.v1 import planning_pb2

# --- Coordinator away -------------------------------------------------------------------------------------------------
# PowerAware's option for a coordinator that is away: wait, stop, or train without plans.


class ClockOfOutage(RecordingClock):
    """A clock under which a coordinator that is away comes back after a while."""

    def __init__(self, planner: PlannerStub, seconds: float) -> None:
        super().__init__()
        self._planner, self._seconds = planner, seconds
        self._away_since_s: float | None = None

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        if self._planner.away:
            self._away_since_s = self.now_s() if self._away_since_s is None else self._away_since_s
            self._planner.away = self.now_s() - self._away_since_s < self._seconds


def trainings_by_round(grid: GridOfNodes) -> dict[int, int]:
    rounds = [message.content["config"]["server-round"] for message in grid.trainings()]
    return {number: rounds.count(number) for number in rounds}


def lost_in_round(grid: GridOfNodes, planner: PlannerStub, number: int) -> None:
    """Let the coordinator vanish while node B trains in a round."""

    def train(message: Any) -> Any:
        planner.away |= message.content["config"]["server-round"] == number
        return trained(message)

    grid.nodes[B].train = train


class LostWhileIdentifying(GridOfNodes):
    """Nodes that answer which device they belong to while the coordinator goes away for 20 s."""

    def __init__(self, planner: PlannerStub) -> None:
        super().__init__(fleet(), ClockOfOutage(planner, 20.0))
        self._planner = planner

    def _replied(self, node: Node, message: Message) -> Message:
        if IDENTIFY_KEY in message.content.get(RECORD_KEY, {}):
            self._planner.away = True
        return super()._replied(node, message)


@pytest.mark.parametrize("action", ["wait", "unplanned"])
def test_a_coordinator_that_goes_away_while_nodes_identify_gets_their_answers_later(action: Any) -> None:
    planner = PlannerStub()
    grid = LostWhileIdentifying(planner)
    strategy = unsurveyed(FedAvg(fraction_evaluate=0.0), planner, grid.clock, on_coordinator_away=action)
    strategy.start(grid, ARRAYS, num_rounds=12)
    assert planner.nodes == KNOWN
    assert len(grid.identifications()) == len(KNOWN), "each node is asked once"
    assert len(planner.asked("PlanRound")) >= 2


# --- wait -----------------------------------------------------------------------------------------------------------


def test_by_default_no_device_trains_until_the_coordinator_is_back(warnings: WarningLog, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    planner = PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN))
    grid = GridOfNodes(fleet(), ClockOfOutage(planner, 3600.0))
    lost_in_round(grid, planner, 1)
    result = unsurveyed(FedAvg(fraction_evaluate=0.0), planner, grid.clock).start(grid, ARRAYS, num_rounds=3)
    assert result.arrays
    assert trainings_by_round(grid) == {1: 2, 2: 2, 3: 2}, "only what the coordinator planned"
    told = [method for method, _ in planner.calls if method != "ResolveNodes"]
    assert told == ["StartRun", *(3 * ["PlanRound", "FinishRound"]), "FinishRun"]
    [said] = warnings.about("no device trains")
    assert "wattfleet coordinator serve" in said and "on_coordinator_away" in said
    logged = [record.getMessage() for record in caplog.records]
    assert sum("still waiting for the coordinator" in each for each in logged) == 5, "every ten minutes of an hour"
    assert sum("rounds are planned again" in each for each in logged) == 1


def test_a_run_that_starts_while_the_coordinator_is_away_waits_for_it() -> None:
    planner = PlannerStub(away=True)
    grid = GridOfNodes(fleet(), ClockOfOutage(planner, 500.0))
    assert run(grid, planner, rounds=2).arrays
    assert trainings_by_round(grid) == {1: 4, 2: 4}
    assert len(planner.asked("PlanRound")) == 2


def test_a_run_ends_with_an_error_once_the_coordinator_was_away_too_long() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(away=True)
    began_s = grid.clock.now_s()
    with pytest.raises(PlanningError, match=r"did not answer for 300 s \(coordinator_patience_s\)") as error:
        run(grid, planner, coordinator_patience_s=300.0)
    assert "wattfleet coordinator serve" in str(error.value)
    assert grid.clock.now_s() - began_s == pytest.approx(300.0, abs=40.0)
    assert not grid.trainings()


# --- stop -----------------------------------------------------------------------------------------------------------


def test_a_run_that_shall_stop_ends_when_the_coordinator_is_lost() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"])
    lost_in_round(grid, planner, 2)
    with pytest.raises(PlanningError, match="does not answer.*the run ends.*on_coordinator_away='stop'"):
        run(grid, planner, rounds=4, on_coordinator_away="stop")
    assert trainings_by_round(grid) == {1: 2, 2: 2}


def test_a_run_that_shall_stop_does_not_start_without_a_coordinator() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(away=True)
    evaluated: list[int] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        evaluated.append(server_round)
        return MetricRecord({"accuracy": 0.5})

    strategy = unsurveyed(FedAvg(), planner, grid.clock, on_coordinator_away="stop")
    with pytest.raises(PlanningError, match="does not answer"):
        strategy.start(grid, ARRAYS, num_rounds=1, evaluate_fn=evaluate)
    assert not grid.sent and not evaluated


# --- unplanned ------------------------------------------------------------------------------------------------------


def unplanned(grid: GridOfNodes, planner: PlannerStub, rounds: int, **options: Any) -> Any:
    strategy = options.pop("strategy", None) or FedAvg(fraction_evaluate=0.0)
    wrapped = unsurveyed(strategy, planner, grid.clock, on_coordinator_away="unplanned", **options)
    return wrapped.start(grid, ARRAYS, num_rounds=rounds)


def nodes_of_round(grid: GridOfNodes, number: int) -> set[int]:
    return {m.metadata.dst_node_id for m in grid.trainings() if m.content["config"]["server-round"] == number}


@pytest.mark.parametrize("nodes", [dict(KNOWN), {}], ids=["known before", "bound in this run"])
def test_drained_and_excluded_devices_never_train(nodes: dict[int, str], warnings: WarningLog) -> None:
    reasons = {"a": "drained by the operator", "c": "excluded: matches tag:attic"}
    grid, planner = GridOfNodes(fleet()), PlannerStub(nodes=nodes, excluded=reasons)
    lost_in_round(grid, planner, 1)
    unplanned(grid, planner, rounds=3)
    assert [nodes_of_round(grid, number) for number in (1, 2, 3)] == [{B, D}] * 3
    [said] = warnings.about("NO BUDGET IS KEPT")
    assert "except those of drained and excluded devices" in said
    assert len(warnings.about("a does not train while the coordinator is away: drained by the operator")) == 1
    assert len(warnings.about("c does not train while the coordinator is away: excluded: matches tag:attic")) == 1


def test_a_drained_device_does_not_train_under_a_new_node_id() -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(nodes=dict(KNOWN), excluded={"a": "drained by the operator"})

    def train(message: Any) -> Any:
        planner.away = True
        # Restarted SuperNodes, and one that the coordinator has never seen.
        grid.nodes.update({77: Node("a"), 78: Node("b"), 79: Node("new")})
        return trained(message)

    grid.nodes[B].train = train
    unplanned(grid, planner, rounds=2)
    assert nodes_of_round(grid, 2) == {78, C, D}


def test_nodes_that_came_during_an_outage_are_bound_afterwards() -> None:
    planner = PlannerStub(nodes=dict(KNOWN))
    grid = GridOfNodes(fleet(), ClockOfOutage(planner, 7.0))
    lost_in_round(grid, planner, 1)
    grid.nodes[D].train = lambda message: grid.nodes.update({77: Node("new")}) or trained(message)
    unplanned(grid, planner, rounds=3)
    assert nodes_of_round(grid, 2) == {A, B, C, D}
    assert nodes_of_round(grid, 3) == {A, B, C, D, 77}
    assert grid.identifications() == [77], "asked once"


def test_a_run_without_any_allowed_node_ends_with_an_error() -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(nodes=dict(KNOWN))

    def train(message: Any) -> Any:
        planner.away = True
        for node_id in (B, C, D):
            grid.nodes.pop(node_id, None)
        return trained(message)

    planner.excluded = {"a": "drained by the operator"}
    grid.nodes[B].train = train
    with pytest.raises(PlanningError, match="no connected node may train without a plan"):
        unplanned(grid, planner, rounds=2, patience_s=60.0)
    assert nodes_of_round(grid, 2) == set()


def test_drained_devices_do_not_evaluate_either() -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(nodes=dict(KNOWN), excluded={"a": "drained by the operator"})
    unplanned(grid, planner, rounds=1, strategy=FedAvg())
    evaluated = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "evaluate"]
    assert sorted(evaluated) == [B, C, D]


def test_rounds_without_a_plan_are_reported_when_the_coordinator_is_back() -> None:
    planner = PlannerStub(nodes=dict(KNOWN))
    grid = GridOfNodes(fleet(c={"train": raised}), ClockOfOutage(planner, 13.0))
    lost_in_round(grid, planner, 1)
    strategy = unsurveyed(FedAvg(fraction_evaluate=0.0), planner, grid.clock, on_coordinator_away="unplanned")
    strategy.start(grid, ARRAYS, num_rounds=4, evaluate_fn=lambda number, _: MetricRecord({"accuracy": 0.1 * number}))
    told = [(method, request) for method, request in planner.calls if method != "ResolveNodes"]
    assert [method for method, _ in told] == [
        *("StartRun", "ReportMetrics", "PlanRound", "FinishRound", "ReportMetrics"),
        *(2 * ["ReportUnplannedRound", "ReportMetrics"]),
        *("PlanRound", "FinishRound", "ReportMetrics", "FinishRun"),
    ]
    first, second = planner.asked("ReportUnplannedRound")
    assert (first.run_id, first.round, second.round) == (planner.asked("StartRun")[0].run_id, 2, 3)
    assert [first.wall_s, second.wall_s] == pytest.approx([5.0, 5.0], abs=1.0)
    ago_s = [first.began_ago_s, second.began_ago_s]
    assert ago_s == pytest.approx([first.wall_s + second.wall_s, second.wall_s]), "before the report was sent"
    results = {each.node_id: each.result for each in first.results}
    assert {node_id: each.device_id for node_id, each in results.items()} == KNOWN
    assert results[C].failure == "the app raised: out of memory"
    assert results[B].failure == "" and results[B].num_examples > 0


def test_the_results_of_a_long_outage_are_not_all_kept(monkeypatch: pytest.MonkeyPatch, warnings: WarningLog) -> None:
    monkeypatch.setattr("wattfleet.flower.server.coordinator_run._MAX_KEPT_RESULTS", 12)
    planner = PlannerStub(nodes=dict(KNOWN))
    grid = GridOfNodes(fleet(), ClockOfOutage(planner, 27.0))
    lost_in_round(grid, planner, 1)
    unplanned(grid, planner, rounds=7)
    told = planner.asked("ReportUnplannedRound")
    assert [report.round for report in told] == [2, 3, 4, 5, 6]
    assert [len(report.results) for report in told] == [4, 4, 0, 0, 0]
    assert len(warnings.about("are dropped")) == 3


def test_a_round_that_began_without_any_coordinator_is_reported_by_node() -> None:
    planner = PlannerStub(away=True)
    grid = GridOfNodes(fleet(), ClockOfOutage(planner, 4.0))
    unplanned(grid, planner, rounds=2)
    told, *_ = planner.asked("ReportUnplannedRound")
    assert told.round == 1
    assert {each.node_id: each.result.device_id for each in told.results} == dict.fromkeys(KNOWN, "")


# --- FedBuff --------------------------------------------------------------------------------------------------------


def buffered(grid: GridOfNodes, planner: PlannerStub, steps: int, timeout: float, **options: Any) -> Any:
    wrapped = unsurveyed(FedBuff(2, clock=grid.clock), planner, grid.clock, **options)
    return wrapped.start(
        grid, ARRAYS, num_rounds=steps, timeout=timeout, evaluate_fn=lambda *_: MetricRecord({"accuracy": 0.5})
    )


def test_fedbuff_takes_updates_while_it_waits_for_the_coordinator() -> None:
    planner = PlannerStub(nodes=dict(KNOWN))
    grid = GridOfNodes(fleet(d={"takes_s": 40.0}), ClockOfOutage(planner, 3 * 3600.0))
    lost_in_round(grid, planner, 1)
    # The outage is longer than the time that the run may go without an update.
    assert buffered(grid, planner, steps=4, timeout=600.0).arrays
    plans = planner.asked("PlanRound")
    assert {m.content[RECORD_KEY]["plan-id"] for m in grid.trainings()} == {
        f"{each.run_id}/{each.round}" for each in plans
    }
    assert [sorted(r.device_id for r in each.results) for each in planner.asked("FinishRound")][0] == [
        "a",
        "b",
        "c",
        "d",
    ]


def test_fedbuff_reports_what_it_trained_without_plans() -> None:
    planner = PlannerStub(nodes=dict(KNOWN), excluded={"a": "drained by the operator"})
    grid = GridOfNodes(fleet(), ClockOfOutage(planner, 12.0))
    lost_in_round(grid, planner, 1)
    buffered(grid, planner, steps=6, timeout=600.0, on_coordinator_away="unplanned")
    told = planner.asked("ReportUnplannedRound")
    assert told and all(each.node_id != A for report in told for each in report.results)
    # It evaluates while nodes still train, before their round is reported.
    known = {request.round for request in planner.asked("PlanRound")} | {report.round for report in told}
    assert {request.round for request in planner.asked("ReportMetrics")} <= known | {0}
    assert not any(message.metadata.dst_node_id == A for message in grid.trainings())


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"on_coordinator_away": "ignore"}, "on_coordinator_away must be 'wait', 'stop' or 'unplanned', not 'ignore'"),
        ({"coordinator_patience_s": -1.0}, "coordinator_patience_s must be 0 or more"),
        ({"coordinator_patience_s": float("nan")}, "coordinator_patience_s must be 0 or more"),
        ({"coordinator_patience_s": 60.0, "on_coordinator_away": "stop"}, "only .* with on_coordinator_away='wait'"),
    ],
)
def test_unusable_choices_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(Exception, match=reason) as error:
        PowerAware(FedAvg(), PlannerStub(), **options, survey_s=None, measures_left_out=False)
    assert type(error.value).__name__ == "InvalidInputError"


# --- Coordinator outage -----------------------------------------------------------------------------------------------
# PowerAware while the coordinator is unreachable, restarts, or cannot store reports.


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
    monkeypatch.setattr("wattfleet.flower.server.planning_client._CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr("wattfleet.flower.server.planning_client._RECONNECT_TIMEOUT_S", 5.0)
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
            monkeypatch.setattr("wattfleet.flower.server.planning_client._RECONNECT_TIMEOUT_S", 0.1)
        if server_round == 2:
            servers.append(served(planner, port)[0])
            monkeypatch.setattr("wattfleet.flower.server.planning_client._RECONNECT_TIMEOUT_S", 20.0)
        return MetricRecord({"accuracy": 0.5})

    try:
        strategy.start(grid, ARRAYS, num_rounds=3, evaluate_fn=evaluated)
    finally:
        servers[-1].stop(None).wait()
    assert [request.round for request in planner.asked("PlanRound")] == [1, 3]
    assert len(grid.trainings()) == 2 + 4 + 2
    assert planner.asked("FinishRun")[-1].error == ""
