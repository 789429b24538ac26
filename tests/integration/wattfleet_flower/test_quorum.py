"""Rounds that end at a quorum: when they end, and what is reported about the devices that still train."""

from __future__ import annotations

import grpc
import pytest
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import GridOfNodes, PlannerStub, StatusError, raised
from tests.fakes.power_aware_runs import KNOWN, A, B, C, WarningLog
from tests.fakes.quorum_runs import QuorumRun, adds, nodes_of, quorum_run
from wattfleet.errors import InvalidInputError
from wattfleet_flower import FedBuff, PowerAware, Quorum
from wattfleet_proto.v1 import planning_pb2


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
