"""Rounds and runs: repeated plans, observations, results, metrics, and restarts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from coordinator.errors import NoDevicesError, UnknownRecordError
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceResult, ObservedTraining, RoundObservation
from tests.fakes.fronts import front
from tests.fakes.small_fleet import NANO_NODE, NODES, ORIN_NODE, RUN, small_fleet
from tests.fakes.small_fleet import make_ready as make_ready_in
from wattfleet.errors import InvalidInputError
from wattfleet.planning import Allowance
from wattfleet.planning.policies import AllDevices, FastestK
from wattfleet_proto.device_state import DeviceState, GrantPhase


def test_the_same_round_asked_for_again_is_the_same_plan() -> None:
    fleet = small_fleet()
    first = fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.agents.disconnect("orin")
    assert fleet.flower.plan(RUN, 1, [NANO_NODE], 5.0) is first
    assert fleet.rounds.cache.of_run(RUN) == [first]


def test_each_round_of_each_run_is_planned_by_itself() -> None:
    fleet = small_fleet()
    fleet.flower.start_run("4712", "FedAdam", 1)
    records = []
    for run_id, number in ((RUN, 1), ("4712", 1), (RUN, 2)):
        records.append(fleet.flower.plan(run_id, number, NODES, 1.0))
        fleet.rounds.finish(records[-1].plan_id, [], 50.0)
    assert len({record.plan_id for record in records}) == 3
    assert [record.number for record in fleet.rounds.cache.of_run(RUN)] == [1, 2]
    assert [record.plan_id for record in fleet.rounds.cache.of_run("4712")] == [records[1].plan_id]


def test_the_site_was_observed_once_all_chosen_devices_were() -> None:
    fleet = small_fleet(policy=FastestK(2))
    make_ready_in(fleet, "slow", front((90, 12)), 2.5, 3)
    planned = fleet.flower.plan(RUN, 1, [*NODES, 3], 2.0)
    assert set(planned.nodes) == {"orin", "nano"}
    assert (planned.observed_site_w, planned.observed_duration_s) == (None, None)
    fleet.rounds.observe(planned.plan_id, ObservedTraining("orin", 21.0, 31.0))
    one = fleet.rounds.records[planned.plan_id]
    assert (one.observed_site_w, one.observed_duration_s) == (None, None)
    fleet.rounds.observe(planned.plan_id, ObservedTraining("nano", 34.0, 14.5))
    both = fleet.rounds.records[planned.plan_id]
    assert (both.observed_site_w, both.observed_duration_s) == (31 + 14.5 + 2.5, 2 * 34)


def test_an_observed_rounds_duration_is_predicted_warm_up_plus_observed_epochs() -> None:
    fleet = small_fleet(policy=FastestK(2))
    fleet.agents.report_front("orin", front((10, 50), warmup_s=60), 5.0, 50, "d" * 64)
    planned = fleet.flower.plan(RUN, 1, NODES, 2.0)
    assert planned.plan.duration_s == 60 + 2 * 10
    fleet.rounds.observe(planned.plan_id, ObservedTraining("orin", 11.0, 31.0))
    fleet.rounds.observe(planned.plan_id, ObservedTraining("nano", 34.0, 14.5))
    assert fleet.rounds.records[planned.plan_id].observed_duration_s == 60 + 2 * 11


def test_an_observation_counts_once() -> None:
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    first = fleet.rounds.observe(plan_id, ObservedTraining("orin", 21.0, 31.0))
    assert fleet.rounds.observe(plan_id, ObservedTraining("orin", 99.0, 99.0)) == first
    assert first == RoundObservation(plan_id, ObservedTraining("orin", 21.0, 31.0))
    assert fleet.rounds.records[plan_id].observations == {"orin": first.observed}


def test_a_stranger_to_a_round_observed_nothing_of_it() -> None:
    fleet = small_fleet(policy=FastestK(1))
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert set(record.nodes) == {"orin"}
    for stranger in ("nano", "ghost"):
        with pytest.raises(UnknownRecordError, match=f"{stranger} is not part of plan {RUN}/1"):
            fleet.rounds.observe(record.plan_id, ObservedTraining(stranger, 1.0, 1.0))
    with pytest.raises(UnknownRecordError, match="unknown plan '4711/2'"):
        fleet.rounds.observe("4711/2", ObservedTraining("orin", 1.0, 1.0))
    assert fleet.rounds.cache.of_run(RUN) == [record]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_an_observation_must_be_of_seconds_and_watts(bad: float) -> None:
    for seconds, watts in ((bad, 10.0), (10.0, bad)):
        with pytest.raises(InvalidInputError, match="^orin: observed seconds and watts"):
            ObservedTraining("orin", seconds, watts)


def test_a_finished_round_knows_who_failed_and_how_long_it_took() -> None:
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    assert (fleet.rounds.records[plan_id].failed, fleet.rounds.records[plan_id].wall_s) == ((), None)
    results = [
        DeviceResult("orin", num_examples=48.0, loss=0.5, share=0.75),
        DeviceResult("nano", "the node is gone", share=0.0),
    ]
    finished = fleet.rounds.finish(plan_id, results, 12.5)
    assert finished.results == tuple(results)
    assert (finished.failed, finished.wall_s) == (("nano",), 12.5)
    fleet.rounds.observe(plan_id, ObservedTraining("orin", 21.0, 31.0))
    late = fleet.rounds.records[plan_id]
    assert (late.failed, late.wall_s, set(late.observations)) == (("nano",), 12.5, {"orin"})
    with pytest.raises(UnknownRecordError):
        fleet.rounds.finish("4711/2", [], 1.0)
    with pytest.raises(UnknownRecordError, match="ghost is not part of plan"):
        fleet.rounds.finish(plan_id, [DeviceResult("ghost")], 1.0)
    assert fleet.rounds.records[plan_id].results == tuple(results), "no part of it was accepted"


@pytest.mark.parametrize("wall_s", [-1.0, math.nan, math.inf])
def test_a_round_cannot_have_taken_any_time(wall_s: float) -> None:
    fleet = small_fleet()
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    with pytest.raises(InvalidInputError, match="a round's duration must be 0 s or more"):
        fleet.rounds.finish(record.plan_id, [], wall_s)
    assert fleet.rounds.cache.of_run(RUN) == [record]


@pytest.mark.parametrize(
    "wrong",
    [{"num_examples": -1.0}, {"num_examples": math.nan}, {"loss": math.inf}, {"share": 1.1}, {"share": math.nan}],
)
def test_a_result_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError, match="^orin: "):
        DeviceResult("orin", **wrong)


def test_metrics_belong_to_their_round_and_those_before_the_first_to_the_run() -> None:
    fleet = small_fleet()
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.flower.report_metrics(RUN, 0, {"accuracy": 0.1})
    fleet.flower.report_metrics(RUN, 1, {"accuracy": 0.5})
    fleet.flower.report_metrics(RUN, 1, {"loss": 1.5})
    assert fleet.flower.run(RUN).initial_metrics == {"accuracy": 0.1}
    assert fleet.rounds.cache.of_run(RUN)[0].metrics == {"accuracy": 0.5, "loss": 1.5}
    for run_id, number in ((RUN, 2), ("9", 0), ("9", 1)):
        with pytest.raises(UnknownRecordError):
            fleet.flower.report_metrics(run_id, number, {"accuracy": 1.0})


def test_a_run_ends_well_or_with_its_error() -> None:
    fleet = small_fleet()
    fleet.flower.start_run("4712", "FedAdam", 5)
    assert not fleet.flower.run(RUN).finished
    assert fleet.flower.finish_run(RUN, "").finished
    failed = fleet.flower.finish_run("4712", "ValueError: no replies")
    assert (failed.finished, failed.error, failed.strategy, failed.rounds) == (
        True,
        "ValueError: no replies",
        "FedAdam",
        5,
    )
    with pytest.raises(UnknownRecordError, match="unknown run '9': it never started"):
        fleet.flower.finish_run("9", "")


# --- after a restart ----------------------------------------------------------------------------------------------


def test_what_is_forgotten_is_as_if_it_had_never_been() -> None:
    fleet, untouched = small_fleet(), small_fleet()
    fleet.flower.start_run("old", "FedAvg", 1)
    fleet.flower.plan("old", 1, NODES, 1.0)
    fleet.flower.finish_run("old", "")
    fleet.flower.remove_runs(["old", "unknown"])
    assert (fleet.flower.runs, fleet.rounds.records) == (untouched.flower.runs, untouched.rounds.records)
    assert fleet.flower.plan(RUN, 1, NODES, 1.0) == untouched.flower.plan(RUN, 1, NODES, 1.0)
    with pytest.raises(UnknownRecordError):
        fleet.flower.run("old")


def test_a_restart_forgets_no_round_and_takes_nobody_for_connected() -> None:
    before = small_fleet()
    planned = before.flower.plan(RUN, 1, NODES, 1.0)
    before.rounds.observe(planned.plan_id, ObservedTraining("orin", 21.0, 31.0))
    before.flower.report_metrics(RUN, 1, {"accuracy": 0.5})

    after = Fleet(
        Allowance.of_site(100.0),
        AllDevices(),
        list(before.agents.devices.values()),
        before.flower.nodes,
        list(before.flower.runs.values()),
        list(before.rounds.records.values()),
    )
    assert after.rounds.records == before.rounds.records
    assert after.flower.runs == before.flower.runs and after.flower.nodes == before.flower.nodes
    assert {record.state for record in after.agents.devices.values()} == {DeviceState.OFFLINE}
    assert after.agents.devices["orin"] == replace(before.agents.devices["orin"], state=DeviceState.OFFLINE)

    again = after.flower.plan(RUN, 1, NODES, 1.0)
    assert again == before.rounds.records[planned.plan_id], "a repeated request returns the same plan"
    with pytest.raises(NoDevicesError, match="orin is offline, nano is offline"):
        after.flower.plan(RUN, 2, NODES, 1.0)
    after.agents.connect("orin", "agx-orin", "simulated", 18_096)
    after.rounds.grants.session_began("orin", 0.0)
    after.rounds.grants.confirm("orin", 0, "", GrantPhase.OVER)
    after.agents.report_state("orin", DeviceState.READY, 50, "parked")
    assert after.flower.plan(RUN, 2, NODES, 1.0).nodes == {"orin": ORIN_NODE}, "front and node are still known"
    after.rounds.observe(planned.plan_id, ObservedTraining("nano", 34.0, 14.0))
    assert after.rounds.records[planned.plan_id].observed_site_w == 31 + 14
