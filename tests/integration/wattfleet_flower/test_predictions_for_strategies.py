"""Predictions in messages, in metrics and before the selection, for custom strategies and selections."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from tests.fakes.agent_socket import answered, assigned, context
from tests.fakes.flower_in_process import GridOfNodes, PlannerStub, raised, trained
from tests.fakes.power_aware_runs import ARRAYS, KNOWN, A, B, C, WarningLog, fleet, run
from tests.fakes.recording_agent import recording_agent
from wattfleet.errors import InvalidInputError
from wattfleet_flower import FedBuff, NodePrediction, PlanningError, PowerAware, power_mode_mod
from wattfleet_flower.server.errors import RefusedError
from wattfleet_proto.assignment import PREDICTION_KEY, RECORD_KEY
from wattfleet_proto.v1 import local_pb2

PREDICTED = {"wattfleet-predicted-epoch-s", "wattfleet-predicted-power-w", "wattfleet-predicted-epoch-kj"}
OBSERVED = {"wattfleet-observed-epoch-s", "wattfleet-observed-power-w", "wattfleet-observed-epoch-kj"}


def observing(epoch_s: Any = 30.0, power_w: Any = 9.0) -> dict[str, Any]:
    """A training with an observation of the agent."""

    def train(message: Message) -> Message:
        reply = trained(message)
        reply.content[RECORD_KEY] = ConfigRecord({"observed-epoch-s": epoch_s, "observed-power-w": power_w})
        return reply

    return {"train": train}


class Looks(FedAvg):
    """Records the metrics of each reply."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.seen: list[dict[str, float]] = []

    def aggregate_train(self, server_round: int, replies: Any) -> tuple[Any, MetricRecord | None]:
        replies = list(replies)
        self.seen += [dict(reply.content["metrics"]) for reply in replies if not reply.has_error()]
        return super().aggregate_train(server_round, replies)  # type: ignore[no-any-return]


def ours(metrics: Any) -> set[str]:
    return {key for key in metrics if key.startswith("wattfleet-")}


def test_each_training_message_has_its_nodes_prediction() -> None:
    grid, planner = GridOfNodes(fleet()), PlannerStub(chosen=["b"], nodes=dict(KNOWN))
    run(grid, planner, local_epochs=2.0)
    [message] = grid.trainings()
    told = dict(message.content[PREDICTION_KEY])
    epoch_s = 20.0 + B % 7
    assert told["epoch-s"] == epoch_s
    assert told["training-s"] == 3.0 + 2 * epoch_s
    assert told["power-w"] == 8.0
    assert told["epoch-kj"] == pytest.approx(epoch_s * 8.0 / 1000)
    assert told["training-kj"] == pytest.approx((3.0 + 2 * epoch_s) * 8.0 / 1000)
    assert told["epoch-s-low"] < told["epoch-s"] < told["epoch-s-high"]
    assert told["power-w-high"] == pytest.approx(8.0 * 1.3896, rel=1e-4), "exp(1.645 * 0.2)"
    assert (told["cores"], told["cpu-khz"], told["gpu-hz"], told["mem-hz"]) == (4, 1510400, 624750000, 2133000000)
    assert (told["batch"], told["profiled-modes"], told["reason"]) == (16, 12, "the fastest")
    assert list(message.content) == ["arrays", "config", RECORD_KEY, PREDICTION_KEY], "the strategy's records first"


def test_a_coordinator_of_protocol_2_0_gives_medians_alone() -> None:
    grid = GridOfNodes(fleet())
    run(grid, PlannerStub(nodes=dict(KNOWN), before_predictions=True))
    told = grid.trainings()[0].content[PREDICTION_KEY]
    assert told["epoch-s"] >= 20.0
    assert not [key for key in told if key.endswith(("-low", "-high"))] and "batch" not in told


def test_the_app_sees_the_prediction_and_not_the_assignment(tmp_path: Path) -> None:
    request = assigned()
    request.content[PREDICTION_KEY] = ConfigRecord({"epoch-s": 20.0})
    seen: list[list[str]] = []

    def app(message: Message, _: Any) -> Message:
        seen.append(list(message.content))
        return answered(message, _)

    with recording_agent(tmp_path / "agent.sock") as agent:
        agent.observed = local_pb2.TrainingFinished(epoch_s=30.0, power_w=9.0)
        reply = power_mode_mod(request, context(**{"agent-socket": str(agent.socket)}), app)
    assert seen == [["config", PREDICTION_KEY]]
    record = dict(reply.content[RECORD_KEY])
    assert record.items() >= {"observed-epoch-s": 30.0, "observed-power-w": 9.0}.items()


def test_metrics_repeat_what_was_predicted_and_observed() -> None:
    strategy = Looks()
    grid = GridOfNodes(fleet(**{one: observing() for one in "abcd"}))
    result = run(grid, PlannerStub(nodes=dict(KNOWN)), strategy=strategy)
    assert all(ours(metrics) == PREDICTED | OBSERVED for metrics in strategy.seen)
    assert {metrics["wattfleet-predicted-epoch-s"] for metrics in strategy.seen} == {20.0 + n % 7 for n in KNOWN}
    aggregated = result.train_metrics_clientapp[1]
    assert aggregated["wattfleet-observed-epoch-s"] == pytest.approx(30.0)
    assert aggregated["wattfleet-observed-epoch-kj"] == pytest.approx(0.27)


@pytest.mark.parametrize(
    "unusual",
    [{}, observing(epoch_s=float("nan")), observing(power_w=0.0), observing(epoch_s="30")],
)
def test_replies_keep_the_same_metrics_if_one_was_not_observed(unusual: dict[str, Any]) -> None:
    strategy = Looks()
    grid = GridOfNodes(fleet(a=observing(), b=observing(), c=unusual, d={"train": raised}))
    result = run(grid, PlannerStub(nodes=dict(KNOWN)), strategy=strategy)
    assert len(strategy.seen) == 3
    assert all(ours(metrics) == PREDICTED for metrics in strategy.seen)
    assert ours(result.train_metrics_clientapp[1]) == PREDICTED


def test_fedbuff_keeps_its_metrics() -> None:
    grid = GridOfNodes(fleet(**{one: observing() for one in "abcd"}))
    result = run(grid, PlannerStub(nodes=dict(KNOWN)), strategy=FedBuff(2, clock=grid.clock))
    assert not ours(result.train_metrics_clientapp[1])


class Asks(PowerAware):
    """Requests predictions before each round."""

    table: list[NodePrediction] = []

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        type(self).table = self.predictions(grid)
        return super().configure_train(server_round, arrays, config, grid)


def test_predictions_are_a_table_before_the_choice() -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(nodes=dict(KNOWN), excluded={"c": "drained by the operator"})
    Asks(FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock).start(grid, ARRAYS, num_rounds=1)
    table = {each.device_id: each for each in Asks.table}
    assert list(table) == ["a", "b", "c", "d"]
    assert table["a"].node_id == A and table["a"].reason == ""
    assert table["a"].training is not None
    assert table["a"].training.epoch_s.median == 20.0 + A % 7
    assert table["a"].training.mode.cores == 4
    assert (table["c"].training, table["c"].reason) == (None, "drained by the operator")
    [asked] = planner.asked("PredictNodes")
    [started] = planner.asked("StartRun")
    assert (asked.epochs, asked.run_id, asked.run_token) == (1.0, started.run_id, started.run_token)


def test_predictions_before_the_run_has_started_are_refused_with_the_remedy() -> None:
    grid = GridOfNodes(fleet())
    with pytest.raises(PlanningError, match=r"before the run has started.*PowerAware\(select=...\)"):
        PowerAware(FedAvg(), PlannerStub(), clock=grid.clock).predictions(grid)


def fastest(count: int, server_round: int, predictions: Sequence[NodePrediction]) -> list[int]:
    ready = [each for each in predictions if each.training is not None and not each.reason]
    return [each.node_id for each in sorted(ready, key=lambda each: each.training.epoch_s.high)[:count]]  # type: ignore[union-attr]


def test_a_selection_of_ones_own_limits_the_plan() -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(nodes=dict(KNOWN))
    run(grid, planner, rounds=2, select=partial(fastest, 2))
    expected = set(sorted(KNOWN, key=lambda node_id: node_id % 7)[:2])
    assert [set(request.node_ids) for request in planner.asked("PlanRound")] == [expected] * 2
    assert {message.metadata.dst_node_id for message in grid.trainings()} == expected


def test_a_selection_that_chooses_nobody_is_asked_again_and_then_ends_the_run(warnings: WarningLog) -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(nodes=dict(KNOWN), excluded=dict.fromkeys("abcd", "has no prediction yet"))
    with pytest.raises(RefusedError, match="select chose none of 4 nodes in round 1 .has no prediction yet."):
        run(grid, planner, select=partial(fastest, 2), patience_s=30.0)
    assert len(planner.asked("PredictNodes")) > 10
    assert sum(grid.clock.slept) == pytest.approx(30.0, abs=2.0)


@pytest.mark.parametrize("chosen", [[12], ["b"], [None]])
def test_a_selection_of_a_node_that_there_is_not_is_refused(chosen: list[Any]) -> None:
    grid = GridOfNodes(fleet())
    with pytest.raises(InvalidInputError, match=f"select chose {chosen[0]!r} in round 1, which is not the id"):
        run(grid, PlannerStub(nodes=dict(KNOWN)), select=lambda number, predictions: chosen)


def test_a_node_that_is_selected_twice_is_planned_once() -> None:
    planner = PlannerStub(nodes=dict(KNOWN))
    run(GridOfNodes(fleet()), planner, select=lambda number, predictions: [C, C])
    assert list(planner.asked("PlanRound")[0].node_ids) == [C]


def test_a_coordinator_of_protocol_2_0_is_named_as_too_old() -> None:
    grid = GridOfNodes(fleet())
    planner = PlannerStub(nodes=dict(KNOWN), before_predictions=True)
    with pytest.raises(PlanningError, match="older than protocol 2.1: update it"):
        run(grid, planner, select=partial(fastest, 2))
