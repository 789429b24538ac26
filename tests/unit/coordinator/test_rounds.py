"""Rounds and runs: repeated plans, results, restarts, the cache of rounds, counters and histograms."""

from __future__ import annotations

import math
from dataclasses import is_dataclass, replace
from enum import Enum

import pytest
from prometheus_client import CollectorRegistry

from coordinator.errors import NoDevicesError, UnknownRecordError
from coordinator.histograms import Histogram
from coordinator.metrics import FleetCollector
from coordinator.state.fleet import Fleet
from coordinator.state.preview import RoundPreview
from coordinator.state.records import DeviceResult, ObservedTraining, RoundObservation, RoundRecord
from coordinator.state.rounds import ledger as round_cache
from tests.fakes.fleets import front
from tests.fakes.small_fleet import NANO_NODE, NODES, ORIN_NODE, RUN, make_ready, small_fleet
from tests.fakes.small_fleet import make_ready as make_ready_in
from tests.fakes.stored_records import finished_round, planned_round
from wattfleet.common.settings.model import Group
from wattfleet.core.budgets import InForce
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import Allowance, History
from wattfleet.core.planning.policies import AllDevices, FastestK, RandomK
from wattfleet_proto.device_state import BoardSample, DeviceState, GrantPhase

# --- Rounds -----------------------------------------------------------------------------------------------------------
# Rounds and runs: repeated plans, observations, results, metrics, and restarts.


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


def test_a_run_that_needs_all_devices_gets_them_whatever_the_policy() -> None:
    fleet = small_fleet(policy=FastestK(1))
    assert set(fleet.flower.plan(RUN, 1, NODES, 1.0).nodes) == {"orin"}
    fleet = small_fleet(policy=FastestK(1))
    fleet.flower.start_run("trees", "FedXgbBagging", 1, needs_all=True)
    assert set(fleet.flower.plan("trees", 1, NODES, 1.0).nodes) == {"orin", "nano"}


def test_the_site_was_observed_once_all_chosen_devices_were() -> None:
    fleet = small_fleet(policy=FastestK(2))
    make_ready_in(fleet, "slow", front((90, 12)), 2.5, 3)
    planned = fleet.flower.plan(RUN, 1, [*NODES, 3], 2.0)
    assert set(planned.nodes) == {"orin", "nano"}
    assert (planned.observed_site_w, planned.observed_s) == (None, None)
    fleet.rounds.observe(planned.plan_id, ObservedTraining("orin", 21.0, 31.0))
    one = fleet.rounds.records[planned.plan_id]
    assert (one.observed_site_w, one.observed_s) == (None, None)
    fleet.rounds.observe(planned.plan_id, ObservedTraining("nano", 34.0, 14.5))
    both = fleet.rounds.records[planned.plan_id]
    assert (both.observed_site_w, both.observed_s) == (31 + 14.5 + 2.5, 2 * 34)


def test_an_observed_rounds_duration_is_predicted_warm_up_plus_observed_epochs() -> None:
    fleet = small_fleet(policy=FastestK(2))
    fleet.agents.report_front("orin", front((10, 50), warmup_s=60), 5.0, 50, "d" * 64, minibatches_per_epoch=100)
    planned = fleet.flower.plan(RUN, 1, NODES, 2.0)
    assert planned.plan.duration_s == 60 + 2 * 10
    fleet.rounds.observe(planned.plan_id, ObservedTraining("orin", 11.0, 31.0))
    fleet.rounds.observe(planned.plan_id, ObservedTraining("nano", 34.0, 14.5))
    assert fleet.rounds.records[planned.plan_id].observed_s == 60 + 2 * 11


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


# --- Round cache ------------------------------------------------------------------------------------------------------
# Which of a run's rounds stay cached, and that the others are recalled unchanged.

TWO_ROUNDS = 4


@pytest.fixture
def two_rounds_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the cache to two rounds of two devices each."""
    monkeypatch.setattr(round_cache, "_DECISIONS", TWO_ROUNDS)


def train(fleet: Fleet, number: int, run_id: str = RUN) -> RoundRecord:
    """Run a round from its plan to its end."""
    plan_id = fleet.flower.plan(run_id, number, NODES, 1.0).plan_id
    for device_id in fleet.rounds.records[plan_id].nodes:
        fleet.rounds.observe(plan_id, ObservedTraining(device_id, 20.0, 12.0))
    results = [DeviceResult(device_id, loss=1.0 / number) for device_id in fleet.rounds.records[plan_id].nodes]
    return fleet.rounds.finish(plan_id, results, 30.0)


def let_go(fleet: Fleet) -> list[str]:
    """Evict all that can be evicted, as if it had been stored."""
    gone = fleet.rounds.evictable()
    fleet.rounds.cache.evict(gone)
    return sorted(gone)


@pytest.mark.usefixtures("two_rounds_at_hand")
def test_rounds_that_were_used_last_stay_and_others_go() -> None:
    fleet = small_fleet()
    for number in range(1, 5):
        train(fleet, number)
    fleet.flower.report_metrics(RUN, 1, {"accuracy": 0.5})
    assert let_go(fleet) == [f"{RUN}/2", f"{RUN}/3"]
    assert list(fleet.rounds.records) == [f"{RUN}/1", f"{RUN}/4"]
    assert let_go(fleet) == []


@pytest.mark.usefixtures("two_rounds_at_hand")
def test_a_round_in_which_somebody_is_waited_for_stays() -> None:
    fleet = small_fleet()
    fleet.flower.start_run("other", "FedAvg", 9)
    awaited = fleet.flower.plan("other", 1, [ORIN_NODE], 1.0).plan_id
    for number in range(1, 5):
        train(fleet, number)
    assert awaited not in fleet.rounds.evictable()
    assert fleet.rounds.in_flight()[0].plan_id == awaited
    fleet.rounds.observe(awaited, ObservedTraining("orin", 20.0, 12.0))
    for number in range(5, 8):
        train(fleet, number)
    assert awaited in let_go(fleet)


@pytest.mark.usefixtures("two_rounds_at_hand")
def test_the_newest_round_stays_even_where_it_alone_is_too_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_cache, "_DECISIONS", 1)
    fleet = small_fleet()
    train(fleet, 1)
    train(fleet, 2)
    assert let_go(fleet) == [f"{RUN}/1"]
    assert list(fleet.rounds.records) == [f"{RUN}/2"]


@pytest.mark.usefixtures("two_rounds_at_hand")
def test_the_rounds_of_a_run_that_is_over_or_was_given_up_go_as_others_are_used() -> None:
    fleet = small_fleet()
    given_up = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    fleet.rounds.abandon(given_up)
    fleet.flower.start_run("other", "FedAvg", 9)
    unfinished = fleet.flower.plan("other", 1, NODES, 1.0).plan_id
    assert let_go(fleet) == []
    fleet.flower.finish_run("other", "")
    fleet.flower.start_run("third", "FedAvg", 9)
    train(fleet, 1, "third")
    train(fleet, 2, "third")
    assert let_go(fleet) == sorted([given_up, unfinished])


@pytest.mark.usefixtures("two_rounds_at_hand")
def test_what_was_let_go_of_counts_in_the_plans_to_come() -> None:
    forgetful, whole = small_fleet(policy=RandomK(1, seed=2)), small_fleet(policy=RandomK(1, seed=2))
    for number in range(1, 20):
        results = []
        for fleet in (forgetful, whole):
            planned = fleet.flower.plan(RUN, number, NODES, 1.0)
            # A device that fails is rested, and for longer after each further failure.
            failed = [DeviceResult(device_id, "no reply", share=0.0) for device_id in planned.nodes]
            results.append(fleet.rounds.finish(planned.plan_id, failed, 30.0))
        assert results[0] == results[1]
        let_go(forgetful)
    assert len(forgetful.rounds.records) <= TWO_ROUNDS < len(whole.rounds.records)


@pytest.mark.usefixtures("two_rounds_at_hand")
def test_a_history_that_is_recalled_is_brought_up_to_what_is_at_hand() -> None:
    fleet = small_fleet()
    for number in range(1, 4):
        train(fleet, number)
    let_go(fleet)
    whole = fleet.rounds.cache.history(RUN)
    assert [past.number for past in whole.rounds] == [1, 2, 3]
    assert not fleet.rounds.cache.is_history_missing(RUN)
    for run_id in "abcd":
        fleet.flower.start_run(run_id, "FedAvg", 1)
        fleet.rounds.cache.history(run_id)
    let_go(fleet)
    assert fleet.rounds.cache.is_history_missing(RUN), "the others were used since"
    stored = History().after(1, {}).after(2, {})  # the third round is cached and not stored yet
    fleet.rounds.cache.restore_history(RUN, stored)
    assert [past.number for past in fleet.rounds.cache.history(RUN).rounds] == [1, 2, 3]
    assert fleet.rounds.cache.history(RUN).latest == {"orin": whole.latest["orin"], "nano": whole.latest["nano"]}
    fleet.rounds.cache.restore_history(RUN, History())
    assert len(fleet.rounds.cache.history(RUN).rounds) == 3, "cached rounds stay"


@pytest.mark.usefixtures("two_rounds_at_hand")
def test_a_restored_round_is_not_the_newest_and_keeps_later_changes() -> None:
    fleet = small_fleet()
    first, *_, newest = [train(fleet, number) for number in range(1, 5)]
    let_go(fleet)
    assert fleet.rounds.cache.is_missing(first.plan_id) and not fleet.rounds.cache.is_missing(newest.plan_id)
    assert not fleet.rounds.cache.is_missing("never begun/1")
    fleet.rounds.cache.restore(first)
    assert (list(fleet.rounds.records)[0], list(fleet.rounds.records)[-1]) == (first.plan_id, newest.plan_id)
    assert fleet.flower.plan(RUN, 1, NODES, 1.0) == first, "a requested plan stays"
    fleet.flower.report_metrics(RUN, 1, {"accuracy": 0.5})
    fleet.rounds.cache.restore(first)
    assert fleet.rounds.records[first.plan_id].metrics == {"accuracy": 0.5}


@pytest.mark.usefixtures("two_rounds_at_hand")
def test_rounds_of_a_run_that_was_forgotten_meanwhile_are_not_recalled() -> None:
    fleet = small_fleet()
    for number in range(1, 5):
        train(fleet, number)
    let_go(fleet)
    fleet.flower.remove_runs([RUN])
    fleet.rounds.cache.restore(finished_round(1))
    assert not fleet.rounds.records and not fleet.rounds.cache.is_missing(f"{RUN}/1")


@pytest.mark.usefixtures("two_rounds_at_hand")
def test_after_a_restart_rounds_are_lacked_of_runs_that_have_some_in_the_store() -> None:
    before = small_fleet()
    fleet = Fleet(before.operator.allowance, before.flower.policy, runs=[before.flower.run(RUN)], archived=[RUN])
    fleet.flower.start_run("newer", "FedAvg", 1)
    assert fleet.rounds.cache.is_missing(f"{RUN}/1") and fleet.rounds.cache.is_history_missing(RUN)
    assert not fleet.rounds.cache.is_missing("newer/1") and not fleet.rounds.cache.is_history_missing("newer")


@pytest.mark.usefixtures("two_rounds_at_hand")
def test_a_fleet_that_was_copied_goes_its_own_way() -> None:
    fleet = small_fleet()
    train(fleet, 1)
    copied = fleet.copy()
    train(copied, 2)
    train(copied, 3)
    let_go(copied)
    assert (list(fleet.rounds.records), len(fleet.rounds.cache.history(RUN).rounds)) == ([f"{RUN}/1"], 1)
    assert len(copied.rounds.cache.history(RUN).rounds) == 3


def changeable_within(part: object, found: dict[int, object]) -> dict[int, object]:
    """All containers that a fleet consists of, by their identity, except those within frozen records."""
    kind = type(part)
    if id(part) in found or (is_dataclass(kind) and kind.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        return found
    if isinstance(part, dict | list | set):
        found[id(part)] = part
        for each in part.values() if isinstance(part, dict) else part:
            changeable_within(each, found)
    elif kind.__module__.startswith("coordinator.") and hasattr(part, "__dict__"):
        found[id(part)] = part
        for each in vars(part).values():
            changeable_within(each, found)
    return found


@pytest.mark.usefixtures("two_rounds_at_hand")
def test_a_copy_shares_nothing_that_can_change() -> None:
    fleet = small_fleet()
    train(fleet, 1)
    parts, copied = changeable_within(fleet, {}), changeable_within(fleet.copy(), {})
    assert len(parts) == len(copied) > 30
    assert not [part for identity, part in parts.items() if identity in copied and not isinstance(part, Enum | Group)]


@pytest.mark.usefixtures("two_rounds_at_hand")
def test_a_round_that_ends_twice_is_of_the_history_as_it_ended_first() -> None:
    fleet = small_fleet()
    done = train(fleet, 1)
    fleet.rounds.cache.history(RUN)
    again = fleet.rounds.finish(done.plan_id, [], 31.0)
    assert (again.results, again.wall_s) == ((), 31.0)
    assert fleet.rounds.cache.history(RUN).times_completed == {"orin": 1, "nano": 1}
    assert replace(planned_round(), plan_id=done.plan_id) == planned_round()


# --- Round statistics -------------------------------------------------------------------------------------------------
# Counters and histograms of rounds, computed by hand for two devices.


def value(fleet: Fleet, name: str, only: tuple[str, ...] = (), **labels: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(FleetCollector(fleet, only))
    return registry.get_sample_value(f"wattfleet_{name}", labels)


def observed_fleet() -> Fleet:
    """A fleet after a round of two epochs, in which two of three devices took part."""
    fleet = small_fleet(site_budget_w=90.0, policy=FastestK(2))
    make_ready(fleet, "slow", front((90, 12)), 2.5, 3)
    plan_id = fleet.flower.plan(RUN, 1, [*NODES, 3], 2.0).plan_id
    fleet.observe("orin", plan_id, 21.0, 31.0)
    fleet.observe("nano", plan_id, 28.0, 14.5)
    return fleet


def test_a_histogram_counts_a_value_at_its_limit_as_within() -> None:
    counted = Histogram((1.0, 2.0))
    for each in (0.5, 1.0, 1.5, 9.0):
        counted.add(each)
    assert counted.buckets == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert (counted.sum, counted.count) == (12.0, 4)


def test_observed_trainings_are_compared_with_the_prediction_of_their_own_round() -> None:
    fleet = observed_fleet()
    # The Orin took 21 s where 20 s were predicted, and the Nano 28 s where 35 s were predicted.
    for limit, count in (("0.8", 1), ("1.02", 1), ("1.05", 2)):
        assert value(fleet, "observed_to_predicted_ratio_bucket", quantity="time", le=limit) == count
    assert value(fleet, "observed_to_predicted_ratio_sum", quantity="power") == pytest.approx(31 / 30 + 14.5 / 15)


def test_deviations_are_in_predicted_standard_deviations() -> None:
    fleet = small_fleet()
    make_ready(fleet, "orin", front((20, 30), epoch_log_sd=0.1, power_log_sd=0.05), 5.0, NODES[0])
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    # The Orin is two deviations too slow and one below its power. The Nano's prediction states no deviation.
    fleet.observe("orin", plan_id, 20 * math.exp(0.2), 30 * math.exp(-0.05))
    fleet.observe("nano", plan_id, 40.0, 15.0)
    assert value(fleet, "prediction_deviations_count", quantity="time") == 1
    assert value(fleet, "prediction_deviations_sum", quantity="time") == pytest.approx(2)
    assert value(fleet, "prediction_deviations_bucket", quantity="time", le="1.645") == 0
    assert value(fleet, "prediction_deviations_sum", quantity="power") == pytest.approx(1)
    assert value(fleet, "prediction_deviations_bucket", quantity="power", le="1.645") == 1


def test_rounds_and_participants_are_counted_by_what_came_of_them() -> None:
    fleet = observed_fleet()
    results = [DeviceResult("orin", share=0.5), DeviceResult("nano", failure="the node is gone")]
    for _ in range(2):  # a Flower server repeats requests that it got no answer to
        fleet.rounds.finish(f"{RUN}/1", results, 80.0)
    fleet.flower.plan(RUN, 2, [*NODES, 3], 2.0)
    fleet.rounds.abandon(f"{RUN}/2")
    assert value(fleet, "rounds_planned_total") == 2
    assert value(fleet, "rounds_ended_total", reason="finished") == 1
    assert value(fleet, "rounds_ended_total", reason="abandoned") == 1
    counts = {"selected": 4, "not_selected": 2, "partial": 1, "failed": 1, "completed": 0, "late": 0, "stopped": 0}
    assert {each: value(fleet, "participations_total", reason=each) for each in counts} == counts


def test_a_device_that_a_trim_stops_is_counted() -> None:
    fleet = small_fleet()
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.set_budget("site", InForce(0.0, "query", False, "the sun has set"))
    assert value(fleet, "participations_total", reason="stopped") == 2


def test_joules_are_those_of_warm_up_and_epochs_and_a_runs_end_with_it() -> None:
    fleet = observed_fleet()
    warmup_s = {each.device_id: each.warmup_s for each in fleet.rounds.records[f"{RUN}/1"].plan.assignments}
    orin_j, nano_j = 31 * (warmup_s["orin"] + 2 * 21), 14.5 * (warmup_s["nano"] + 2 * 28)
    assert value(fleet, "device_training_energy_joules_total", device="orin") == pytest.approx(orin_j)
    assert value(fleet, "run_energy_joules_total", run=RUN) == pytest.approx(orin_j + nano_j)
    assert value(fleet, "round_energy_joules_sum") == pytest.approx(orin_j + nano_j)
    fleet.flower.finish_run(RUN, "")
    assert value(fleet, "run_energy_joules_total", run=RUN) is None
    assert value(fleet, "device_training_energy_joules_total", device="orin") == pytest.approx(orin_j)


def test_a_round_over_its_budget_stays_counted_after_the_next_one() -> None:
    fleet = small_fleet(site_budget_w=60.0)
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    fleet.observe("orin", plan_id, 20.0, 58.0)
    fleet.observe("nano", plan_id, 35.0, 15.0)
    assert value(fleet, "rounds_over_budget_total") == 1


def test_the_gauges_of_a_run_end_with_it() -> None:
    fleet = observed_fleet()
    fleet.flower.finish_run(RUN, "")
    assert value(fleet, "round_number") is None
    assert value(fleet, "site_power_watts", kind="planned") is None
    assert value(fleet, "site_power_watts", kind="observed") is None
    assert value(fleet, "device_observed_power_watts", device="orin") is None
    assert value(fleet, "device_budget_watts", device="orin") is None
    assert value(fleet, "site_power_watts", kind="allowed") == 90


def test_a_preview_counts_nothing() -> None:
    fleet = observed_fleet()
    RoundPreview(fleet, RUN, False, None).plan(1.0)
    assert value(fleet, "rounds_planned_total") == 1


def test_single_devices_are_exported_by_rule_and_all_of_them_counted() -> None:
    fleet = observed_fleet()
    fleet.samples.report("nano", BoardSample(power_w=7.0))
    fleet.samples.report("orin", BoardSample(power_w=20.0))
    only = ("id:nano",)
    assert value(fleet, "device_power_watts", only, device="nano") == 7
    assert value(fleet, "device_power_watts", only, device="orin") is None
    assert value(fleet, "device_observed_power_watts", only, device="orin") is None
    assert value(fleet, "devices", only, state="ready") == 3
    assert (value(fleet, "reporting_devices", only), value(fleet, "live_power_watts", only)) == (2, 27)
