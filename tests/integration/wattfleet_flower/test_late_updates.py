"""Updates that arrive after their round has ended: how they are used, and what their nodes do until then."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import GridOfNodes, Node, StatusError, gone, killed
from tests.fakes.power_aware_runs import KNOWN, A, B, C, WarningLog
from tests.fakes.quorum_runs import ZERO, QuorumRun, adds, nodes_of, quorum_run
from wattfleet_flower import PowerAware, Quorum

TWO = Quorum(replies=2)


def averaged(*parts: tuple[float, float]) -> float:
    """The weighted average of values, each with its weight."""
    return sum(value * weight for value, weight in parts) / sum(weight for _, weight in parts)


def test_an_update_one_round_late_is_added_to_the_current_arrays() -> None:
    # Device a adds 1 and b adds 2 in 10 s; c adds 3 to the first round's arrays, and replies in the second round.
    run = quorum_run(TWO, rounds=2, a=10, b=10, c=15)
    assert run.late == ["c", ""]
    first = (1 + 2) / 2
    second = averaged((first + 1, 10), (first + 2, 10), (first + 3, 10 / math.sqrt(2)))
    assert run.weights == pytest.approx([0, first, second])


def test_an_update_two_rounds_late_weighs_less() -> None:
    run = quorum_run(TWO, rounds=3, a=10, b=10, c=25)
    first, second = 1.5, 1.5 + 1.5
    third = averaged((second + 1, 10), (second + 2, 10), (second + 3, 10 / math.sqrt(3)))
    assert run.weights == pytest.approx([0, first, second, third])
    assert run.ended_s[1:] == pytest.approx([10, 20, 30], abs=4), "no round waits for c"


def test_several_late_updates_keep_the_base_of_their_own_round() -> None:
    # c begins in the first round and replies in the second, in which d begins; d replies in the third.
    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=10, c=15, d=15)))
    run.planner.chosen = ["a", "b", "c"]

    def change(message: Message) -> Message:
        run.planner.chosen = {1: ["a", "b", "d"], 2: ["a", "b"]}.get(len(run.weights))
        return adds(1.0)(message)

    run.grid.nodes[A].train = change
    run.start(TWO, rounds=3)
    assert run.late == ["c", "d", ""]
    first = 1.5
    second = averaged((first + 1, 10), (first + 2, 10), (first + 3, 10 / math.sqrt(2)))
    third = averaged((second + 1, 10), (second + 2, 10), (second + 4, 10 / math.sqrt(2)))
    assert run.weights == pytest.approx([0, first, second, third])


def test_partial_work_reduces_the_weight_of_a_late_update_too() -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=10, c=15)))
    run.grid.nodes[C].train = adds(3.0, share=0.25)
    run.start(TWO, rounds=2)
    assert run.weights[2] == pytest.approx(averaged((2.5, 10), (3.5, 10), (4.5, 0.25 * 10 / math.sqrt(2))))


@pytest.mark.parametrize(("max_staleness", "used"), [(0, False), (1, False), (2, True), (5, True)])
def test_an_update_that_is_too_old_is_dropped(max_staleness: int, used: bool, warnings: WarningLog) -> None:
    quorum = Quorum(replies=2, max_staleness=max_staleness)
    run = quorum_run(quorum, rounds=4, a=10, b=10, c=25)
    assert (run.weights[3] != pytest.approx(4.5)) == used
    assert warnings.about("too old") == ([] if used else ["c: its update of round 1 is dropped, because it is too old"])
    assert run.planned[3] == "abc", "its device is free again"


def test_the_arrays_keep_their_number_format() -> None:
    seen: list[Any] = []

    class Watching(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            seen.append([each.content["arrays"]["w"].numpy().dtype for each in replies])
            return super().aggregate_train(server_round, replies)

    quorum_run(TWO, 2, Watching(fraction_evaluate=0.0), a=10, b=10, c=15)
    assert seen == [[np.dtype(np.float32)] * 2, [np.dtype(np.float32)] * 3]


def test_a_late_node_neither_trains_nor_evaluates_until_it_has_replied() -> None:
    run = quorum_run(TWO, 3, FedAvg(), a=10, b=10, c=35)
    assert run.planned == ["abc", "ab", "abc"], "a round with its evaluation takes 20 s"
    sent = Counter((m.metadata.message_type, KNOWN[m.metadata.dst_node_id]) for m in run.grid.sent)
    assert (sent["train", "a"], sent["evaluate", "a"]) == (3, 3)
    assert (sent["train", "c"], sent["evaluate", "c"]) == (2, 0)


def test_without_a_free_node_nothing_is_evaluated(warnings: WarningLog) -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=500)))

    def leave(message: Message) -> Message:
        del run.grid.nodes[A]
        return adds(1.0)(message)

    run.grid.nodes[A].train = leave
    run.start(Quorum(replies=1), 1, FedAvg(min_train_nodes=1, min_available_nodes=1))
    assert warnings.about("no evaluation after round 1: no node that may take part is connected and free")


def test_a_run_waits_for_the_first_node_if_all_are_busy() -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=60, c=90)))

    def leave(message: Message) -> Message:
        run.grid.nodes.pop(A, None)
        return adds(1.0)(message)

    run.grid.nodes[A].train = leave
    run.start(Quorum(replies=1), rounds=2)
    assert run.planned == ["abc", "b"]
    assert run.weights[2] == pytest.approx(averaged((3, 10), (3, 10 / math.sqrt(2)), (4, 10 / math.sqrt(2))))


def test_a_plan_that_is_asked_for_again_leaves_the_late_node_out() -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=10, c=25)))

    def refuse(message: Message) -> Message:
        run.planner.refusals = [StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "no device is ready")] * 20
        run.grid.nodes[A].train = adds(1.0)
        return adds(1.0)(message)

    run.grid.nodes[A].train = refuse
    run.start(TWO, rounds=2)
    assert run.planned[:6] == ["abc", *["ab"] * 5]
    assert run.planned[-1] == "abc", "c has replied while the plan was waited for"


def test_a_late_training_is_given_up_after_its_rounds_own_timeout(warnings: WarningLog) -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=100, b=100, c=100_000)))
    run.planner.duration_s = 105.0
    run.start(TWO, rounds=6)
    assert run.planned == ["abc", "ab", "ab", "abc", "ab", "ab"], "given up 2 * 105 + 90 s after its round began"
    assert warnings.about("c is given up")[0] == "c is given up: no reply to round 1 within 300 s"
    assert run.failed == [""] * 6


def test_a_trimmed_round_is_waited_for_longer() -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=100, b=100, c=450)))
    run.planner.duration_s = 105.0

    def trimmed(message: Message) -> Message:
        run.planner.duration_s = 400.0
        return adds(1.0)(message)

    run.grid.nodes[A].train = trimmed
    run.start(TWO, rounds=6)
    assert run.planned[:5] == ["abc", "ab", "ab", "ab", "ab"]
    assert "c" in run.planned[5]


@pytest.mark.parametrize("fail", [gone, killed])
def test_a_late_failure_is_logged_and_frees_the_node(fail: Any, warnings: WarningLog) -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=10, c=15)))
    run.grid.nodes[C].train = fail
    received: list[int] = []

    class Watching(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            received.append(sum(each.has_error() for each in replies))
            return super().aggregate_train(server_round, replies)

    run.start(TWO, 3, Watching(fraction_evaluate=0.0))
    assert received[:2] == [0, 0], "the strategy does not see it"
    assert (run.late[:2], run.failed[:2]) == (["c", ""], ["", ""])
    assert len(warnings.about("c failed late, in round 1")) >= 1
    assert run.planned == ["abc", "ab", "abc"]
    assert run.weights[:3] == pytest.approx([0, 1.5, 3.0])


def test_an_update_whose_arrays_do_not_match_is_dropped(warnings: WarningLog) -> None:
    def grows(message: Message) -> Message:
        wider = ArrayRecord({"w": Array(np.zeros(5))})
        content = RecordDict({"arrays": wider, "metrics": MetricRecord({"num-examples": 10, "train_loss": 1.0})})
        return Message(content, reply_to=message)

    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=10, c=15)))
    run.grid.nodes[C].train = grows
    run.start(TWO, rounds=2)
    assert run.weights == pytest.approx([0, 1.5, 3.0])
    assert warnings.about("c: its update of round 1 is dropped: the arrays of a reply and") != []


def test_late_updates_have_the_metrics_of_the_others() -> None:
    names: list[list[set[str]]] = []

    class Watching(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            names.append([set(each.content["metrics"]) for each in replies])
            return super().aggregate_train(server_round, replies)

    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=10, c=15)))
    run.grid.nodes[C].train = adds(3.0, **{"observed-epoch-s": 4.0, "observed-power-w": 9.0})
    run.start(TWO, 2, Watching(fraction_evaluate=0.0))
    second = names[1]
    assert len(second) == 3 and second[0] == second[1] == second[2]
    assert {"num-examples", "wattfleet-predicted-power-w"} < second[2]


def test_the_next_run_knows_nothing_of_the_late_trainings_of_the_last() -> None:
    grid = GridOfNodes(nodes_of(a=10, b=10, c=15))
    run = QuorumRun(grid)
    wrapped = PowerAware(FedAvg(fraction_evaluate=0.0), run.planner, quorum=TWO, clock=grid.clock)
    for _ in range(2):
        result = wrapped.start(grid, ZERO, num_rounds=1)
        assert float(result.arrays["w"].numpy()[0]) == pytest.approx(1.5)
    assert run.planned == ["abc", "abc"]


def test_without_a_plan_late_updates_are_used_too() -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=10, c=15)))
    run.planner.away = True
    run.start(TWO, rounds=2, on_coordinator_away="unplanned")
    assert run.weights[2] == pytest.approx(averaged((2.5, 10), (3.5, 10), (4.5, 10 / math.sqrt(2))))


def test_a_node_that_replies_late_has_its_next_message_after_it() -> None:
    grid = GridOfNodes({A: Node("a", adds(1.0), 10), B: Node("b", adds(2.0), 10), C: Node("c", adds(3.0), 35)})
    run = QuorumRun(grid).start(TWO, rounds=5)
    assert run.planned == ["abc", "ab", "ab", "ab", "abc"]
