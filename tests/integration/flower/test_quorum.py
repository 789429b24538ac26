"""Rounds that end at a quorum: when they end, who still trains, and how late updates are used."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import (
    KNOWN,
    ZERO,
    A,
    B,
    C,
    GridOfNodes,
    Node,
    PlannerStub,
    QuorumRun,
    StatusError,
    WarningLog,
    adds,
    gone,
    killed,
    nodes_of,
    quorum_run,
    raised,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet.flower import FedBuff, PowerAware, Quorum
from wattfleet_proto.v1 import planning_pb2

# --- Quorum -----------------------------------------------------------------------------------------------------------
# Rounds that end at a quorum: when they end, and what is reported about the devices that still train.


@pytest.mark.parametrize(
    ("quorum", "enough_replies", "ended_s", "late"),
    [
        (None, 2, 400, ""),
        (Quorum(), 0, 400, ""),
        (Quorum(), 2, 20, "cd"),
        (Quorum(replies=1), 2, 10, "bcd"),
        (Quorum(replies=3), 0, 30, "d"),
        (Quorum(replies=4), 2, 400, ""),
        (Quorum(share=0.5), 3, 20, "cd"),
        (Quorum(share=0.51), 0, 30, "d"),
        (Quorum(share=0.01), 0, 10, "bcd"),
        (Quorum(share=1), 2, 400, ""),
    ],
)
def test_a_round_ends_with_the_quorum_and_not_with_the_slowest(
    quorum: Quorum | None, enough_replies: int, ended_s: float, late: str
) -> None:
    planner = PlannerStub(nodes=dict(KNOWN), duration_s=600.0, enough_replies=enough_replies)
    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=20, c=30, d=400)), planner).start(quorum, rounds=1)
    assert run.ended_s[1] == pytest.approx(ended_s, abs=1.5)
    assert (run.late, run.failed) == ([late], [""])
    used = [each for each in "abcd" if each not in late]
    assert run.weights[1] == pytest.approx(sum(1.0 + "abcd".index(each) for each in used) / len(used))


def test_replies_that_arrive_together_are_all_used() -> None:
    run = quorum_run(Quorum(replies=1), rounds=1, a=10, b=10, c=10, d=500)
    assert run.late == ["d"]
    assert run.weights[1] == pytest.approx((1 + 2 + 3) / 3)


def test_failures_do_not_fill_the_quorum() -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=20, c=30, d=400)))
    run.grid.nodes[A].train = raised
    run.start(Quorum(replies=2), rounds=1)
    assert run.ended_s[1] == pytest.approx(30, abs=1.5)
    assert (run.failed, run.late) == (["a"], ["d"])
    assert run.weights[1] == pytest.approx((2 + 3) / 2)


def test_a_quorum_out_of_reach_ends_when_all_have_answered() -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=20, c=30, d=400)))
    for node_id in (A, B):
        run.grid.nodes[node_id].train = raised
    run.start(Quorum(replies=3), rounds=1)
    assert run.ended_s[1] == pytest.approx(400, abs=1.5)
    assert (run.failed, run.late) == (["ab"], [""])
    assert run.weights[1] == pytest.approx((3 + 4) / 2)


def test_a_quorum_of_more_replies_than_devices_is_warned_of_once(warnings: WarningLog) -> None:
    run = quorum_run(Quorum(replies=5), rounds=3, a=10, b=20, c=30, d=400)
    assert run.ended_s[1:] == pytest.approx([400, 800, 1200], abs=4)
    assert warnings.about("quorum") == ["a round waits for all of its 4 devices, since the quorum needs 5 replies"]


def test_devices_without_a_reply_at_the_timeout_have_failed_and_are_not_late() -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=1e6, c=1e6)))
    run.start(Quorum(replies=2), rounds=2)
    assert run.ended_s[1] == pytest.approx(2 * 600 + 90, abs=1.5)
    assert (run.failed, run.late) == (["bc", "bc"], ["", ""])
    assert run.planned == ["abc", "abc"]


def test_a_round_without_a_plan_ends_with_the_quorum_too() -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=20, c=30, d=50)))

    def away_from_now_on(message: Message) -> Message:
        run.planner.away = len(run.weights) == 1
        return adds(1.0)(message)

    run.grid.nodes[A].train = away_from_now_on
    run.start(Quorum(replies=3), rounds=4, on_coordinator_away="unplanned")
    [unplanned] = run.planner.asked("ReportUnplannedRound")
    assert unplanned.round == 2, "the coordinator is away after the first plan, until the next training"
    told = {each.result.device_id: each.result for each in unplanned.results}
    assert not any(each.failure for each in told.values())
    assert set(told) == {"a", "b", "c"}, "d still trains for the first round"
    assert run.ended_s[-1] < 4 * 45, "no round waits for all"


def test_a_device_is_late_in_a_round_without_a_plan() -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=10, b=20, c=300)))
    run.planner.away = True

    def back(message: Message) -> Message:
        run.planner.away = len(run.weights) < 2
        return adds(1.0)(message)

    run.grid.nodes[A].train = back
    run.start(Quorum(replies=2), rounds=3, on_coordinator_away="unplanned")
    first = run.planner.asked("ReportUnplannedRound")[0]
    assert {each.node_id: (each.result.late, each.result.failure) for each in first.results} == {
        A: (False, ""),
        B: (False, ""),
        C: (True, ""),
    }


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"share": 0.5, "replies": 2}, "state only one of share=0.5 and replies=2"),
        ({"share": 0.0}, "above 0 and at most 1, not 0"),
        ({"share": 1.01}, "above 0 and at most 1"),
        ({"share": float("nan")}, "above 0 and at most 1"),
        ({"replies": 0}, "must be 1 or more, not 0"),
        ({"max_staleness": -1}, "max_staleness must be 0 or more"),
    ],
)
def test_a_quorum_that_cannot_be_is_refused(wrong: dict[str, float], error: str) -> None:
    with pytest.raises(InvalidInputError, match=error):
        Quorum(**wrong)  # type: ignore[arg-type]


def test_fedbuff_takes_no_quorum() -> None:
    with pytest.raises(InvalidInputError, match="FedBuff never waits for all devices, so it has no quorum"):
        PowerAware(FedBuff(2), quorum=Quorum())
    PowerAware(FedAvg(), quorum=Quorum())


def test_a_run_waits_for_a_late_device_if_no_other_one_can_train() -> None:
    class OnlyWithC(PlannerStub):
        def _plan(self, request: planning_pb2.PlanRoundRequest) -> planning_pb2.PlanRoundResponse:
            if C not in request.node_ids:
                raise StatusError(grpc.StatusCode.UNAVAILABLE, "no device is ready to train: a is drained")
            return super()._plan(request)

    run = QuorumRun(GridOfNodes(nodes_of(a=10, c=400)), OnlyWithC(nodes=dict(KNOWN), duration_s=600.0))
    run.start(Quorum(replies=1), rounds=2, patience_s=60.0)
    assert run.late == ["c", "c"]
    assert run.ended_s[2] == pytest.approx(410, abs=5), "when c was free again, longer than patience_s"


def test_a_device_that_keeps_failing_late_rests(caplog: pytest.LogCaptureFixture) -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=30, b=30, c=40)))
    run.grid.nodes[C].train = raised
    run.start(Quorum(replies=2), rounds=10)
    # It fails 10 s after each of its rounds has ended: once, again after the next one, then it skips 1, 3 and more
    # rounds.
    assert run.planned == ["abc", "ab", "abc", "ab", "ab", "abc", "ab", "ab", "ab", "ab"]
    assert len(WarningLog(caplog).about("it rests until round")) == 2


def test_a_reply_in_time_ends_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    run = QuorumRun(GridOfNodes(nodes_of(a=30, b=30, c=40)))
    failures = iter([raised, adds(3.0)] * 6)
    run.grid.nodes[C].train = lambda message: next(failures)(message)
    run.start(Quorum(replies=2), rounds=8)
    assert not WarningLog(caplog).about("it rests until round"), "it never fails twice in a row"


def test_patience_begins_when_the_last_late_device_is_free() -> None:
    refused = StatusError(grpc.StatusCode.UNAVAILABLE, "no device is ready to train")

    class LearnsLater(PlannerStub):
        """Refuses some requests after the late device is free, since its agent has not reported this yet."""

        def _plan(self, request: planning_pb2.PlanRoundRequest) -> planning_pb2.PlanRoundResponse:
            if request.round > 1 and (C not in request.node_ids or next(yet_to_know, False)):
                raise refused
            return super()._plan(request)

    yet_to_know = iter([True] * 3)
    run = QuorumRun(GridOfNodes(nodes_of(a=10, c=400)), LearnsLater(nodes=dict(KNOWN), duration_s=600.0))
    run.start(Quorum(replies=1), rounds=2, patience_s=60.0)
    assert len(run.weights) == 3


def test_a_resting_device_is_not_planned_after_a_refusal_either() -> None:
    class RefusesRoundFive(PlannerStub):
        def _plan(self, request: planning_pb2.PlanRoundRequest) -> planning_pb2.PlanRoundResponse:
            if request.round == 5 and next(refusals, False):
                raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "no device is ready")
            return super()._plan(request)

    refusals = iter([True] * 2)
    run = QuorumRun(GridOfNodes(nodes_of(a=30, b=30, c=40)), RefusesRoundFive(nodes=dict(KNOWN), duration_s=600.0))
    run.grid.nodes[C].train = raised
    run.start(Quorum(replies=2), rounds=5)
    asked = [each for each in run.planner.asked("PlanRound") if each.round == 5]
    assert len(asked) == 3 and all(C not in each.node_ids for each in asked), "it rests until round 6"


# --- Late updates -----------------------------------------------------------------------------------------------------
# Updates that arrive after their round has ended: how they are used, and what their nodes do until then.

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
