"""Devices that train in order to measure: in a survey before the first plan, and beside rounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from tests.fakes.flower_in_process import GridOfNodes, PlannerStub, StatusError, raised, trained
from tests.fakes.power_aware_runs import KNOWN, A, B, C, D, WarningLog, first_value, fleet
from tests.fakes.power_aware_runs import run as run_with
from wattfleet_proto.assignment import CUT_KEY, MEASURED_KEY, RECORD_KEY

IDS = list(KNOWN)


def run(grid: GridOfNodes, planner: PlannerStub, **options: Any) -> Result:
    """Run with the defaults of measuring."""
    return run_with(grid, planner, **{"survey_s": 20.0, "measures_left_out": True, **options})


def ends_early(message: Message) -> Message:
    """The reply of a training that ended when nothing was left to measure, if it was run for that."""
    if not message.content[RECORD_KEY].get("measures", False):
        return trained(message)
    return Message(RecordDict({RECORD_KEY: ConfigRecord({MEASURED_KEY: True})}), reply_to=message)


def is_cut(message: Message) -> Message:
    reply = trained(message)
    if message.content[RECORD_KEY].get("measures", False):
        reply.content[RECORD_KEY] = ConfigRecord({CUT_KEY: True})
    return reply


def measurings(grid: GridOfNodes) -> list[int]:
    """The nodes that were sent a training in order to measure, in order."""
    sent = [message for message in grid.trainings() if message.content[RECORD_KEY].get("measures", False)]
    return [message.metadata.dst_node_id for message in sent]


def rounds(grid: GridOfNodes) -> list[int]:
    """The nodes that were sent a training of a round, in order."""
    sent = [message for message in grid.trainings() if not message.content[RECORD_KEY].get("measures", False)]
    return [message.metadata.dst_node_id for message in sent]


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
    def fails(message: Message) -> Message:
        return raised(message) if message.content[RECORD_KEY].get("measures", False) else trained(message)

    grid = GridOfNodes(fleet(b={"train": fails}))
    run(grid, PlannerStub(nodes=dict(KNOWN), surveys=[["b"]]))
    assert sorted(rounds(grid)) == IDS
    assert warnings.about("b did not measure: the app raised: out of memory")


def test_a_survey_that_the_coordinator_refuses_does_not_end_the_run() -> None:
    import grpc

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
    planner = PlannerStub(nodes=dict(KNOWN), chosen=["a"], surveys=[["b"]], beside=[["b"]])
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
    planner = PlannerStub(nodes=dict(KNOWN), chosen=["a"], surveys=[["b"]], beside=[["b"]] * 40)
    run(grid, planner, rounds=32)
    assert 3 <= len(measurings(grid)) - 1 <= 8
    grid = all_ending_early()

    class Learning(PlannerStub):
        def _measuring(self, request: Any) -> Any:
            self.measured["b"] = self.measured.get("b", 0) + 1
            return super()._measuring(request)

    planner = Learning(nodes=dict(KNOWN), chosen=["a"], surveys=[["b"]], beside=[["b"]] * 40)
    run(grid, planner, rounds=32)
    assert len(measurings(grid)) - 1 == 32


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
