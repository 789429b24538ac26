"""How long PowerAware waits for replies, nodes, ready devices and power."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import (
    GridOfNodes,
    Node,
    PlannerStub,
    StatusError,
    gone,
    trained,
)
from tests.fakes.power_aware_runs import ARRAYS, KNOWN, A, B, C, D, WarningLog, fleet, run
from wattfleet_flower import PlanningError, PowerAware


@pytest.mark.parametrize(
    ("plan", "options", "waited_s"),
    [
        ({"deadline_s": 40.0}, {}, 40 + 90),
        ({"duration_s": 20.0}, {}, 2 * 20 + 90),
        ({"deadline_s": 40.0}, {"allowance_s": 10.0}, 50),
        ({"deadline_s": 40.0}, {"allowance_s": None}, 3600),
        ({"deadline_s": 9_000.0}, {}, 3600),
        ({"deadline_s": 40.0, "of_assumed_length": ["b"]}, {}, 3600),
        ({"duration_s": 20.0, "of_assumed_length": ["b"]}, {}, 3600),
        ({"duration_s": 20.0, "of_assumed_length": ["a"]}, {}, 2 * 20 + 90),
    ],
)
def test_a_round_waits_as_planned_within_the_apps_timeout(
    plan: dict[str, Any], options: dict[str, Any], waited_s: float
) -> None:
    grid = GridOfNodes(fleet(d={"takes_s": 1e6}))
    run(grid, PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN), **plan), strategy=FedAvg(), **options)
    assert grid.waited_s == pytest.approx([waited_s, 3600]), "nodes train, then evaluate"


def test_nodes_have_two_minutes_to_identify() -> None:
    grid = GridOfNodes(fleet(d={"takes_s": 1e6}))
    run(grid, PlannerStub(chosen=["b", "c"]))
    assert grid.waited_s[0] == pytest.approx(120.0)


@pytest.mark.parametrize(
    ("takes_s", "trimmed_s", "timeout", "waited_s", "failure"),
    [
        (3_000, 3_000, 10_000, 3_000, ""),
        (6_000, 3_000, 10_000, 6_000, ""),
        (3_000, 3_000, 2_000, 2_000, "no reply within 2000 s"),
        (3_000, 600, 10_000, 1_290, "no reply within 1290 s"),
        (3_000, 800, 10_000, 1_690, "no reply within 1690 s"),
    ],
)
def test_a_trimmed_round_is_waited_for_longer_within_the_apps_timeout(
    takes_s: float, trimmed_s: float, timeout: float, waited_s: float, failure: str
) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN), duration_s=600.0)

    def train(message: Any) -> Any:
        planner.duration_s = trimmed_s
        return trained(message)

    vars(grid.nodes[D]).update(train=train, takes_s=takes_s)
    began_s = grid.clock.now_s()
    run(grid, planner, timeout=timeout)
    assert grid.clock.now_s() - began_s == pytest.approx(waited_s, abs=1.0)
    assert planner.results()[0]["d"].failure == failure
    [planned] = planner.asked("PlanRound")
    assert {one.plan_id for one in planner.asked("GetPlan")} == {f"{planned.run_id}/{planned.round}"}


def test_a_trimmed_plan_is_looked_up_at_a_coordinator_without_get_plan() -> None:
    planner = PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN), duration_s=600.0, before_get_plan=True)
    grid = GridOfNodes(fleet())

    def train(message: Any) -> Any:
        planner.duration_s = 3_000
        return trained(message)

    vars(grid.nodes[D]).update(train=train, takes_s=3_000)
    run(grid, planner, timeout=10_000)
    assert planner.results()[0]["d"].failure == ""
    [asked, *again] = planner.asked("PlanRound")
    assert {(one.run_id, one.round, len(one.node_ids)) for one in again} == {(asked.run_id, asked.round, 0)}


def test_the_planned_timeout_stands_if_a_trim_cannot_be_looked_up(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN), duration_s=600.0)

    def train(message: Any) -> Any:
        planner.away = True
        return trained(message)

    vars(grid.nodes[D]).update(train=train, takes_s=3_000)
    began_s = grid.clock.now_s()
    result = run(grid, planner, timeout=10_000)
    assert grid.waited_s[-1] == pytest.approx(2 * 600 + 90) and result.arrays
    assert grid.clock.now_s() - began_s < 2 * 600 + 90 + 60
    assert warnings.about("not waiting any longer for replies")


def test_missing_nodes_are_waited_for_once(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    strategy = FedAvg(min_available_nodes=6, min_evaluate_nodes=6, min_train_nodes=6)
    result = run(grid, planner, rounds=3, strategy=strategy, patience_s=60.0)
    assert len(grid.trainings()) == 3 * 4
    assert sum(grid.clock.slept) == 60.0, "once, not in every round"
    assert len(result.evaluate_metrics_clientapp) == 3, "evaluation does not stall either"
    assert len(warnings.about("continuing with 4 nodes: the strategy wants 6")) == 1


def test_late_nodes_are_waited_for() -> None:
    nodes = fleet()
    grid = GridOfNodes({A: nodes[A]})
    sleep_s = grid.clock.sleep_s

    def meanwhile(seconds: float) -> None:
        sleep_s(seconds)
        if len(grid.clock.slept) == 3:
            grid.nodes.update(nodes)

    grid.clock.sleep_s = meanwhile  # type: ignore[method-assign]
    run(grid, PlannerStub(), strategy=FedAvg(fraction_evaluate=0.0, min_available_nodes=4))
    assert len(grid.trainings()) == 4
    assert sum(grid.clock.slept) == 3.0


def test_without_any_node_the_run_ends_with_advice() -> None:
    grid = GridOfNodes({})
    with pytest.raises(PlanningError, match="no node has connected within 120 s: start the SuperNodes"):
        run(grid, PlannerStub())


def test_a_node_without_an_identity_is_left_out_and_rarely_asked_again(warnings: WarningLog) -> None:
    grid = GridOfNodes(fleet(a={"takes_s": 1e6}, c={"device_id": None}))
    planner = PlannerStub()
    run(grid, planner, rounds=4, timeout=100.0)
    assert sorted(grid.identifications()) == [A, A, B, C, D]
    assert {m.metadata.dst_node_id for m in grid.trainings()} == {B, D}
    assert warnings.about(f"node {A} is left out until") and "no reply within 120 s" in warnings.about(f"node {A}")[0]
    assert "the app raised" in warnings.about(f"node {C} is excluded")[0]
    # Eleven minutes later, the node may run another app.
    grid.nodes[A] = Node("a")
    grid.clock.advance(660.0)
    run(grid, planner)
    assert {m.metadata.dst_node_id for m in grid.trainings()} == {A, B, D}


def test_a_restarted_supernode_is_trained_once() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    strategy = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock)

    def restarts(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round == 1:
            grid.nodes[A + 100] = Node("a")  # Flower still lists the former one
            grid.nodes[A].train = gone
        return None

    strategy.start(grid, ARRAYS, num_rounds=2, evaluate_fn=restarts)
    assert planner.asked("PlanRound")[-1].node_ids == [B, C, D, A + 100]
    assert not any(told.failure for told in planner.results()[-1].values())


LOW = StatusError(grpc.StatusCode.FAILED_PRECONDITION, "12 W is not enough to train one device: allow at least 15.0 W")
NOT_READY = StatusError(grpc.StatusCode.UNAVAILABLE, "no device is ready to train: a is profiling")


def test_an_invalid_request_ends_the_run_at_once() -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(
        refusals=[StatusError(grpc.StatusCode.INVALID_ARGUMENT, "a round needs a number of epochs above 0")]
    )
    with pytest.raises(PlanningError, match="INVALID_ARGUMENT: a round needs a number of epochs above 0"):
        run(grid, planner)
    assert grid.clock.slept == []
    assert "epochs above 0" in planner.asked("FinishRun")[0].error


def test_devices_getting_ready_are_waited_for_with_a_limit() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(refusals=[NOT_READY] * 5)
    run(grid, planner)
    assert len(grid.trainings()) == 4 and sum(grid.clock.slept) == 5.0
    with pytest.raises(PlanningError, match="no device is ready to train: a is profiling"):
        run(GridOfNodes(fleet()), PlannerStub(refusals=[NOT_READY] * 500))


def test_a_budget_that_never_sufficed_ends_the_run() -> None:
    grid = GridOfNodes(fleet())
    with pytest.raises(PlanningError, match="allow at least"):
        run(grid, PlannerStub(nodes=dict(KNOWN), refusals=[LOW] * 10_000), patience_s=30.0)
    assert sum(grid.clock.slept) == 30.0


def test_a_budget_that_is_low_at_night_is_waited_out() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    strategy = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock)

    def night(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round == 1:
            planner.refusals = [LOW] * (8 * 360)
        return None

    strategy.start(grid, ARRAYS, num_rounds=2, evaluate_fn=night)
    assert len(grid.trainings()) == 8
    assert sum(grid.clock.slept) == pytest.approx(8 * 3600)


def test_devices_getting_ready_after_a_night_are_waited_for(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    strategy = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock, patience_s=60.0)
    nights = {1: [*[LOW] * 360, *[NOT_READY] * 59], 2: [*[LOW] * 360, *[NOT_READY] * 61]}

    def night(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        planner.refusals = nights.get(server_round, [])
        return None

    with pytest.raises(PlanningError, match="no device is ready"):
        strategy.start(grid, ARRAYS, num_rounds=3, evaluate_fn=night)
    assert len(grid.trainings()) == 8, "in the second night devices are away for longer than the wait"
    assert sum(grid.clock.slept) == 2 * 3600 + 59 + 60
