"""Replies to a round: results go to the coordinator, weights to the aggregation."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import (
    GridOfNodes,
    PlannerStub,
    gone,
    killed,
    partly,
    raised,
    trained,
)
from tests.fakes.power_aware_runs import KNOWN, D, WarningLog, first_value, fleet, run
from wattfleet_proto.assignment import RECORD_KEY


def test_each_failure_is_reported_in_words_and_the_round_continues(warnings: WarningLog) -> None:
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


def test_a_result_has_the_replys_weight_and_loss() -> None:
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
def test_the_loss_is_the_first_known_metric_if_finite(metrics: dict[str, float], loss: float | None) -> None:
    grid = GridOfNodes(fleet(b={"train": lambda message: trained(message, **metrics)}))
    planner = PlannerStub(chosen=["b"])
    run(grid, planner)
    told = planner.results()[0]["b"]
    assert (told.loss if told.HasField("loss") else None) == loss


def test_why_devices_never_measure_is_logged_once_in_a_run(warnings: WarningLog) -> None:
    why = "its minibatches come from no DataLoader: wrap the loader in `wattfleet_flower.profiled`"
    changes = {one: {"train": partly(1.0, unprofiled=why)} for one in ("a", "b", "c")}
    planner = PlannerStub(chosen=["a", "b", "c"], nodes=dict(KNOWN), measured={"a": 12, "b": 0, "c": 0})
    run(GridOfNodes(fleet(**changes)), planner, rounds=2)
    assert warnings.about("measured while the app trains") == [
        f"no power mode of b, c is measured while the app trains: {why}"
    ]


def test_partial_work_is_weighted_by_its_share() -> None:
    grid = GridOfNodes(fleet(d={"train": partly(0.25)}))
    planner = PlannerStub(chosen=["b", "d"])
    result = run(grid, planner)
    # 0.2 with 20 examples, and 0.4 with a quarter of 40.
    assert first_value(result) == pytest.approx((0.2 * 20 + 0.4 * 10) / 30)
    told = planner.results()[0]["d"]
    assert (told.share, told.num_examples, told.failure) == (0.25, 10.0, "")


def test_the_weight_of_an_app_that_weighs_itself_is_kept() -> None:
    grid = GridOfNodes(fleet(d={"train": partly(0.25, **{"app-weighs": True})}))
    planner = PlannerStub(chosen=["b", "d"])
    result = run(grid, planner)
    assert first_value(result) == pytest.approx((0.2 * 20 + 0.4 * 40) / 60)
    assert planner.results()[0]["d"].num_examples == 40.0


def test_the_weight_is_kept_if_the_share_is_unknown() -> None:
    def train(message: Any) -> Any:
        reply = trained(message)
        reply.content[RECORD_KEY] = ConfigRecord({"cut": True, "app-weighs": False})
        return reply

    planner = PlannerStub(chosen=["b"])
    run(GridOfNodes(fleet(b={"train": train})), planner)
    told = planner.results()[0]["b"]
    assert (told.share, told.num_examples, told.failure) == (1.0, 20.0, "")


def test_the_strategy_sees_no_wattfleet_record_in_a_reply() -> None:
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
