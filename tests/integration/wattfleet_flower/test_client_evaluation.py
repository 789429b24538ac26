"""Clients' evaluation metrics are reported to the coordinator, also when the server evaluates as well."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, FedMedian

from tests.fakes.flower_in_process import GridOfNodes, PlannerStub
from tests.fakes.power_aware_runs import ARRAYS, A, B, WarningLog, fleet
from wattfleet_flower import PowerAware

EVALUATED = {A: (30, 0.9), B: (10, 0.5)}
WEIGHTED_MEAN = (30 * 0.9 + 10 * 0.5) / 40


class EvaluatingGrid(GridOfNodes):
    """Two nodes, each with its own accuracy and number of examples."""

    def __init__(self) -> None:
        nodes = fleet()
        super().__init__({A: nodes[A], B: nodes[B]})

    def _replied(self, node: Any, message: Message) -> Message:
        if message.metadata.message_type != "evaluate":
            return super()._replied(node, message)
        examples, accuracy = EVALUATED[message.metadata.dst_node_id]
        metrics = MetricRecord({"num-examples": examples, "accuracy": accuracy, "per-class": [accuracy, 1.0]})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)


def told(strategy: Any, evaluate_fn: Any = None, **options: Any) -> dict[int, dict[str, float]]:
    """Round -> the metrics that were reported to the coordinator."""
    grid, planner = EvaluatingGrid(), PlannerStub(**options)
    PowerAware(strategy, planner, clock=grid.clock).start(grid, ARRAYS, num_rounds=2, evaluate_fn=evaluate_fn)
    rounds: dict[int, dict[str, float]] = {}
    for request in planner.asked("ReportMetrics"):
        rounds.setdefault(request.round, {}).update(request.metrics)
    return rounds


@pytest.mark.parametrize("kind", [FedAvg, FedMedian])
def test_what_the_strategy_aggregates_of_the_clients_is_reported_for_each_round(kind: type[FedAvg]) -> None:
    # A list is not a number, so rounds cannot be compared by it.
    assert told(kind()) == dict.fromkeys((1, 2), {"accuracy": pytest.approx(WEIGHTED_MEAN)})


def test_beside_an_evaluation_on_the_server_the_clients_metrics_have_a_prefix() -> None:
    def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": 0.25})

    both = {"accuracy": 0.25, "clientapp_accuracy": pytest.approx(WEIGHTED_MEAN)}
    assert told(FedAvg(), evaluated) == {0: {"accuracy": 0.25}, 1: both, 2: both}


def test_a_strategys_own_aggregation_is_reported_as_it_is() -> None:
    best = FedAvg(
        evaluate_metrics_aggr_fn=lambda contents, _: MetricRecord(
            {"best": max(float(each["metrics"]["accuracy"]) for each in contents)}  # type: ignore[index, arg-type]
        )
    )
    assert told(best) == dict.fromkeys((1, 2), {"best": 0.9})


def test_without_evaluation_or_training_nothing_is_reported(warnings: WarningLog) -> None:
    assert told(FedAvg(fraction_evaluate=0.0)) == {}
    assert told(FedAvg(fraction_train=0.0)) == {}, "a round that was not planned has no place for metrics"
