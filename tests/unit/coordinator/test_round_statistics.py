"""Counters and histograms of rounds, computed by hand for two devices."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry

from coordinator.histograms import Histogram
from coordinator.metrics import FleetCollector
from coordinator.state.fleet import Fleet
from coordinator.state.preview import RoundPreview
from coordinator.state.records import DeviceResult
from tests.fakes.fronts import front
from tests.fakes.small_fleet import NODES, RUN, make_ready, small_fleet
from wattfleet.budgets import InForce
from wattfleet.planning.policies import FastestK
from wattfleet_proto.device_state import BoardSample


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
