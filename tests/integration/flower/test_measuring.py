"""Devices that train in order to measure: in a survey, beside rounds, and on a real agent's socket."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch.utils.data import DataLoader

from edge_agent.runtime.readiness import parked_mode
from tests.fakes.agent_socket import MODE, Agent, answered, context, granted, message
from tests.fakes.fleet_in_process import Board, BoardsGrid, PlanningFleet, is_survey
from tests.fakes.flower_in_process import (
    KNOWN,
    A,
    B,
    C,
    D,
    GridOfNodes,
    Node,
    PlannerStub,
    StatusError,
    WarningLog,
    first_value,
    fleet,
    gone,
    raised,
    trained,
)
from tests.fakes.flower_in_process import run as run_with
from tests.fakes.polling import until
from wattfleet.flower import power_mode_mod, profiled, until_deadline
from wattfleet.flower.server.errors import PlanningError
from wattfleet_proto.assignment import CUT_KEY, MEASURED_KEY, RECORD_KEY, UNPROFILED_KEY, RoundAssignment
from wattfleet_proto.v1 import planning_pb2, session_pb2

# --- Measuring --------------------------------------------------------------------------------------------------------
# Devices that train in order to measure: in a survey before the first plan, and beside rounds.


IDS = list(KNOWN)


def run(grid: GridOfNodes, planner: PlannerStub, **options: Any) -> Result:
    """Run with the defaults of measuring."""
    return run_with(grid, planner, **{"survey_s": 20.0, "measures_left_out": True, **options})


def ends_early(message: Message) -> Message:
    """The reply of a training that ended when nothing was left to measure, if it was run for that."""
    if not is_survey(message):
        return trained(message)
    return Message(RecordDict({RECORD_KEY: ConfigRecord({MEASURED_KEY: True})}), reply_to=message)


def is_cut(message: Message) -> Message:
    reply = trained(message)
    if is_survey(message):
        reply.content[RECORD_KEY] = ConfigRecord({CUT_KEY: True})
    return reply


def fails(message: Message) -> Message:
    return raised(message) if is_survey(message) else trained(message)


def unprofiled(message: Message) -> Message:
    """The reply of an app whose loader is not wrapped, which trains to the end in a survey, too."""
    reply = trained(message)
    reply.content[RECORD_KEY] = ConfigRecord({UNPROFILED_KEY: "wrap the loader"})
    return reply


def measurings(grid: GridOfNodes) -> list[int]:
    """The nodes that were sent a training in order to measure, in order."""
    return [message.metadata.dst_node_id for message in grid.trainings() if is_survey(message)]


def rounds(grid: GridOfNodes) -> list[int]:
    """The nodes that were sent a training of a round, in order."""
    return [message.metadata.dst_node_id for message in grid.trainings() if not is_survey(message)]


class Counting(FedAvg):
    """Counts its calls, as strategies with a schedule of their own do; records whose replies it aggregates."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.configured: list[list[int]] = []
        self.aggregated: list[list[int]] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.configured.append(sorted(grid.get_node_ids()))
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        self.aggregated.append(sorted(reply.metadata.src_node_id for reply in replies))
        assert all(RECORD_KEY not in reply.content for reply in replies)
        return super().aggregate_train(server_round, replies)


def all_ending_early() -> GridOfNodes:
    return GridOfNodes(fleet(**{device_id: {"train": ends_early} for device_id in KNOWN.values()}))


# --- before the first plan ----------------------------------------------------------------------------------------


def test_devices_are_surveyed_before_the_first_plan() -> None:
    grid, strategy = all_ending_early(), Counting()
    planner = PlannerStub(nodes=dict(KNOWN), chosen=["a"], surveys=[["a", "b", "c"]])
    run(grid, planner, rounds=2, strategy=strategy)
    assert (measurings(grid), rounds(grid)) == ([A, B, C], [A, A])
    methods = [method for method, _ in planner.calls if method in {"PlanMeasuring", "PlanRound"}]
    assert methods.index("PlanRound") > methods.index("PlanMeasuring")
    assert planner.asked("PlanMeasuring")[0].survey_s == 20.0
    assert strategy.aggregated == [[A], [A]], "the strategy sees the replies of the selected devices only"


def test_the_strategy_is_asked_for_its_messages_once_in_a_round() -> None:
    grid, strategy = all_ending_early(), Counting()
    run(grid, PlannerStub(nodes=dict(KNOWN), chosen=["a"], surveys=[["a", "b"]]), rounds=2, strategy=strategy)
    assert strategy.configured == [sorted(IDS), [A]]


def test_a_survey_has_the_apps_own_config_and_arrays() -> None:
    grid = all_ending_early()
    run(grid, PlannerStub(nodes=dict(KNOWN), chosen=["a"], surveys=[["b"]]))
    survey, training = grid.trainings()
    assert survey.content["config"] == training.content["config"]
    assert survey.content["arrays"] == training.content["arrays"]
    assert survey.content[RECORD_KEY]["plan-id"] != training.content[RECORD_KEY]["plan-id"]


def test_with_few_watts_devices_are_surveyed_one_after_another() -> None:
    grid = all_ending_early()
    run(grid, PlannerStub(nodes=dict(KNOWN), surveys=[["a", "b"], [], ["c"], ["d"]]))
    assert measurings(grid) == [A, B, C, D]


def test_a_survey_can_be_switched_off() -> None:
    grid, planner = all_ending_early(), PlannerStub(nodes=dict(KNOWN), surveys=[["a"]])
    run(grid, planner, survey_s=None, measures_left_out=False)
    assert measurings(grid) == [] and planner.asked("PlanMeasuring") == []


def test_a_device_that_does_not_answer_a_survey_is_planned_without(warnings: WarningLog) -> None:
    nodes = fleet(b={"train": ends_early, "takes_s": 10_000.0}, c={"train": ends_early})
    grid = GridOfNodes(nodes)
    planner = PlannerStub(nodes=dict(KNOWN), surveys=[["b", "c"]])
    run(grid, planner)
    assert sorted(rounds(grid)) == [A, C, D]
    assert warnings.about("the survey does not wait any longer for b: the round is planned without them")
    assert [each.node_ids for each in planner.asked("PlanRound")] == [[A, C, D]]


def test_an_app_that_fails_in_the_survey_still_trains(warnings: WarningLog) -> None:
    grid = GridOfNodes(fleet(b={"train": fails}))
    run(grid, PlannerStub(nodes=dict(KNOWN), surveys=[["b"]]))
    assert sorted(rounds(grid)) == IDS
    assert warnings.about("b did not measure: the app raised: out of memory")


def test_a_survey_that_the_coordinator_refuses_does_not_end_the_run() -> None:
    class Refusing(PlannerStub):
        def _measuring(self, request: Any) -> Any:
            raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, "the fleet changes")

    grid = all_ending_early()
    run(grid, Refusing(nodes=dict(KNOWN)))
    assert sorted(rounds(grid)) == IDS


def test_an_app_that_cannot_be_ended_gives_its_update_to_the_round() -> None:
    # Such an app trains through its survey: the first round's update of its device is there already.
    grid, strategy = GridOfNodes(fleet(b={"train": trained, "takes_s": 45.0})), Counting()
    grid.nodes[A].takes_s = 60.0
    run(grid, PlannerStub(nodes=dict(KNOWN), chosen=["a"], surveys=[["b"]]), strategy=strategy)
    assert strategy.aggregated == [[A, B]]


def test_an_update_that_was_cut_is_not_used() -> None:
    grid, strategy = GridOfNodes(fleet(b={"train": is_cut})), Counting()
    run(grid, PlannerStub(nodes=dict(KNOWN), chosen=["a"], surveys=[["b"]]), strategy=strategy)
    assert strategy.aggregated == [[A]]


# --- surveys end --------------------------------------------------------------------------------------------------


class Timed(PlannerStub):
    """Notes when each round is planned, in seconds after the start."""

    def __init__(self, grid: GridOfNodes, **options: Any) -> None:
        super().__init__(**options)
        self.grid, self.began_s = grid, grid.clock.now_s()
        self.planned_s: list[float] = []

    def _plan(self, request: Any) -> Any:
        plan = super()._plan(request)
        self.planned_s.append(self.grid.clock.now_s() - self.began_s)
        return plan


@pytest.mark.parametrize("train", [fails, ends_early, trained, unprofiled, is_cut, gone])
def test_a_device_is_surveyed_once_before_a_plan_even_if_it_learns_nothing(train: Callable[..., Message]) -> None:
    grid = GridOfNodes(fleet(b={"train": train}))
    planner = PlannerStub(nodes=dict(KNOWN), surveys=[["b"]])
    run(grid, planner)
    assert measurings(grid) == [B]
    assert sorted(rounds(grid)) == IDS


def test_a_device_that_learns_nothing_is_surveyed_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    grid = GridOfNodes(fleet(b={"train": ends_early}))
    run(grid, PlannerStub(nodes=dict(KNOWN), surveys=[["b"]]), rounds=32)
    of_b = [is_survey(each) for each in grid.trainings() if each.metadata.dst_node_id == B]
    assert [of_b[:k].count(False) for k, is_one in enumerate(of_b) if is_one] == [0, 2, 6, 14, 30]
    assert len([each for each in caplog.messages if each.startswith("Survey: b learned nothing")]) == 1


def test_a_device_that_has_learned_is_surveyed_soon_if_it_still_lacks_something() -> None:
    class Learning(PlannerStub):
        def _measuring(self, request: Any) -> Any:
            self.measured["b"] = self.measured.get("b", 0) + 1
            return super()._measuring(request)

    grid = all_ending_early()
    run(grid, Learning(nodes=dict(KNOWN), surveys=[["b"]]), rounds=9)
    assert len(measurings(grid)) == 5


def test_each_reason_is_logged_once(warnings: WarningLog, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    grid = GridOfNodes(fleet(b={"train": fails}, c={"train": unprofiled}))
    run(grid, PlannerStub(nodes=dict(KNOWN), surveys=[["b", "c"]]), rounds=16)
    assert len(warnings.about("b did not measure: the app raised: out of memory")) == 1
    assert len(warnings.about("c did not measure: wrap the loader")) == 1


def test_a_survey_has_an_end_however_many_devices_wait_for_watts() -> None:
    nodes = {n: Node(f"d{n}", ends_early, 100.0) for n in range(2, 42)}
    grid = GridOfNodes(nodes)
    ids = {n: f"d{n}" for n in nodes}

    class FewWatts(Timed):
        free_s = 0.0

        def _measuring(self, request: Any) -> Any:
            now_s = self.grid.clock.now_s()
            if now_s >= self.free_s and request.HasField("survey_s"):
                unknown = [each for each in request.node_ids if ids[each] not in self.surveyed]
                self.surveys = [[ids[each]] for each in unknown]
                self.free_s = now_s + 100.0
                return super()._measuring(request)
            return planning_pb2.PlanMeasuringResponse(waiting=1)

    planner = FewWatts(grid, nodes=ids, learn=list(ids.values()))
    run(grid, planner, rounds=8)
    assert planner.planned_s[0] <= 5 * 130.0, "an absolute end"
    assert len(measurings(grid)) == len(set(measurings(grid))) == 40, "the others follow before later rounds"


@pytest.mark.parametrize(("predicts_s", "surveyed"), [(45.0, IDS), (1e9, [])])
def test_devices_that_only_lack_their_prediction_are_surveyed(predicts_s: float, surveyed: list[int]) -> None:
    grid = GridOfNodes(fleet(**{each: {"train": ends_early} for each in "abcd"}))

    class StartsToPredict(Timed):
        """Its devices start the process that predicts, which takes a slow board half a minute."""

        def _measuring(self, request: Any) -> Any:
            if grid.clock.now_s() < predicts_s:
                return planning_pb2.PlanMeasuringResponse(not_ready=4, predicting=4)
            return super()._measuring(request)

    planner = StartsToPredict(grid, nodes=dict(KNOWN), surveys=[["a", "b", "c", "d"]])
    run(grid, planner, rounds=2)
    assert measurings(grid) == surveyed
    assert planner.planned_s[0] < 70.0, "and waited for no longer than a minute, once in a run"
    assert planner.planned_s[1] - planner.planned_s[0] < 20.0


def test_an_app_that_is_long_in_a_survey_trains_in_the_round_once_it_is_free() -> None:
    # No node is free when the survey gives up waiting, so the plan waits for them.
    grid, strategy = GridOfNodes(fleet(**{each: {"train": trained, "takes_s": 400.0} for each in "abcd"})), Counting()
    planner = PlannerStub(nodes=dict(KNOWN), surveys=[["a", "b", "c", "d"]], duration_s=400.0)
    run(grid, planner, strategy=strategy)
    assert (measurings(grid), sorted(rounds(grid))) == (IDS, IDS)
    assert strategy.aggregated == [IDS], "one update of each, although the survey's arrived, too"


def test_a_node_that_never_answers_is_not_waited_for_again() -> None:
    grid = GridOfNodes(fleet(b={"train": ends_early, "takes_s": 1e9}))
    planner = Timed(grid, nodes=dict(KNOWN), surveys=[["b"]], chosen=["a"])
    run(grid, planner, rounds=4)
    waited = [later - before for before, later in zip(planner.planned_s, planner.planned_s[1:], strict=False)]
    assert planner.planned_s[0] <= 131.0 and max(waited) <= 10.0
    assert measurings(grid) == [B]


def test_a_node_that_leaves_in_the_middle_of_a_survey_is_not_waited_for(warnings: WarningLog) -> None:
    def leaves(message: Message) -> Message:
        del grid.nodes[B]
        return gone(message)

    grid = GridOfNodes(fleet(b={"train": leaves, "takes_s": 50.0}, c={"train": ends_early}))
    run(grid, PlannerStub(nodes=dict(KNOWN), surveys=[["b", "c"]]), rounds=4)
    assert warnings.about("b did not measure: the node is gone")
    assert measurings(grid).count(B) == 1 and rounds(grid).count(A) == 4


def test_an_operator_who_ends_the_run_ends_its_survey() -> None:
    class Ending(PlannerStub):
        def _measuring(self, request: Any) -> Any:
            if self.surveys:
                return super()._measuring(request)
            raise StatusError(grpc.StatusCode.ABORTED, "run 'night' has ended")

        def _plan(self, request: Any) -> Any:
            raise StatusError(grpc.StatusCode.ABORTED, "run 'night' has ended")

    grid = all_ending_early()
    with pytest.raises(PlanningError, match="has ended"):
        run(grid, Ending(nodes=dict(KNOWN), surveys=[["a"]]))
    assert grid.clock.now_s() - 1000.0 <= 20.0


def test_a_request_whose_answer_is_lost_is_repeated() -> None:
    class Losing(PlannerStub):
        lost = False

        def _measuring(self, request: Any) -> Any:
            if not self.lost:
                self.lost = True
                raise StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer")
            return super()._measuring(request)

    grid = all_ending_early()
    run(grid, Losing(nodes=dict(KNOWN), surveys=[["b"]]))
    assert measurings(grid) == [B]


def test_a_coordinator_that_goes_away_in_a_survey_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    class Leaving(PlannerStub):
        def _measuring(self, request: Any) -> Any:
            if self.surveys:
                return super()._measuring(request)
            raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, "not now")

    grid = GridOfNodes(fleet(a={"train": ends_early, "takes_s": 60.0}))
    run(grid, Leaving(nodes=dict(KNOWN), surveys=[["a"]]))
    assert len([each for each in caplog.messages if "no device measures now" in each]) == 1


def test_a_late_update_of_a_survey_is_not_used_in_a_later_round(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    grid, strategy = GridOfNodes(fleet(b={"train": trained, "takes_s": 300.0})), Counting()
    grid.nodes[A].takes_s = 60.0
    run(grid, PlannerStub(nodes=dict(KNOWN), chosen=["a"], surveys=[["b"]]), strategy=strategy, rounds=6)
    assert strategy.aggregated == [[A]] * 6
    assert "b: its update of round 1 is dropped, because that round has ended" in caplog.messages


# --- surveys of a coordinator's real fleet ------------------------------------------------------------------------


def boards(**options: Any) -> PlanningFleet:
    """A fleet of four boards that know nothing of the workload."""
    budget_w = options.pop("budget_w", 1000.0)
    return PlanningFleet({each: Board(**options) for each in KNOWN.values()}, KNOWN, budget_w)


def surveys_of(grid: GridOfNodes, node_id: int) -> int:
    return measurings(grid).count(node_id)


@pytest.mark.parametrize(
    ("train", "knows"),
    [
        pytest.param(fails, {}, id="the app raises"),
        pytest.param(unprofiled, {}, id="the loader is not wrapped"),
        pytest.param(ends_early, {"learns_length": 80}, id="no mode is measured"),
        pytest.param(ends_early, {"learns_modes": 5}, id="the loader has no length"),
        pytest.param(ends_early, {}, id="nothing is learned"),
    ],
)
def test_a_fleet_that_learns_nothing_trains_all_its_rounds(
    train: Callable[[Message], Message], knows: dict[str, int]
) -> None:
    planner = boards(**knows)
    grid = BoardsGrid(planner, train)
    run(grid, planner, rounds=8)
    assert sorted(rounds(grid)) == sorted(IDS * 8)
    assert {surveys_of(grid, each) for each in IDS} == {3}, "of 8 rounds"
    assert planner.held == []


def test_a_fleet_that_learns_is_surveyed_once() -> None:
    planner = boards(learns_modes=5, learns_length=80)
    grid = BoardsGrid(planner, ends_early)
    run(grid, planner, rounds=3)
    assert (sorted(measurings(grid)), sorted(rounds(grid))) == (IDS, sorted(IDS * 3))


def test_with_few_watts_a_fleet_is_surveyed_in_turn() -> None:
    planner = boards(learns_modes=5, learns_length=80, budget_w=62.0)
    grid = BoardsGrid(planner, ends_early)
    run(grid, planner)
    began_s = [each.metadata.dst_node_id for each in grid.trainings() if is_survey(each)]
    assert sorted(began_s) == IDS and planner.held == []


def test_a_budget_that_falls_in_a_survey_stops_it_and_the_run_goes_on() -> None:
    planner = boards(learns_modes=5, learns_length=80)
    grid = BoardsGrid(planner, ends_early, takes_s=20.0)

    def falls() -> None:
        if grid.clock.now_s() > 1005.0 and not planner.fleet.flower.is_planned("7", 1):
            grid.at_poll = lambda: None
            planner.budget(45.0)
            assert planner.fleet.draw.reserved_w()["site"] <= 45.0

    grid.at_poll = falls
    run(grid, planner, rounds=8)
    assert planner.held == [] and len(rounds(grid)) >= 8
    assert planner.fleet.draw.reserved_w()["site"] == 20.0, "all idle"


def test_devices_without_a_message_of_the_strategy_hold_no_watts_after_the_plan() -> None:
    class Halved(FedAvg):
        """Trains on every second node, in turn."""

        turn = 0

        def configure_train(self, *args: Any) -> Iterable[Message]:
            self.turn += 1
            return list(super().configure_train(*args))[self.turn % 2 :: 2]

    planner = boards(learns_modes=5, learns_length=80)
    grid = BoardsGrid(planner, ends_early)
    run(grid, planner, strategy=Halved(fraction_evaluate=0.0), rounds=4)
    assert (planner.held, len(rounds(grid))) == ([], 8) and measurings(grid)


# --- beside a round -----------------------------------------------------------------------------------------------


def test_devices_that_a_round_leaves_out_measure_meanwhile() -> None:
    grid, strategy = all_ending_early(), Counting()
    planner = PlannerStub(nodes=dict(KNOWN), chosen=["a"], surveys=[["b", "c"]], beside=[["b"], ["b", "c"]])
    run(grid, planner, rounds=2, strategy=strategy)
    assert measurings(grid) == [B, C, B, B, C]
    assert strategy.configured == [sorted(IDS), sorted([A, B, C])], "once in each round"
    assert strategy.aggregated == [[A], [A]]
    beside = [each for each in planner.asked("PlanMeasuring") if not each.HasField("survey_s")]
    assert [each.node_ids for each in beside] == [[B, C], [B, C]], "D has never shown that it can be ended"


def test_a_round_does_not_wait_for_devices_that_measure() -> None:
    grid = all_ending_early()
    planner = PlannerStub(nodes=dict(KNOWN), chosen=["a"], surveys=[["b"]], learn=["b"], beside=[["b"]])
    run(grid, planner)
    before_s = grid.clock.now_s()
    grid.nodes[B].takes_s = 500.0
    planner.surveys, planner.beside = [["c"]], [["b"]]
    run(grid, planner)
    assert grid.clock.now_s() - before_s < 100.0


def test_a_complete_update_of_a_measuring_device_counts_like_any_other() -> None:
    def whole_beside_rounds(message: Message) -> Message:
        is_survey = len(measurings(grid)) <= 1
        return ends_early(message) if is_survey else trained(message)

    grid, strategy = GridOfNodes(fleet(b={"train": whole_beside_rounds, "takes_s": 3.0})), Counting()
    result = run(grid, PlannerStub(nodes=dict(KNOWN), chosen=["a"], surveys=[["b"]], beside=[["b"]]), strategy=strategy)
    assert strategy.aggregated == [[A, B]]
    assert first_value(result) != 0.0


def test_a_device_that_has_measured_all_it_can_is_asked_less_and_less_often() -> None:
    grid = all_ending_early()
    planner = PlannerStub(nodes=dict(KNOWN), chosen=["a"], surveys=[["b"]], learn=["b"], beside=[["b"]] * 40)
    run(grid, planner, rounds=32)
    assert 3 <= len(measurings(grid)) - 1 <= 8
    grid = all_ending_early()

    class Learning(PlannerStub):
        def _measuring(self, request: Any) -> Any:
            self.measured["b"] = self.measured.get("b", 0) + 1
            return super()._measuring(request)

    planner = Learning(nodes=dict(KNOWN), chosen=["a"], surveys=[["b"]], learn=["b"], beside=[["b"]] * 40)
    run(grid, planner, rounds=32)
    assert len(measurings(grid)) - 1 == 32


def test_an_app_with_long_minibatches_is_waited_for_once() -> None:
    grid = all_ending_early()

    class Slowing(Timed):
        def _plan(self, request: Any) -> Any:
            grid.nodes[B].takes_s = 500.0  # beside the round
            return super()._plan(request)

    planner = Slowing(grid, nodes=dict(KNOWN), chosen=["a"], surveys=[["b"]], learn=["b"], beside=[["b"]])
    run(grid, planner, rounds=4)
    between = [later - before for before, later in zip(planner.planned_s, planner.planned_s[1:], strict=False)]
    assert between[0] >= 10.0 and max(between[1:]) < 10.0


@pytest.mark.parametrize("takes_s", [6.0, 500.0])
def test_an_evaluation_waits_briefly_for_devices_that_measure(takes_s: float) -> None:
    nodes = fleet(b={"train": ends_early})
    grid = GridOfNodes(nodes)
    planner = PlannerStub(nodes=dict(KNOWN), chosen=["a"], surveys=[["b"]], beside=[["b"]])

    class Slow(FedAvg):
        def configure_train(self, *args: Any) -> Iterable[Message]:
            written = super().configure_train(*args)
            nodes[B].takes_s = 1.0
            return written

        def aggregate_train(self, *args: Any) -> Any:
            return super().aggregate_train(*args)

    nodes[B].takes_s = takes_s
    run(grid, planner, strategy=Slow())
    evaluated = {m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "evaluate"}
    assert evaluated >= {A, C, D}


# --- Measuring trainings ----------------------------------------------------------------------------------------------
# A training that is run in order to measure, on a real agent's socket: when it ends, and what it leaves behind.

PLAN = "7/measuring-1"


def to_measure(modes: int, longest_s: float = 3600.0, power_limit_w: float = 25.0) -> session_pb2.Grant:
    grant = granted(MODE, power_limit_w, PLAN, grant_id=2)
    grant.measuring.CopyFrom(session_pb2.Measuring(modes=modes, longest_s=longest_s))
    return grant


def run_training(agent: Agent, train: Callable[[Message, Context], Message]) -> Message:
    record = RoundAssignment(PLAN, "orin-nano-0", epochs=1.0, measures=True).to_record()
    request = message(RecordDict({"config": ConfigRecord({"lr": 0.1}), RECORD_KEY: ConfigRecord(record)}))
    return power_mode_mod(request, context(**{"agent-socket": str(agent.socket)}), train)


def app(batches: Iterable[Any], seen: list[Any]) -> Callable[[Message, Context], Message]:
    def train(request: Message, _: Context) -> Message:
        try:
            for batch in profiled(batches):
                seen.append(batch)
        except Exception:  # what a careless app does
            raise AssertionError("no app may catch the end of its training") from None
        return answered(request, _)

    return train


@pytest.fixture(autouse=True)
def reports_every_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    # They take no time here, so the usual half second would never pass.
    monkeypatch.setattr("wattfleet.flower.client.loaders._REPORT_INTERVAL_S", 0.0)


def test_a_training_ends_once_its_modes_are_measured(agent: Agent) -> None:
    agent.grant(to_measure(modes=2))
    seen: list[int] = []
    before = len(agent.journal.records)
    reply = run_training(agent, app(range(100_000), seen))
    assert dict(reply.content[RECORD_KEY]) == {MEASURED_KEY: True}
    assert 2 <= len(agent.journal.records) - before <= 5 and 80 < len(seen) < 100_000
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.observations == [], "no round waits for it"
    assert agent.reports.states[-1].state == session_pb2.DEVICE_STATE_READY
    assert len(agent.reports.fronts) == 1, "the next plan knows what was measured"


def test_a_training_goes_on_measuring_while_modes_are_left(agent: Agent) -> None:
    agent.grant(to_measure(modes=50))
    run_training(agent, app(range(100_000), []))
    assert len(agent.journal.records) == 12, "as many as the agent may measure: more than one fit chooses"


def test_for_a_loaders_facts_one_minibatch_is_enough(agent: Agent) -> None:
    agent.grant(to_measure(modes=0))
    before, seen = len(agent.journal.records), []  # type: ignore[var-annotated]
    run_training(agent, app(range(321), seen))
    assert (len(seen), len(agent.journal.records) - before) == (0, 0)
    assert agent.learner.known.minibatches_per_epoch == 321


def test_no_measurement_begins_after_the_time_is_over(agent: Agent) -> None:
    agent.grant(to_measure(modes=50, longest_s=1e-3))
    before = len(agent.journal.records)
    run_training(agent, app(range(100_000), []))
    assert len(agent.journal.records) - before <= 1


def test_torch_apps_end_without_a_change(agent: Agent) -> None:
    agent.grant(to_measure(modes=2))
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    steps = 0

    def train(request: Message, _: Context) -> Message:
        nonlocal steps
        for _epoch in range(50):
            for batch in DataLoader(torch.zeros(800, 1), batch_size=1):
                net(batch).sum().backward()
                optimizer.step()
                steps += 1
        return answered(request, _)

    assert MEASURED_KEY in run_training(agent, train).content[RECORD_KEY]
    assert 80 < steps < 40_000


def test_an_app_whose_loader_is_not_wrapped_trains_to_the_end_and_is_learned_from(agent: Agent) -> None:
    agent.grant(to_measure(modes=5))

    def train(request: Message, _: Context) -> Message:
        for _batch in until_deadline(range(200)):
            agent.board.step()
        return answered(request, _)

    reply = run_training(agent, train)
    assert MEASURED_KEY not in reply.content.get(RECORD_KEY, {})
    assert agent.reports.observations == []
    assert agent.board.current_mode() == parked_mode(agent.board)


def test_a_withdrawn_grant_ends_the_training(agent: Agent) -> None:
    agent.grant(to_measure(modes=50))

    def batches() -> Iterable[int]:
        for k in range(100_000):
            if k == 5:
                agent.grant(granted(None, plan_id=PLAN, grant_id=3))
                until(lambda: agent.board.current_mode() == parked_mode(agent.board))
            yield k

    seen: list[int] = []
    reply = run_training(agent, app(batches(), seen))
    assert MEASURED_KEY in reply.content[RECORD_KEY]
    assert 5 <= len(seen) <= 7
    assert agent.board.current_mode() == parked_mode(agent.board)


def test_an_app_that_fails_while_it_measures_leaves_the_device_parked(agent: Agent) -> None:
    agent.grant(to_measure(modes=50))

    def train(request: Message, _: Context) -> Message:
        for batch in profiled(range(100)):
            if batch == 3:
                raise MemoryError("out of memory")
        raise AssertionError("unreachable")

    with pytest.raises(MemoryError):
        run_training(agent, train)
    assert agent.board.current_mode() == parked_mode(agent.board)


class WithoutLength:
    """Passes over a stream of data, of which nobody knows how long they are."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100_000))


def test_a_loader_without_a_length_is_measured(agent: Agent) -> None:
    agent.grant(to_measure(modes=2))
    before, seen = len(agent.journal.records), []  # type: ignore[var-annotated]
    reply = run_training(agent, app(WithoutLength(), seen))
    assert MEASURED_KEY in reply.content[RECORD_KEY] and len(seen) < 100_000
    assert len(agent.journal.records) - before >= 2
    assert agent.board.current_mode() == parked_mode(agent.board)


def test_a_device_whose_duty_leaves_no_time_ends_its_training_at_once(agent: Agent) -> None:
    agent.duty = "cameras"
    agent.grant(to_measure(modes=5))
    before, seen = len(agent.journal.records), []  # type: ignore[var-annotated]
    reply = run_training(agent, app(range(321), seen))
    assert MEASURED_KEY in reply.content[RECORD_KEY]
    assert (len(seen) <= 1, len(agent.journal.records)) == (True, before), "its times would contain the requests"
    assert agent.learner.known.minibatches_per_epoch == 321
    assert agent.board.current_mode() == parked_mode(agent.board)


def test_one_minibatch_of_minutes_ends_the_training_with_what_is_known(agent: Agent) -> None:
    agent.grant(to_measure(modes=5, longest_s=20.0))
    seen: list[int] = []

    def batches() -> Iterable[int]:
        for k in range(100):
            agent.board.clock.sleep_s(300.0)
            yield k

    reply = run_training(agent, app(batches(), seen))
    assert MEASURED_KEY in reply.content[RECORD_KEY] and len(seen) <= 2
    assert agent.board.current_mode() == parked_mode(agent.board)


def test_only_modes_within_the_granted_watts_are_measured(agent: Agent) -> None:
    front = agent.learner.predicted_front()[0]
    limit_w = float(front.planned_w[len(front) // 2])
    mode = front.mode(len(front) // 2)
    grant = to_measure(modes=3, power_limit_w=1.001 * limit_w)
    grant.mode.CopyFrom(granted(mode).mode)
    agent.grant(grant)
    before = len(agent.journal.records)
    run_training(agent, app(range(100_000), []))
    measured = agent.journal.records[before:]
    assert measured and all(each.power_mw <= 1e3 * limit_w * 1.05 for each in measured)
