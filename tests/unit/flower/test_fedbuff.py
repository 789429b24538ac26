"""Asynchronous training: nobody waits for the slowest node, and late updates are applied to other arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from coordinator.services.request_limits import STATUS
from tests.fakes.flower_in_process import (
    SUPERLINK,
    GridOfNodes,
    Node,
    PlannerStub,
    RecordingClock,
    StatusError,
    gone,
    raised,
)
from wattfleet.core.errors import InvalidInputError, NoCandidatesError
from wattfleet.flower import FedBuff, NoUpdatesError, PlanningError, PowerAware
from wattfleet.flower.server.errors import MismatchedArraysError
from wattfleet.flower.server.replies import Update, rebased, replace_arrays, step
from wattfleet.simulation.flower_task import be_task
from wattfleet_proto.assignment import RECORD_KEY, RoundAssignment

# --- FedBuff ----------------------------------------------------------------------------------------------------------
# Asynchronous training: nobody waits for the slowest node, and updates are weighted as in the paper.


A, B, C, D = (2**63 - 1 + k for k in range(4))
KNOWN = {A: "a", B: "b", C: "c", D: "d"}
ZERO = ArrayRecord({"w": Array(np.zeros(2))})


def adds(value: float) -> Callable[[Message], Message]:
    """A training that adds `value` to every weight."""

    def train(message: Message) -> Message:
        [arrays] = message.content.array_records.values()
        moved = ArrayRecord({key: Array(array.numpy() + value) for key, array in arrays.items()})
        content = {"arrays": moved, "metrics": MetricRecord({"num-examples": 10, "train_loss": value})}
        return Message(RecordDict(content), reply_to=message)

    return train


def grid_of(*nodes: Node) -> GridOfNodes:
    return GridOfNodes(dict(zip((A, B, C, D), nodes, strict=False)))


class Watched:
    """Records the weights after every step, and the times of the steps."""

    def __init__(self, clock: RecordingClock) -> None:
        self._clock, self._began_s = clock, clock.now_s()
        self.weights: list[float] = []
        self.at_s: list[float] = []

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        assert server_round == len(self.weights)
        self.weights.append(float(arrays["w"].numpy()[0]))
        self.at_s.append(self._clock.now_s() - self._began_s)
        return MetricRecord({"weight": self.weights[-1]})


def run(grid: GridOfNodes, steps: int, buffer_size: int, timeout: float = 3600, **options: Any) -> Watched:
    watched = Watched(grid.clock)
    strategy = FedBuff(buffer_size, clock=grid.clock, **options)
    strategy.start(grid, ZERO, num_rounds=steps, timeout=timeout, evaluate_fn=watched)
    return watched


def planned(grid: GridOfNodes, planner: PlannerStub, steps: int, buffer_size: int, **options: Any) -> Watched:
    watched = Watched(grid.clock)
    strategy = PowerAware(FedBuff(buffer_size, clock=grid.clock), planner, clock=grid.clock, **options)
    strategy.start(grid, ZERO, num_rounds=steps, evaluate_fn=watched)
    return watched


# --- the weight of an update --------------------------------------------------------------------------------------


def test_an_update_is_weighted_by_its_staleness() -> None:
    # The fast node's steps are at 10 and 20 s. The slow node began from step 0 and arrives at 25 s, two steps late.
    grid = grid_of(Node("quick", adds(1.0), 10.0), Node("slow", adds(10.0), 25.0))
    watched = run(grid, steps=4, buffer_size=1)
    assert watched.at_s == [0, 10, 20, 25, 30]
    assert watched.weights == pytest.approx([0, 1, 2, 2 + 10 / math.sqrt(3), 2 + 10 / math.sqrt(3) + 1 / math.sqrt(2)])


def test_an_array_without_dimensions_stays_one() -> None:
    now = {"batches": np.array(7), "scale": np.array(1.5, np.float32)}
    trained = {"batches": np.array(12), "scale": np.array(2.0, np.float32)}
    after = step(now, [Update(now, trained, 0)], 0.5)
    assert {key: (type(each), each.dtype, float(each)) for key, each in after.items()} == {
        "batches": (np.ndarray, np.dtype(np.int64), 10.0),
        "scale": (np.ndarray, np.dtype(np.float32), 1.75),
    }


def test_a_buffer_is_averaged_and_the_servers_rate_scales_it() -> None:
    now = {"w": np.array([5.0, 1.0])}
    base = {"w": np.array([4.0, 1.0])}
    updates = [Update(now, {"w": np.array([7.0, 1.0])}, 0), Update(base, {"w": np.array([4.0, 3.0])}, 3)]
    # Half of (2, 0) + (0, 2) / sqrt(4), at a rate of 0.5.
    assert step(now, updates, 0.5)["w"] == pytest.approx([5.5, 1.25])


def test_arrays_keep_their_kind_of_number() -> None:
    now = {"w": np.zeros(2, np.float32), "batches": np.array(7)}
    after = step(now, [Update(now, {"w": np.ones(2, np.float32), "batches": np.array(12)}, 1)], 1.0)
    assert (after["w"].dtype, after["batches"].dtype) == (np.float32, now["batches"].dtype)
    assert after["batches"] == 7 + round(5 / math.sqrt(2))


def test_with_everybodys_update_and_none_stale_it_is_federated_averaging() -> None:
    nodes = [Node(name, adds(value)) for name, value in (("a", 1.0), ("b", 2.0), ("c", 6.0))]
    watched = run(grid_of(*nodes), steps=3, buffer_size=3)
    averaged = FedAvg(fraction_evaluate=0.0).start(grid_of(*nodes), ZERO, num_rounds=3)
    assert watched.weights[-1] == pytest.approx(9.0)
    assert averaged.arrays["w"].numpy()[0] == pytest.approx(watched.weights[-1])


def test_an_update_that_is_too_stale_is_dropped() -> None:
    grid = grid_of(Node("quick", adds(1.0), 10.0), Node("slow", adds(100.0), 35.0))
    assert run(grid, steps=6, buffer_size=1, max_staleness=2).weights == [0, 1, 2, 3, 4, 5, 6]


# --- nobody waits -------------------------------------------------------------------------------------------------


def test_a_device_ten_times_slower_does_not_hold_the_steps_back() -> None:
    def fleet() -> GridOfNodes:
        return grid_of(*(Node(name, adds(1.0), 10.0) for name in "abc"), Node("slow", adds(1.0), 100.0))

    watched = run(fleet(), steps=12, buffer_size=3)
    assert watched.at_s[-1] <= 130.0
    waiting = fleet()
    FedAvg(fraction_evaluate=0.0).start(waiting, ZERO, num_rounds=12)
    assert waiting.clock.now_s() - 1000.0 == 1200.0, "each round waits for the slow node"


def test_a_buffer_larger_than_the_fleet_fills_from_its_quick_devices() -> None:
    watched = run(grid_of(Node("a", adds(1.0), 10.0), Node("b", adds(1.0), 15.0)), steps=2, buffer_size=5)
    assert len(watched.weights) == 3


def test_nodes_that_fail_are_tried_again_later_and_hold_nobody_back() -> None:
    flaky = Node("flaky", raised, 1.0)
    grid = grid_of(Node("a", adds(1.0), 10.0), flaky, Node("c", gone, 50.0), Node("silent", adds(1.0), 1e9))
    watched = run(grid, steps=10, buffer_size=1, timeout=200.0)
    assert watched.at_s[-1] == 100.0
    tried = [m for m in grid.trainings() if m.metadata.dst_node_id == B]
    assert 2 <= len(tried) <= 5, "after 10, 20, 40 s"


def test_a_reply_after_its_time_is_an_update_all_the_same() -> None:
    grid = grid_of(Node("a", adds(1.0), 10.0), Node("late", adds(8.0), 45.0))
    watched = run(grid, steps=5, buffer_size=1, timeout=40.0)
    assert watched.at_s[-1] == 45.0
    assert watched.weights[-1] == pytest.approx(4 + 8 / math.sqrt(5))


def test_a_reply_that_is_no_update_is_a_failure() -> None:
    def other_network(message: Message) -> Message:
        return Message(RecordDict({"arrays": ArrayRecord({"v": Array(np.zeros(2))})}), reply_to=message)

    assert run(grid_of(Node("a", adds(1.0)), Node("b", other_network)), steps=2, buffer_size=1).weights == [0, 1, 2]


def test_a_message_that_flower_does_not_take_holds_nobody_back() -> None:
    grid = grid_of(Node("a", adds(1.0), 10.0), Node("b", adds(5.0), 10.0))
    push = grid.push_messages

    def refuses_b(messages: Any) -> Any:
        ids = push(messages)
        return [one if m.metadata.dst_node_id != B else None for one, m in zip(ids, messages, strict=True)]

    grid.push_messages = refuses_b  # type: ignore[method-assign]
    assert run(grid, steps=3, buffer_size=1).weights == [0, 1, 2, 3]


def test_where_nobody_sends_anything_the_run_ends() -> None:
    with pytest.raises(NoUpdatesError, match="no node has sent an update for 300 s"):
        run(grid_of(Node("a", raised), Node("b", gone)), steps=1, buffer_size=1, timeout=300.0)


# --- planned ------------------------------------------------------------------------------------------------------


def test_plans_are_over_the_nodes_that_are_free_and_each_is_reported() -> None:
    grid = grid_of(Node("a", adds(1.0), 10.0), Node("b", adds(1.0), 35.0), Node("c"))
    planner = PlannerStub(chosen=["a", "b"], nodes=dict(KNOWN))
    watched = planned(grid, planner, steps=4, buffer_size=1, local_epochs=2)
    assert watched.at_s == [0, 10, 20, 30, 35]
    asked = [sorted(request.node_ids) for request in planner.asked("PlanRound")]
    assert asked == [[A, B, C], [A, C], [A, C], [A, C]], "a node that trains is not free"
    assert [request.round for request in planner.asked("PlanRound")] == [1, 2, 3, 4], "each plan has its own number"
    for message in grid.trainings():
        assignment = RoundAssignment.from_record(message.content[RECORD_KEY])
        assert assignment.device_id == KNOWN[message.metadata.dst_node_id]
    told = [
        (request.plan_id.split("/")[1], [result.device_id for result in request.results])
        for request in planner.asked("FinishRound")
    ]
    # A plan's results are reported when all have arrived; the last plan reports what has arrived at the end of the run.
    assert told == [("2", ["a"]), ("3", ["a"]), ("1", ["a", "b"]), ("4", [])]
    assert not any(result.failure for results in planner.results() for result in results.values())
    assert [request.round for request in planner.asked("ReportMetrics")] == [0, 1, 2, 3, 4]


def test_free_nodes_wait_while_trainings_in_flight_hold_all_watts() -> None:
    grid = grid_of(Node("a", adds(1.0), 10.0), Node("b", adds(1.0), 40.0))
    planner = PlannerStub(nodes=dict(KNOWN))
    none_left = StatusError(grpc.StatusCode.FAILED_PRECONDITION, "no watts are left")
    watched = Watched(grid.clock)

    def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == 1:
            planner.refusals = [none_left]
        return watched(server_round, arrays)

    PowerAware(FedBuff(1, clock=grid.clock), planner, clock=grid.clock).start(
        grid, ZERO, num_rounds=2, evaluate_fn=evaluated
    )
    assert watched.at_s == [0, 10, 40], "a has no watts until b is done"


def test_a_node_that_may_not_be_chosen_is_always_free_and_ends_nothing() -> None:
    grid = grid_of(Node("a", adds(1.0), 10.0), Node("excluded", adds(1.0), 10.0))
    planner = PlannerStub(chosen=["a"], nodes=dict(KNOWN))
    given = planner._plan  # noqa: SLF001

    def plan(request: Any) -> Any:
        if A not in request.node_ids:
            raise StatusError(STATUS[NoCandidatesError], "no device can be selected: b: excluded: matches id:b")
        return given(request)

    planner._plan = plan  # type: ignore[method-assign]  # noqa: SLF001
    watched = planned(grid, planner, steps=3, buffer_size=2)
    assert watched.weights[-1] > 0 and len(watched.weights) == 4


def test_a_device_that_does_not_answer_is_told_after_its_plans_time() -> None:
    grid = grid_of(Node("a", adds(1.0), 10.0), Node("silent", adds(1.0), 1e9))
    planner = PlannerStub(nodes=dict(KNOWN), deadline_s=20.0)
    planned(grid, planner, steps=10, buffer_size=1, allowance_s=30.0)
    [first] = [results for results in planner.results() if len(results) == 2]
    assert (first["a"].failure, first["b"].failure) == ("", "no reply within 50 s")


@pytest.mark.parametrize(("trimmed_s", "failure"), [(60.0, ""), (40.0, "no reply within 90 s")])
def test_a_training_gets_more_time_when_its_plan_is_trimmed(trimmed_s: float, failure: str) -> None:
    planner = PlannerStub(nodes=dict(KNOWN), duration_s=20.0)

    def train(message: Message) -> Message:
        planner.duration_s = trimmed_s
        return adds(1.0)(message)

    grid = grid_of(Node("a", adds(1.0), 10.0), Node("b", train, 100.0), Node("c", train, 100.0))
    planned(grid, planner, steps=13, buffer_size=1, allowance_s=10.0)
    [first] = [results for results in planner.results() if len(results) == 3]
    assert [first[device].failure for device in "abc"] == ["", failure, failure]


def test_a_training_of_assumed_length_is_not_cut_off() -> None:
    planner = PlannerStub(nodes=dict(KNOWN), duration_s=20.0, of_assumed_length=["b"])
    grid = grid_of(Node("a", adds(1.0), 10.0), Node("b", adds(1.0), 300.0))
    planned(grid, planner, steps=40, buffer_size=1, allowance_s=10.0)
    [first] = [results for results in planner.results() if len(results) == 2]
    assert (first["a"].failure, first["b"].failure) == ("", "")


def test_unplanned_it_trains_on_every_node_without_a_coordinator() -> None:
    grid = grid_of(Node("a", adds(1.0)), Node("b", adds(3.0)))
    planner = PlannerStub(away=True)
    watched = planned(grid, planner, steps=1, buffer_size=2, on_coordinator_away="unplanned")
    assert watched.weights == [0, 2]
    assert not any(RECORD_KEY in message.content for message in grid.sent)


def test_where_nothing_can_be_planned_at_all_the_run_ends_with_the_reason() -> None:
    low = StatusError(grpc.StatusCode.FAILED_PRECONDITION, "allow at least 15.0 W")
    planner = PlannerStub(nodes=dict(KNOWN), refusals=[low] * 1000)
    with pytest.raises(PlanningError, match="allow at least 15.0 W"):
        planned(grid_of(Node("a")), planner, steps=1, buffer_size=1)


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((0,), "buffer_size must be 1 or more"),
        ((2, 0.0), "server_learning_rate above 0"),
        ((2, math.nan), "server_learning_rate above 0"),
        ((2, 1.0, -1), "max_staleness must be 0 or more"),
    ],
)
def test_what_can_make_no_step_is_refused(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        FedBuff(*arguments)


def test_a_strategy_of_rounds_cannot_drive_it() -> None:
    wrapped = DifferentialPrivacyServerSideFixedClipping(FedBuff(1), 0.0, 1.0, 1)
    with pytest.raises(InvalidInputError, match="only PowerAware can wrap it"):
        wrapped.start(grid_of(Node("a")), ZERO, num_rounds=1)


# --- Rebased updates --------------------------------------------------------------------------------------------------
# An update that is applied to other arrays, compared with simple arithmetic.

numbers = arrays.arrays(np.float32, (2, 3), elements=st.floats(-1e3, 1e3, width=32))


def record(**values: np.ndarray) -> ArrayRecord:
    return ArrayRecord({key: Array(value) for key, value in values.items()})


def reply_of(*records: ArrayRecord) -> Message:
    be_task(7, SUPERLINK)
    return Message(RecordDict({f"arrays-{k}": each for k, each in enumerate(records)}), 1, "train")


@given(trained=numbers, base=numbers, current=numbers, scale=st.floats(0, 2))
def test_the_update_is_added_to_the_current_arrays(
    trained: np.ndarray, base: np.ndarray, current: np.ndarray, scale: float
) -> None:
    after = rebased(reply_of(record(w=trained)), record(w=base), record(w=current), scale)["w"].numpy()
    lowest = 0.0 if min(trained.min(), base.min(), current.min()) >= 0 else -np.inf
    expected = [
        [
            max(float(c) + scale * (float(t) - float(b)), min(float(t), float(b), float(c)) if lowest == 0 else lowest)
            for t, b, c in zip(*rows, strict=True)
        ]
        for rows in zip(trained, base, current, strict=True)
    ]
    assert after.dtype == np.float32
    np.testing.assert_allclose(after, expected, rtol=1e-6, atol=1e-3)


@given(trained=numbers, base=numbers)
def test_an_update_stays_as_it_is_about_its_own_base(trained: np.ndarray, base: np.ndarray) -> None:
    after = rebased(reply_of(record(w=trained)), record(w=base), record(w=base))["w"].numpy()
    np.testing.assert_allclose(after, trained, atol=1e-9)


def test_each_array_keeps_its_dtype_and_integers_are_rounded() -> None:
    trained = record(count=np.array([10, 11]), half=np.array([1.5], np.float16), scalar=np.array(4.0))
    base = record(count=np.array([7, 7]), half=np.array([1.0], np.float16), scalar=np.array(1.0))
    current = record(count=np.array([100, 100]), half=np.array([2.0], np.float16), scalar=np.array(2.0))
    after = rebased(reply_of(trained), base, current, scale=0.5)
    assert {key: array.numpy().dtype for key, array in after.items()} == {
        "count": np.dtype(np.int64),
        "half": np.dtype(np.float16),
        "scalar": np.dtype(np.float64),
    }
    assert after["count"].numpy().tolist() == [102, 102], "101.5 and 102 are rounded to even"
    assert (after["half"].numpy().tolist(), float(after["scalar"].numpy())) == ([2.25], 3.5)


W, WIDER = np.zeros(2), np.zeros(3)


@pytest.mark.parametrize(
    ("trained", "base", "current"),
    [
        (record(w=W), record(v=W), record(w=W)),
        (record(w=W), record(w=WIDER), record(w=W)),
        (record(w=W), record(w=W), record(w=WIDER)),
        (record(w=W), record(w=W), record(w=W, v=W)),
        (record(w=W, v=W), record(w=W), record(w=W)),
    ],
)
def test_arrays_that_do_not_match_are_refused(trained: ArrayRecord, base: ArrayRecord, current: ArrayRecord) -> None:
    with pytest.raises(MismatchedArraysError, match="differ in keys or shapes"):
        rebased(reply_of(trained), base, current)


@pytest.mark.parametrize("count", [0, 2])
def test_a_reply_without_one_record_of_arrays_is_refused(count: int) -> None:
    with pytest.raises(MismatchedArraysError, match=f"one record of arrays, not {count}"):
        rebased(reply_of(*[record(w=W)] * count), record(w=W), record(w=W))


def test_the_arrays_of_a_reply_are_replaced_under_their_own_name() -> None:
    reply = reply_of(record(w=W))
    replace_arrays(reply, record(w=W + 1))
    assert {name: each["w"].numpy().tolist() for name, each in reply.content.array_records.items()} == {
        "arrays-0": [1.0, 1.0]
    }


@pytest.mark.parametrize(("current", "scale"), [(1.0, 4.5), (0.05, 1.0)], ids=["scaled", "late"])
def test_a_variance_never_becomes_negative(current: float, scale: float) -> None:
    trained, base = record(running_var=np.array([0.05, 2.0])), record(running_var=np.array([1.0, 1.0]))
    after = rebased(reply_of(trained), base, record(running_var=np.array([current, 1.0])), scale)["running_var"].numpy()
    assert after[0] == pytest.approx(0.05), "no lower than the lowest of the three"
    assert after[1] == pytest.approx(1.0 + scale), "upwards nothing limits it"


def test_a_step_of_fedbuff_keeps_variances_positive() -> None:
    update = Update({"running_var": np.array([1.0, 1.0])}, {"running_var": np.array([0.05, 2.0])}, staleness=0)
    after = step({"running_var": np.array([0.05, 1.0])}, [update], learning_rate=1.0)["running_var"]
    assert after.tolist() == pytest.approx([0.05, 2.0])
