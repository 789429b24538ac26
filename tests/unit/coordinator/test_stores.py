"""Batteries and energy budgets of supplies at the coordinator: accounts, readings, late reports and restarts."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from coordinator.errors import UnknownRecordError
from coordinator.state.fleet import Fleet
from coordinator.state.records import CountedEnergy
from coordinator.state.stores import PlacedBattery
from tests.fakes.small_fleet import NODES, confirm_all, end_training, small_fleet, train
from wattfleet.core.budgets import Battery, Charge, EnergyAccount, Period, PeriodBudget
from wattfleet.core.errors import EnergySpentError, ImplausibleError, InvalidInputError, NoCandidatesError
from wattfleet_proto.device_state import BoardSample

RUN, OTHER = "one", "two"
WH = 3600.0


class Date:
    """A date that a test puts forward and back."""

    def __init__(self) -> None:
        self.now = datetime(2026, 6, 1, 22, tzinfo=timezone.utc)

    def __call__(self) -> datetime:
        return self.now

    def pass_h(self, hours: float) -> None:
        self.now += timedelta(hours=hours)


def fleet_with(date: Date, *batteries: PlacedBattery, budget_j: float | None = None) -> Fleet:
    fleet = small_fleet(now=date, batteries=batteries)
    if budget_j is not None:
        fleet.stores.set_budget("site", PeriodBudget(budget_j, Period.DAY))
    for run_id in (RUN, OTHER):
        fleet.flower.start_run(run_id, "FedAvg", 9)
    return fleet


def account_of(fleet: Fleet) -> EnergyAccount:
    account = fleet.stores.account("site")
    assert account is not None
    return account


def round_of(fleet: Fleet, run_id: str, number: int, drawn_j: float = 200.0) -> float:
    """Plan and train a round; returns the joules that its trainings draw above the idle power of the boards."""
    record = fleet.flower.plan(run_id, number, NODES, 1.0)
    for each in record.plan.assignments:
        train(fleet, each.device_id)
        fleet.report_energy(each.device_id, record.plan_id, drawn_j, 20.0)
        end_training(fleet, each.device_id)
    fleet.rounds.finish(record.plan_id, [], 20.0)
    return sum(each.energy_j for each in fleet.rounds.get(record.plan_id).energies.values())


# --- Budgets of a period ----------------------------------------------------------------------------------------------


def test_a_round_sets_energy_aside_for_its_supply_and_a_report_replaces_it() -> None:
    date = Date()
    fleet = fleet_with(date, budget_j=1e5)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    planned = sum(each.set_aside_j for each in record.plan.assignments)
    assert account_of(fleet).set_aside_j == pytest.approx(planned)
    assert planned > 0
    [orin] = [each for each in record.plan.assignments if each.device_id == "orin"]
    train(fleet, "orin")
    fleet.report_energy("orin", record.plan_id, 400.0, 20.0)  # 300 J above its idle power of 5 W
    fleet.report_energy("orin", record.plan_id, 999.0, 20.0)
    assert account_of(fleet).spent_j == 300.0
    assert account_of(fleet).set_aside_j == pytest.approx(planned - orin.set_aside_j)


def test_two_runs_share_the_energy_of_a_supply() -> None:
    fleet = fleet_with(Date(), budget_j=1e5)
    spent_j = round_of(fleet, RUN, 1, 400.0) + round_of(fleet, OTHER, 1, 400.0)
    assert account_of(fleet).spent_j == pytest.approx(spent_j)
    fleet.stores.set_budget("site", PeriodBudget(spent_j + 1.0, Period.DAY))
    for run_id in (RUN, OTHER):
        with pytest.raises(NoCandidatesError, match="it may train again from about 2026-06-02 00:00 UTC"):
            fleet.flower.plan(run_id, 2, NODES, 1.0)


def test_the_next_day_has_energy_of_its_own_and_late_reports_count_for_their_day() -> None:
    date = Date()
    fleet = fleet_with(date, budget_j=1e5)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    date.pass_h(3)
    assert account_of(fleet) == EnergyAccount(1e5)
    train(fleet, "orin")
    fleet.report_energy("orin", record.plan_id, 400.0, 20.0)
    assert account_of(fleet) == EnergyAccount(1e5)
    date.pass_h(-3)
    assert account_of(fleet).spent_j == 300.0


def test_a_plan_is_outdated_if_its_supply_has_no_energy_any_more() -> None:
    fleet = fleet_with(Date(), budget_j=1e5)
    record = fleet.flower.request_round(RUN, 1, NODES, 1.0).planned()
    assert not fleet.is_outdated(RUN, record.plan.assignments)
    fleet.stores.set_budget("site", PeriodBudget(1.0, Period.DAY))
    assert fleet.is_outdated(RUN, record.plan.assignments)


def test_a_plan_is_outdated_if_a_budget_lacks_one_joule_for_it() -> None:
    fleet = fleet_with(Date(), budget_j=1e5)
    record = fleet.flower.request_round(RUN, 1, NODES, 1.0).planned()
    planned_j = sum(each.set_aside_j for each in record.plan.assignments)
    fleet.stores.set_budget("site", PeriodBudget(planned_j, Period.DAY))
    assert not fleet.is_outdated(RUN, record.plan.assignments)
    fleet.stores.set_budget("site", PeriodBudget(planned_j - 1.0, Period.DAY))
    assert fleet.is_outdated(RUN, record.plan.assignments)


def test_a_budget_of_an_unknown_supply_is_an_error() -> None:
    with pytest.raises(UnknownRecordError, match="the site has no supply 'roof'; it has site"):
        fleet_with(Date()).stores.set_budget("roof", PeriodBudget(1.0, Period.DAY))


def test_a_supply_without_budget_and_battery_counts_nothing() -> None:
    fleet = fleet_with(Date())
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert fleet.stores.of_plan(record.plan_id) == []
    assert all(each.longest_s is None for each in record.plan.assignments)


def test_the_account_survives_a_restart() -> None:
    date = Date()
    fleet = fleet_with(date, budget_j=1e5)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    train(fleet, "orin")
    fleet.report_energy("orin", record.plan_id, 400.0, 20.0)
    stored = fleet.stores.of_plan(record.plan_id)
    assert stored
    after = small_fleet(now=date, energy_budgets=fleet.stores.budgets, counted=stored)
    assert account_of(after) == account_of(fleet)


def test_a_run_on_a_battery_that_is_never_charged_ends() -> None:
    fleet = fleet_with(Date(), of_site(Battery(100 * WH)))
    fleet.stores.state_charge("site", 0.2)
    with pytest.raises(EnergySpentError, match="no time is foreseen when it has enough"):
        fleet.flower.plan(RUN, 1, NODES, 1.0)


def test_a_run_waits_for_a_board_that_is_away_if_another_is_flat() -> None:
    fleet = fleet_with(Date(), replace(of_devices(Battery(100 * WH)), devices=("orin",)))
    fleet.report_sample("orin", BoardSample(battery_share=0.1))
    fleet.agents.disconnect("nano")
    with pytest.raises(NoCandidatesError, match="orin: too little energy"):
        fleet.flower.plan(RUN, 1, NODES, 1.0)


# --- Batteries --------------------------------------------------------------------------------------------------------


def of_site(battery: Battery, source: str = "operator") -> PlacedBattery:
    return PlacedBattery("shed", battery, source, supply="site")


def of_devices(battery: Battery, source: str = "agent") -> PlacedBattery:
    return PlacedBattery("boards", battery, source, devices=("*",))


def test_no_round_is_planned_before_the_charge_of_a_battery_is_known() -> None:
    fleet = fleet_with(Date(), of_devices(Battery(100 * WH)))
    with pytest.raises(NoCandidatesError, match="its charge is unknown, so it counts as empty"):
        fleet.flower.plan(RUN, 1, NODES, 1.0)
    for device_id in ("orin", "nano"):
        fleet.report_sample(device_id, BoardSample(battery_share=1.0))
    assert fleet.flower.plan(RUN, 1, NODES, 1.0).plan.assignments


def test_only_the_device_that_would_run_dry_is_left_out() -> None:
    fleet = fleet_with(Date(), of_devices(Battery(100 * WH)))
    fleet.report_sample("orin", BoardSample(battery_share=0.2001))
    fleet.report_sample("nano", BoardSample(battery_share=0.9))
    plan = fleet.flower.plan(RUN, 1, NODES, 1.0).plan
    assert [each.device_id for each in plan.assignments] == ["nano"]
    [decision] = [each for each in plan.decisions if each.device_id == "orin"]
    assert decision.reason.startswith("too little energy: its training needs up to")


def test_what_rounds_draw_counts_until_a_reading_contains_it() -> None:
    date = Date()
    fleet = fleet_with(date, of_site(Battery(100 * WH, self_discharge=0.0, max_age_s=1e6)))
    fleet.stores.state_charge("site", 1.0)
    [before] = fleet.battery_states()
    spent_j = round_of(fleet, RUN, 1)
    [after] = fleet.battery_states()
    assert after.level.energy_j == pytest.approx(before.level.energy_j - spent_j)
    date.pass_h(0.1)
    fleet.stores.state_charge("site", 0.9)
    [read] = fleet.battery_states()
    assert read.level.energy_j == pytest.approx(90 * WH)


def test_what_is_set_aside_for_a_training_counts_although_the_reading_is_newer() -> None:
    date = Date()
    fleet = fleet_with(date, of_site(Battery(100 * WH, self_discharge=0.0, max_age_s=1e6)))
    fleet.stores.state_charge("site", 1.0)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    confirm_all(fleet)
    date.pass_h(24 * 7)  # a jump of the date: the devices may still train
    fleet.stores.state_charge("site", 1.0)
    [state] = fleet.battery_states()
    planned_j = sum(each.set_aside_j for each in record.plan.assignments)
    assert state.level.energy_j == pytest.approx(100 * WH - planned_j)


def test_the_idle_power_of_all_devices_draws_from_a_battery_of_their_supply() -> None:
    date = Date()
    fleet = fleet_with(date, of_site(Battery(100 * WH, self_discharge=0.0, max_age_s=1e6)))
    fleet.stores.state_charge("site", 1.0)
    date.pass_h(2)
    [state] = fleet.battery_states()
    idle_w = sum(each.idle_w or 0.0 for each in fleet.agents.devices.values())
    assert state.level.energy_j == pytest.approx((100 - 2 * idle_w) * WH)


def test_a_charge_that_nobody_can_have_is_refused() -> None:
    fleet = fleet_with(Date(), of_site(Battery(100 * WH)))
    with pytest.raises(ImplausibleError, match="a battery cannot hold 140 % of its capacity"):
        fleet.stores.state_charge("site", 1.4)
    assert fleet.battery_states()[0].charge is None


def test_a_measured_charge_cannot_be_stated_by_command() -> None:
    fleet = fleet_with(Date(), of_devices(Battery(100 * WH)))
    with pytest.raises(InvalidInputError, match="the charge of orin comes from its agent"):
        fleet.stores.state_charge("orin", 0.5)
    with pytest.raises(UnknownRecordError, match="'site' has no battery"):
        fleet.stores.state_charge("site", 0.5)


def test_a_stated_charge_and_what_was_drawn_since_survive_a_restart() -> None:
    date = Date()
    kind = of_site(Battery(100 * WH, max_age_s=1e6))
    fleet = fleet_with(date, kind)
    stated = fleet.stores.state_charge("site", 0.8)
    round_of(fleet, RUN, 1)
    charge = Charge(stated.share, stated.measured_at)
    counted = fleet.stores.of_plan(f"{RUN}/1")
    after = small_fleet(now=date, batteries=[kind], counted=counted, charges={stated.holder: charge})
    assert after.battery_states() == fleet.battery_states()


def test_devices_with_limited_energy_measure_in_rounds_only() -> None:
    fleet = fleet_with(Date(), budget_j=1e5)
    for survey_s in (None, 30.0):
        assert not fleet.flower.request_measuring(RUN, NODES, 1.0, 50, survey_s).planned().assignments


def test_old_rounds_are_forgotten() -> None:
    date = Date()
    fleet = fleet_with(date, budget_j=1e9)
    round_of(fleet, RUN, 1)
    date.pass_h(24 * 70)
    round_of(fleet, RUN, 2)
    assert fleet.stores.of_plan(f"{RUN}/1") == []


def test_rounds_that_a_reading_surely_contains_are_named_once_to_the_store() -> None:
    date = Date()
    fleet = fleet_with(date, of_devices(Battery(100 * WH, max_age_s=1e6)), budget_j=1e9)
    for number, hours in ((1, 30), (2, 30), (3, 0)):
        for device_id in ("orin", "nano"):
            fleet.report_sample(device_id, BoardSample(battery_share=1.0))
        round_of(fleet, RUN, number)
        date.pass_h(hours)
    named = {(each.plan_id, each.holder) for each in fleet.stores.take_contained()}
    assert named == {(f"{RUN}/{number}", f"device/{each}") for number in (1, 2) for each in ("orin", "nano")}
    assert fleet.stores.take_contained() == []
    assert {each.holder for each in fleet.stores.of_plan(f"{RUN}/1")} == {"supply/site"}, "the supply's month needs it"


def test_a_counted_round_has_one_record_per_holder() -> None:
    fleet = fleet_with(Date(), of_devices(Battery(100 * WH)), budget_j=1e6)
    for device_id in ("orin", "nano"):
        fleet.report_sample(device_id, BoardSample(battery_share=1.0))
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    counted = {each.holder: each for each in fleet.stores.of_plan(record.plan_id)}
    assert counted.keys() == {"supply/site", "device/orin", "device/nano"}
    assert counted["supply/site"].set_aside_j == pytest.approx(
        counted["device/orin"].set_aside_j + counted["device/nano"].set_aside_j
    )
    assert replace(counted["device/orin"], set_aside_j=0.0) == CountedEnergy(
        record.plan_id, "device/orin", fleet.stores.now, counted["device/orin"].ends_at, 0.0, 0.0
    )
