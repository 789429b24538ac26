"""Nodes that cannot train on their devices do not delay rounds, and train as soon as they are repaired."""

from __future__ import annotations

import pytest
from flwr.app import ArrayRecord, Error, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import GridOfNodes, PlannerStub, gone
from tests.fakes.flower_in_process import trained as replied
from tests.fakes.power_aware_runs import ARRAYS, KNOWN, A, B, C, D, WarningLog, fleet, run
from wattfleet_flower import PowerAware

AWAY = "no agent listens at /run/wattfleet/agent.sock: start it"


def trained(grid: GridOfNodes) -> list[int]:
    return [message.metadata.dst_node_id for message in grid.trainings()]


def test_rounds_wait_for_no_node_that_cannot_train() -> None:
    def took_s(grid: GridOfNodes, planner: PlannerStub) -> float:
        began_s = grid.clock.now_s()
        run(grid, planner, rounds=4)
        assert len(trained(grid)) == 12 and A not in trained(grid)
        return grid.clock.now_s() - began_s

    known = {"nodes": dict(KNOWN), "problems": dict.fromkeys(KNOWN, "")}
    without_s = took_s(GridOfNodes(fleet()), PlannerStub(chosen=["b", "c", "d"], **known))
    with_s = took_s(GridOfNodes(fleet(a={"problem": AWAY})), PlannerStub())
    # 5 s until all nodes have named their devices, before the first plan, and the rounding of polls for replies.
    assert with_s == pytest.approx(without_s + 5.0, abs=0.5)


def test_a_node_is_asked_again_each_round_and_trains_once_it_is_mended(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet(a={"problem": AWAY})), PlannerStub()

    def mends(message: Message) -> Message:
        if trained(grid).count(B) == 3:
            grid.nodes[A].problem = ""
        grid.clock.advance(20.0)
        return replied(message)

    grid.nodes[B].train = mends
    run(grid, planner, rounds=7)
    assert grid.identifications().count(A) == 5, "when it was unknown, and before the rounds until it is mended"
    assert grid.identifications().count(B) == 1
    assert A in trained(grid)[-4:], "without a restart"
    assert len(warnings.about("a is left out of rounds")) == 1, "a problem is logged once"


def test_a_new_run_asks_before_its_first_plan_whether_a_node_was_mended() -> None:
    grid = GridOfNodes(fleet(a={"problem": ""}))
    run(grid, PlannerStub(nodes=dict(KNOWN), problems={A: AWAY}), rounds=1)
    assert sorted(trained(grid)) == [A, B, C, D]


def test_a_node_whose_agent_refused_a_training_is_asked_before_the_next_plan() -> None:
    def refused(message: Message) -> Message:
        text = "\nException AgentUnreachableError occurred. Message: \na: the agent at /a answered UNAVAILABLE: gone"
        return Message(Error(2, text), reply_to=message)

    grid = GridOfNodes(fleet(a={"problem": AWAY, "train": refused}))
    run(grid, PlannerStub(nodes=dict(KNOWN), problems=dict.fromkeys(KNOWN, "")), rounds=3)
    assert trained(grid).count(A) == 1
    assert set(grid.identifications()) == {A}


def test_a_node_that_names_another_nodes_device_does_not_replace_it() -> None:
    grid = GridOfNodes(fleet(d={"device_id": "a", "problem": "it belongs to b"}))
    known = {A: "a", B: "b", C: "c"}
    # The wrong node is new: a new node without a problem would be the restarted SuperNode of its device.
    run(grid, PlannerStub(nodes=known, problems=dict.fromkeys(known, "")), rounds=2)
    assert sorted(trained(grid)) == [A, A, B, B, C, C]


def test_a_node_that_cannot_train_does_not_evaluate() -> None:
    grid = GridOfNodes(fleet(a={"problem": AWAY}))
    run(grid, PlannerStub(), rounds=1, strategy=FedAvg())
    evaluated = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "evaluate"]
    assert sorted(evaluated) == [B, C, D]


def test_a_node_that_cannot_train_does_not_train_without_a_plan_either() -> None:
    grid, planner = GridOfNodes(fleet(a={"problem": AWAY})), PlannerStub()

    def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        planner.away = server_round == 1
        return MetricRecord({"accuracy": 0.5})

    strategy = PowerAware(
        FedAvg(fraction_evaluate=0.0), planner, clock=grid.clock, on_coordinator_away="unplanned", patience_s=5.0
    )
    strategy.start(grid, ARRAYS, num_rounds=2, evaluate_fn=evaluated)
    assert [request.round for request in planner.asked("PlanRound")] == [1], "the second round had no plan"
    assert sorted(trained(grid)) == [B, B, C, C, D, D]


def test_a_node_that_was_gone_when_it_was_asked_trains_once_it_is_back(warnings: WarningLog) -> None:
    grid, planner = GridOfNodes(fleet(a={"train": gone, "takes_s": 50.0})), PlannerStub()

    def returns(message: Message) -> Message:
        if trained(grid).count(B) == 2:
            grid.nodes[A].train, grid.nodes[A].takes_s, grid.nodes[A].busy_until_s = replied, 5.0, 0.0
        grid.clock.advance(60.0)
        return replied(message)

    grid.nodes[B].train = returns
    run(grid, planner, rounds=6)
    assert A in trained(grid)[-4:], "without waiting for ten minutes"
    [warning] = warnings.about(f"node {A} is left out until it reports its device")
    assert "the node is gone" in warning


def test_a_restarted_supernode_that_was_busy_replaces_its_earlier_node() -> None:
    # A SuperNode without a key has got node D. It does not answer at first. Flower still lists its earlier node, A.
    nodes = fleet(d={"device_id": "a", "train": gone})
    grid, planner = GridOfNodes(nodes), PlannerStub(nodes={A: "a", B: "b", C: "c"})

    def returns(message: Message) -> Message:
        grid.nodes[D].train = replied
        grid.clock.advance(60.0)
        return replied(message)

    grid.nodes[B].train = returns
    run(grid, planner, rounds=4)
    assert set(trained(grid)[-3:]) == {B, C, D}
