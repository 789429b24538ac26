"""What an app's author notices of PowerAware: who is sent what, what is aggregated, and what goes wrong in words."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Result

from tests.fakes.flower_in_process import (
    RUN_ID,
    GridOfNodes,
    Node,
    PlannerStub,
    StatusError,
    gone,
    killed,
    partly,
    raised,
    trained,
)
from wattfleet_flower import PlanningError, PowerAware, TwoStrategiesError
from wattfleet_proto.assignment import RECORD_KEY, RoundAssignment
from wattfleet_proto.v1 import planning_pb2

# Flower's node ids use all 64 bits.
A, B, C, D = (2**63 - 1 + k for k in range(4))
KNOWN = {A: "a", B: "b", C: "c", D: "d"}
ARRAYS = ArrayRecord([np.zeros((2, 3)), np.ones(2)])


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The warnings that were logged; Flower's logger does not pass them on of itself."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.INFO)
    yield _Warnings(caplog)


class _Warnings(list[str]):
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __iter__(self) -> Iterator[str]:
        return (r.getMessage() for r in self._caplog.records if r.levelno >= logging.WARNING)

    def about(self, text: str) -> list[str]:
        return [one for one in self if text in one]


def fleet(**changes: Any) -> dict[int, Node]:
    nodes = {A: Node("a"), B: Node("b"), C: Node("c"), D: Node("d")}
    for device_id, change in changes.items():
        [node] = [node for node in nodes.values() if node.device_id == device_id]
        vars(node).update(change)
    return nodes


def run(
    grid: GridOfNodes,
    planner: PlannerStub,
    rounds: int = 1,
    strategy: Any = None,
    timeout: float = 3600,
    **options: Any,
) -> Result:
    strategy = strategy or FedAvg(fraction_evaluate=0.0)
    wrapped = PowerAware(strategy, planner, clock=grid.clock, **options)
    return wrapped.start(grid, ARRAYS, num_rounds=rounds, timeout=timeout)


def first_value(result: Result) -> float:
    return float(result.arrays.to_numpy_ndarrays()[0][0, 0])


# --- who is sent what ---------------------------------------------------------------------------------------------


def test_only_the_chosen_are_sent_a_training_each_with_its_own_assignment() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], deadline_s=40.0)
    result = run(grid, planner, rounds=2, local_epochs=3)
    assert sorted(m.metadata.dst_node_id for m in grid.trainings()) == [B, B, D, D]
    for message in grid.trainings():
        assignment = RoundAssignment.from_record(message.content[RECORD_KEY])
        assert assignment.device_id == {B: "b", D: "d"}[message.metadata.dst_node_id]
        assert (assignment.epochs, assignment.deadline_s) == (3.0, 40.0)
        assert "config" in message.content, "what the strategy wrote is there too"
    assert sorted(grid.identifications()) == [A, B, C, D], "each node is asked who it is once"
    # 0.2 and 0.4 in each round, weighed by 20 and 40 examples.
    assert first_value(result) == pytest.approx(2 * (0.2 * 20 + 0.4 * 40) / 60)
    assert [method for method, _ in planner.calls][-1] == "FinishRun"


def test_a_strategy_that_trains_nothing_needs_no_plan() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    run(grid, planner, strategy=FedAvg(fraction_train=0.0))
    assert grid.trainings() == [] and planner.asked("PlanRound") == []


def test_the_wrapped_strategy_is_left_as_it_was() -> None:
    inner = FedAvg(fraction_train=0.5, min_train_nodes=3, min_available_nodes=4)
    strategy = DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 10.0, 2)
    grid = GridOfNodes(fleet())
    run(grid, PlannerStub(chosen=["b", "d"]), strategy=strategy)
    assert len(grid.trainings()) == 2, "also what a strategy wraps takes all that were chosen"
    assert (inner.fraction_train, inner.min_train_nodes, inner.min_available_nodes) == (0.5, 3, 4)


def test_a_strategy_that_picks_nodes_by_itself_cannot_spend_watts_that_are_not_there(warnings: _Warnings) -> None:
    class OwnPick(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):  # type: ignore[no-untyped-def]
            messages = list(super().configure_train(server_round, arrays, config, grid))
            other = self._construct_messages(messages[0].content, [A], "train")
            return [*messages, *other]

    grid = GridOfNodes(fleet())
    run(grid, PlannerStub(chosen=["b", "d"]), strategy=OwnPick(fraction_evaluate=0.0))
    assert sorted(m.metadata.dst_node_id for m in grid.trainings()) == [B, D]
    assert warnings.about(f"node {A} gets no message")


# --- replies ------------------------------------------------------------------------------------------------------


def test_each_failure_is_told_in_words_and_the_round_goes_on(warnings: _Warnings) -> None:
    changes = {
        "a": {"train": gone, "takes_s": 50.0},
        "b": {"train": killed, "takes_s": 59.0},
        "c": {"train": raised},
        "d": {"takes_s": 10_000.0},
    }
    for device_id, change in changes.items():
        grid, planner = GridOfNodes(fleet(**{device_id: change})), PlannerStub(nodes=dict(KNOWN))
        result = run(grid, planner)
        [results] = planner.results()
        assert {one for one, told in results.items() if told.failure} == {device_id}
        changes[device_id] = {"told": results[device_id].failure}
        assert result.arrays, "the others' work is aggregated"
        assert (results[device_id].share, results[device_id].HasField("num_examples")) == (0.0, False)
    assert {one: change["told"] for one, change in changes.items()} == {
        "a": "the node is gone",
        "b": "the training process was killed",
        "c": "the app raised: out of memory",
        "d": "no reply within 130 s",
    }
    assert warnings.about("a failed: the node is gone")


def test_a_result_says_what_the_reply_counts_for_and_its_loss() -> None:
    planner = PlannerStub(chosen=["b"])
    run(GridOfNodes(fleet()), planner)
    [results] = planner.results()
    assert set(results) == {"b"}
    told = results["b"]
    assert (told.failure, told.share, told.num_examples, told.loss) == ("", 1.0, 20.0, pytest.approx(5.0))


@pytest.mark.parametrize(
    ("metrics", "loss"),
    [
        ({"loss": 3.0, "train-loss": 2.0}, 5.0),
        ({"train_loss": float("nan"), "loss": 1.0}, None),
        ({"train_loss": float("inf")}, None),
    ],
)
def test_a_loss_is_the_first_that_is_known_and_finite(metrics: dict[str, float], loss: float | None) -> None:
    grid = GridOfNodes(fleet(b={"train": lambda message: trained(message, **metrics)}))
    planner = PlannerStub(chosen=["b"])
    run(grid, planner)
    told = planner.results()[0]["b"]
    assert (told.loss if told.HasField("loss") else None) == loss


def test_partial_work_is_kept_and_weighs_by_its_share() -> None:
    grid = GridOfNodes(fleet(d={"train": partly(0.25)}))
    planner = PlannerStub(chosen=["b", "d"])
    result = run(grid, planner)
    # 0.2 with 20 examples, and 0.4 with a quarter of 40.
    assert first_value(result) == pytest.approx((0.2 * 20 + 0.4 * 10) / 30)
    told = planner.results()[0]["d"]
    assert (told.share, told.num_examples, told.failure) == (0.25, 10.0, "")


def test_an_app_that_weighs_partial_work_itself_is_believed() -> None:
    grid = GridOfNodes(fleet(d={"train": partly(0.25, **{"app-weighs": True})}))
    planner = PlannerStub(chosen=["b", "d"])
    result = run(grid, planner)
    assert first_value(result) == pytest.approx((0.2 * 20 + 0.4 * 40) / 60)
    assert planner.results()[0]["d"].num_examples == 40.0


def test_of_work_that_was_cut_nobody_knows_where_the_weight_stands() -> None:
    def train(message: Any) -> Any:
        reply = trained(message)
        reply.content[RECORD_KEY] = ConfigRecord({"cut": True, "app-weighs": False})
        return reply

    planner = PlannerStub(chosen=["b"])
    run(GridOfNodes(fleet(b={"train": train})), planner)
    told = planner.results()[0]["b"]
    assert (told.share, told.num_examples, told.failure) == (1.0, 20.0, "")


def test_the_strategy_sees_nothing_of_wattfleets_in_a_reply() -> None:
    seen: list[set[str]] = []

    class Looks(FedAvg):
        def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
            replies = list(replies)
            seen.extend(set(reply.content) for reply in replies)
            return super().aggregate_train(server_round, replies)

    run(GridOfNodes(fleet(d={"train": partly(0.5)})), PlannerStub(), strategy=Looks(fraction_evaluate=0.0))
    assert seen == [{"arrays", "metrics"}] * 4


def test_the_weight_is_the_one_that_the_strategy_uses() -> None:
    def counts(message: Any) -> Any:
        return partly(0.5)(message) if message.metadata.dst_node_id == D else trained(message)

    def train(message: Any) -> Any:
        reply = counts(message)
        reply.content["metrics"]["samples"] = 100
        return reply

    grid = GridOfNodes(fleet(b={"train": train}, d={"train": train}))
    result = run(
        grid, PlannerStub(chosen=["b", "d"]), strategy=FedAvg(fraction_evaluate=0.0, weighted_by_key="samples")
    )
    assert first_value(result) == pytest.approx((0.2 * 100 + 0.4 * 50) / 150)


# --- how long a round lasts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "options", "waited_s"),
    [
        ({"deadline_s": 40.0}, {}, 40 + 90),
        ({"duration_s": 20.0}, {}, 2 * 20 + 90),
        ({"deadline_s": 40.0}, {"allowance_s": 10.0}, 50),
        ({"deadline_s": 40.0}, {"allowance_s": None}, 3600),
        ({"deadline_s": 9_000.0}, {}, 3600),
    ],
)
def test_a_round_waits_for_its_plan_and_never_longer_than_the_app_allows(
    plan: dict[str, float], options: dict[str, Any], waited_s: float
) -> None:
    grid = GridOfNodes(fleet(d={"takes_s": 1e6}))
    run(grid, PlannerStub(chosen=["b", "d"], **plan), strategy=FedAvg(), **options)
    assert grid.timeouts_s == [120.0, waited_s, 3600], "nodes identify, train, evaluate"


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
def test_a_round_that_is_trimmed_while_it_trains_is_waited_for_longer_but_no_longer_than_the_app_allows(
    takes_s: float, trimmed_s: float, timeout: float, waited_s: float, failure: str
) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN), duration_s=600.0)

    def train(message: Any) -> Any:
        planner.duration_s = trimmed_s
        return trained(message)

    vars(grid.nodes[D]).update(train=train, takes_s=takes_s)
    began_s = grid.clock.at_s
    run(grid, planner, timeout=timeout)
    assert grid.timeouts_s == [2 * 600 + 90], "a round that is done in time is waited for by Flower alone"
    assert grid.clock.at_s - began_s == pytest.approx(waited_s, abs=3.0)
    assert planner.results()[0]["d"].failure == failure
    [asked, *again] = planner.asked("PlanRound")
    assert {(one.run_id, one.round, len(one.node_ids)) for one in again} == {(asked.run_id, asked.round, 0)}


def test_a_round_is_waited_for_as_planned_where_nobody_can_say_whether_it_was_trimmed(warnings: _Warnings) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN), duration_s=600.0)

    def train(message: Any) -> Any:
        planner.away = True
        return trained(message)

    vars(grid.nodes[D]).update(train=train, takes_s=3_000)
    began_s = grid.clock.at_s
    result = run(grid, planner, timeout=10_000)
    assert grid.clock.at_s - began_s == 2 * 600 + 90 and result.arrays
    assert warnings.about("replies are waited for no longer")


# --- nodes that are not there -------------------------------------------------------------------------------------


def test_nodes_that_never_come_are_waited_for_once(warnings: _Warnings) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    strategy = FedAvg(min_available_nodes=6, min_evaluate_nodes=6, min_train_nodes=6)
    result = run(grid, planner, rounds=3, strategy=strategy, patience_s=60.0)
    assert len(grid.trainings()) == 3 * 4
    assert sum(grid.clock.slept) == 60.0, "once, not in every round"
    assert len(result.evaluate_metrics_clientapp) == 3, "evaluation does not stall either"
    assert len(warnings.about("going on with 4 nodes: the strategy asks for 6")) == 1


def test_nodes_that_come_late_are_waited_for() -> None:
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


def test_no_node_at_all_ends_the_run_with_what_to_look_at() -> None:
    grid = GridOfNodes({})
    with pytest.raises(PlanningError, match="no node has connected within 120 s: are the SuperNodes running"):
        run(grid, PlannerStub())


def test_a_node_that_does_not_identify_is_left_out_and_not_asked_in_every_round(warnings: _Warnings) -> None:
    grid = GridOfNodes(fleet(a={"takes_s": 1e6}, c={"device_id": None}))
    planner = PlannerStub()
    run(grid, planner, rounds=4, timeout=100.0)
    assert sorted(grid.identifications()) == [A, B, C, D]
    assert {m.metadata.dst_node_id for m in grid.trainings()} == {B, D}
    assert warnings.about(f"node {A} is left out") and "no reply within 120 s" in warnings.about(f"node {A}")[0]
    assert "the app raised" in warnings.about(f"node {C} is left out")[0]
    # Eleven minutes later it may be another app.
    grid.nodes[A].takes_s = 1.0
    grid.clock.at_s += 660.0
    run(grid, planner)
    assert {m.metadata.dst_node_id for m in grid.trainings()} == {A, B, D}


def test_a_supernode_that_restarts_under_a_new_number_is_trained_once() -> None:
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


# --- the coordinator is away --------------------------------------------------------------------------------------


def test_without_a_coordinator_the_plain_strategy_trains_and_it_is_said_once(warnings: _Warnings) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(away=True)
    result = run(grid, planner, rounds=3, strategy=FedAvg(fraction_train=0.5, fraction_evaluate=0.0))
    assert result.arrays
    assert len(grid.trainings()) == 3 * 2, "the strategy's own sampling counts"
    assert not any(RECORD_KEY in message.content for message in grid.sent)
    [said] = warnings.about("NO BUDGET IS KEPT")
    assert "wattfleet coordinator serve" in said and "plain FedAvg" in said


def test_the_plain_strategy_stalls_as_little(warnings: _Warnings) -> None:
    grid = GridOfNodes(fleet())
    strategy = FedAvg(min_available_nodes=9, min_train_nodes=9, fraction_evaluate=0.0)
    run(grid, PlannerStub(away=True), rounds=2, strategy=strategy)
    assert len(grid.trainings()) == 2 * 4


def test_a_coordinator_that_comes_back_plans_again_and_hears_what_it_missed(warnings: _Warnings) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"])
    strategy = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock)
    away = {1: True, 2: False}

    def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        planner.away = away.get(server_round, planner.away)
        return MetricRecord({"accuracy": 0.1 * server_round})

    strategy.start(grid, ARRAYS, num_rounds=3, evaluate_fn=evaluated)
    trained_in = [len([m for m in grid.trainings() if m.content["config"]["server-round"] == n]) for n in (1, 2, 3)]
    assert trained_in == [2, 4, 2]
    assert [request.round for request in planner.asked("PlanRound")] == [1, 3]
    assert [request.round for request in planner.asked("ReportMetrics")] == [0, 1, 3]
    assert len(warnings.about("NO BUDGET IS KEPT")) == 1


def test_a_coordinator_that_goes_away_during_a_round_hears_of_it_later() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"])

    def train(message: Any) -> Any:
        planner.away = message.content["config"]["server-round"] == 1
        return trained(message)

    grid.nodes[B].train = train
    PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock).start(grid, ARRAYS, num_rounds=3)
    assert [request.round for request in planner.asked("PlanRound")] == [1, 3], "the second is plain"
    told = [request.plan_id.split("/")[1] for request in planner.asked("FinishRound")]
    assert told == ["1", "3"]


class FullFor:
    """A clock by which a coordinator's disk has room again after a while."""

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
def test_one_whose_disk_is_full_for_a_while_is_told_everything_in_its_order(rounds: int, full_in: int) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN))

    def train(message: Any) -> Any:
        planner.full |= message.content["config"]["server-round"] == full_in
        return trained(message)

    grid.nodes[B].train = train
    clock = FullFor(grid.clock, planner, 20.0)
    strategy = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=clock)
    strategy.start(grid, ARRAYS, num_rounds=rounds, evaluate_fn=lambda number, arrays: MetricRecord({"accuracy": 0.1}))
    round_by_round = ["PlanRound", "FinishRound", "ReportMetrics"]
    told = [method for method, _ in planner.calls if method != "ResolveNodes"]
    assert told == ["StartRun", "ReportMetrics", *(rounds * round_by_round), "FinishRun"]


def test_one_whose_disk_stays_full_does_not_keep_the_run_from_ending(warnings: _Warnings) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"], nodes=dict(KNOWN))

    def train(message: Any) -> Any:
        planner.full = True
        return trained(message)

    grid.nodes[B].train = train
    assert run(grid, planner).arrays
    assert warnings.about("does not know all of this run: 2 reports were not taken")


def test_one_whose_store_was_replaced_is_told_of_the_run_again() -> None:
    grid = GridOfNodes(fleet())
    unknown = StatusError(grpc.StatusCode.NOT_FOUND, "run '7' never started")
    planner = PlannerStub(refusals=[unknown])
    run(grid, planner)
    assert len(planner.asked("StartRun")) == 2
    assert len(grid.trainings()) == 4


# --- refusals -----------------------------------------------------------------------------------------------------

LOW = StatusError(grpc.StatusCode.FAILED_PRECONDITION, "12 W is not enough to train one device: allow at least 15.0 W")
NOT_READY = StatusError(grpc.StatusCode.UNAVAILABLE, "no device is ready to train: a is profiling")


def test_what_is_wrong_with_the_request_ends_the_run_at_once() -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(refusals=[StatusError(grpc.StatusCode.INVALID_ARGUMENT, "a round needs epochs above zero")])
    with pytest.raises(PlanningError, match="INVALID_ARGUMENT: a round needs epochs above zero"):
        run(grid, planner)
    assert grid.clock.slept == []
    assert "epochs above zero" in planner.asked("FinishRun")[0].error


def test_devices_that_get_ready_are_waited_for_and_not_for_ever() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(refusals=[NOT_READY] * 5)
    run(grid, planner)
    assert len(grid.trainings()) == 4 and sum(grid.clock.slept) == 5.0
    with pytest.raises(PlanningError, match="no device is ready to train: a is profiling"):
        run(GridOfNodes(fleet()), PlannerStub(refusals=[NOT_READY] * 500))


def test_a_budget_that_never_carried_a_device_is_a_mistake() -> None:
    grid = GridOfNodes(fleet())
    with pytest.raises(PlanningError, match="allow at least"):
        run(grid, PlannerStub(nodes=dict(KNOWN), refusals=[LOW] * 10_000), patience_s=30.0)
    assert sum(grid.clock.slept) == 30.0


def test_a_budget_that_falls_at_night_is_waited_out() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    strategy = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock)

    def night(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round == 1:
            planner.refusals = [LOW] * (8 * 360)
        return None

    strategy.start(grid, ARRAYS, num_rounds=2, evaluate_fn=night)
    assert len(grid.trainings()) == 8
    assert sum(grid.clock.slept) == pytest.approx(8 * 3600)


def test_devices_that_get_ready_after_a_night_are_waited_for_as_ever(warnings: _Warnings) -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    strategy = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock, patience_s=60.0)
    nights = {1: [*[LOW] * 360, *[NOT_READY] * 59], 2: [*[LOW] * 360, *[NOT_READY] * 61]}

    def night(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        planner.refusals = nights.get(server_round, [])
        return None

    with pytest.raises(PlanningError, match="no device is ready"):
        strategy.start(grid, ARRAYS, num_rounds=3, evaluate_fn=night)
    assert len(grid.trainings()) == 8, "the second night leaves devices away for longer than is waited"
    assert sum(grid.clock.slept) == 2 * 3600 + 59 + 60


# --- two at once --------------------------------------------------------------------------------------------------


def test_a_power_aware_strategy_around_another_is_refused() -> None:
    inner = PowerAware(FedAvg(), PlannerStub())
    with pytest.raises(TwoStrategiesError, match="wrap a strategy once"):
        PowerAware(inner, PlannerStub())
    with pytest.raises(TwoStrategiesError, match="wrap a strategy once"):
        PowerAware(DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 10.0, 2), PlannerStub())


def test_two_strategies_in_one_run_at_once_are_refused_and_one_after_another_are_not() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub()
    outer = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock)

    def meanwhile(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round == 1:
            with pytest.raises(TwoStrategiesError, match="two power-aware strategies at once in run 7"):
                run(grid, planner)
        return None

    outer.start(grid, ARRAYS, num_rounds=1, evaluate_fn=meanwhile)
    run(grid, planner)
    names = [request.run_id for request in planner.asked("StartRun")]
    assert len(set(names)) == 2, "each has rounds of its own"
    assert all(name.split("-")[0] == str(RUN_ID) for name in names)


def test_one_that_a_strategy_of_flowers_wraps_plans_too() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"])
    inner = PowerAware(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock)
    DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 10.0, 2).start(
        grid, ARRAYS, num_rounds=1, train_config=ConfigRecord()
    )
    assert len(grid.trainings()) == 2
    assert not any(told.failure for told in planner.results()[0].values())


# --- over real gRPC -----------------------------------------------------------------------------------------------


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


def test_a_coordinator_that_restarts_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattfleet_flower.server.planner._REACHED_WITHIN_S", 0.5)
    monkeypatch.setattr("wattfleet_flower.server.planner._REACHED_AGAIN_WITHIN_S", 5.0)
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b", "d"])
    server, port = served(planner)
    servers = [server]
    strategy = PowerAware(FedAvg(fraction_evaluate=0.0), f"127.0.0.1:{port}", clock=grid.clock)

    def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == 1:
            servers[-1].stop(None).wait()
            monkeypatch.setattr("wattfleet_flower.server.planner._REACHED_AGAIN_WITHIN_S", 0.1)
        if server_round == 2:
            servers.append(served(planner, port)[0])
            monkeypatch.setattr("wattfleet_flower.server.planner._REACHED_AGAIN_WITHIN_S", 20.0)
        return MetricRecord({"accuracy": 0.5})

    try:
        strategy.start(grid, ARRAYS, num_rounds=3, evaluate_fn=evaluated)
    finally:
        servers[-1].stop(None).wait()
    assert [request.round for request in planner.asked("PlanRound")] == [1, 3]
    assert len(grid.trainings()) == 2 + 4 + 2
    assert planner.asked("FinishRun")[-1].error == ""
