"""From when until when a device's granted watts are counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.budgets.site_file import SiteFile
from coordinator.errors import NoDevicesError, StillInUseError
from coordinator.settings import GrantSettings
from coordinator.state.fleet import Fleet
from coordinator.state.records import (
    DeviceResult,
    GivenUpTraining,
    GrantLifetime,
    ObservedTraining,
    RoundRecord,
    StoredGrants,
)
from tests.fakes.fronts import front
from tests.fakes.obedient_devices import confirm_all, end_training, train
from tests.fakes.small_fleet import NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN, make_ready, restarted, small_fleet
from wattfleet.budgets import ConstantBudget, InForce
from wattfleet.planning.policies import FastestK
from wattfleet_proto.device_state import DeviceState, GrantPhase

OTHER = "another run"
LAPSED_S = 1e9


def watts(amount: float) -> InForce:
    return InForce(amount, "query", False, "the meter")


def set_aside_w(record: RoundRecord, device_id: str) -> float:
    [amount] = [part.power_limit_w for part in record.plan.assignments if part.device_id == device_id]
    return amount


def two_runs(site_budget_w: float = 100.0) -> Fleet:
    fleet = small_fleet(site_budget_w)
    fleet.flower.start_run(OTHER, "FedAdam", 3)
    return fleet


def reconnect(fleet: Fleet, device_id: str, grant_id: int, plan_id: str, phase: GrantPhase) -> None:
    """Begin a session whose first lease reports the grant in force."""
    fleet.agents.connect(device_id, "agx-orin", "simulated", 18_096)
    fleet.rounds.grants.session_began(device_id, 0.0)
    fleet.rounds.grants.confirm(device_id, grant_id, plan_id, phase)


def connect(fleet: Fleet, device_id: str, state: DeviceState = DeviceState.READY) -> None:
    fleet.agents.connect(device_id, "agx-orin", "simulated", 18_096)
    fleet.agents.report_state(device_id, state, 50, "")


def test_many_runs_are_looked_for_in_one_pass_over_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, asked = two_runs(), []
    fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    confirm_all(fleet)
    plan_holding = fleet.draw.plan_holding

    def counted(device_id: str) -> str | None:
        asked.append(device_id)
        return plan_holding(device_id)

    monkeypatch.setattr(fleet.draw, "plan_holding", counted)
    fleet.require_unused(f"run-{k}" for k in range(1_000))
    assert sorted(asked) == ["nano", "orin"]
    with pytest.raises(StillInUseError, match=f"run '{RUN}' has ended, but watts are still held for orin:"):
        fleet.require_unused([OTHER, RUN])


# --- in another run -----------------------------------------------------------------------------------------------


def test_a_device_committed_to_another_run_is_not_offered_but_its_watts_count() -> None:
    fleet = two_runs(60.0)
    first = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    second = fleet.flower.plan(OTHER, 1, NODES, 1.0)
    assert [part.device_id for part in second.plan.assignments] == ["nano"]
    assert second.plan.planned_w == set_aside_w(first, "orin") + set_aside_w(second, "nano") <= 60.0


def test_with_all_devices_in_another_runs_round_it_is_said_which() -> None:
    fleet = two_runs()
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    with pytest.raises(
        NoDevicesError, match=f"orin is ready, and part of round 1 of run {RUN}, nano is ready, and part"
    ):
        fleet.flower.plan(OTHER, 1, NODES, 1.0)


def test_a_node_that_its_own_run_takes_for_free_is_offered_again() -> None:
    fleet = small_fleet()
    fleet.flower.plan(RUN, 1, NODES, 1.0)
    confirm_all(fleet)
    assert fleet.flower.release(RUN, [ORIN_NODE]) == {"orin"}  # its message was lost, and the Nano still trains
    confirm_all(fleet)
    assert fleet.flower.release(RUN, [ORIN_NODE]) == set()
    second = fleet.flower.plan(RUN, 2, [ORIN_NODE], 1.0)
    assert [part.device_id for part in second.plan.assignments] == ["orin"]


def ends_by_finish(fleet: Fleet) -> None:
    fleet.rounds.finish(f"{RUN}/1", [DeviceResult("orin", "the node is gone")], 50.0)


def ends_with_its_run(fleet: Fleet) -> None:
    fleet.flower.finish_run(RUN, "KeyboardInterrupt: ")


def ends_observed(fleet: Fleet) -> None:
    fleet.rounds.observe(f"{RUN}/1", ObservedTraining("orin", 21.0, 31.0))


def ends_seen(fleet: Fleet) -> None:
    train(fleet, "orin")
    end_training(fleet, "orin")


def ends_given_up(fleet: Fleet) -> None:
    fleet.rounds.abandon(f"{RUN}/1")


@pytest.mark.parametrize("ends", [ends_by_finish, ends_with_its_run, ends_observed, ends_seen, ends_given_up])
def test_a_device_that_is_done_may_be_taken_by_another_run(ends: Callable[[Fleet], None]) -> None:
    fleet = two_runs()
    fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    confirm_all(fleet)
    ends(fleet)
    assert not fleet.rounds.in_flight()
    confirm_all(fleet)
    assert fleet.flower.plan(OTHER, 1, [ORIN_NODE], 1.0).nodes == {"orin": ORIN_NODE}


def test_a_device_that_was_ready_all_along_is_waited_for_still() -> None:
    fleet = two_runs()
    planned = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    fleet.agents.report_state("orin", DeviceState.READY, 50, "parked")
    assert fleet.rounds.in_flight() == [planned]


def test_a_device_that_trains_when_its_round_is_given_up_counts_as_long_as_it_does() -> None:
    fleet = two_runs()
    planned = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    train(fleet, "orin")
    fleet.rounds.abandon(planned.plan_id)
    first = fleet.flower.plan(OTHER, 1, NODES, 1.0)
    assert first.idle_w == set_aside_w(planned, "orin")
    end_training(fleet, "orin")
    fleet.rounds.observe(first.plan_id, ObservedTraining("nano", 36.0, 14.5))
    assert fleet.flower.plan(OTHER, 2, [NANO_NODE], 1.0).idle_w == 5.0


# --- disconnected and connected again -----------------------------------------------------------------------------


def test_a_device_that_is_gone_counts_until_its_grant_has_lapsed() -> None:
    fleet = two_runs(60.0)
    planned = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    train(fleet, "orin")
    fleet.agents.disconnect("orin")
    first = fleet.flower.plan(OTHER, 1, [NANO_NODE], 1.0)
    assert first.idle_w == set_aside_w(planned, "orin")
    fleet.rounds.finish(planned.plan_id, [DeviceResult("orin", "the node is gone")], 50.0)
    fleet.rounds.observe(first.plan_id, ObservedTraining("nano", 36.0, 14.5))
    second = fleet.flower.plan(OTHER, 2, [NANO_NODE], 1.0)
    assert second.idle_w == set_aside_w(planned, "orin"), "it may still train"
    fleet.rounds.observe(second.plan_id, ObservedTraining("nano", 36.0, 14.5))
    fleet.rounds.grants.renew("orin", 0.0)
    assert fleet.rounds.grants.check(LAPSED_S) == ["orin"]
    assert fleet.flower.plan(OTHER, 3, [NANO_NODE], 1.0).idle_w == 5.0, "it has parked by itself, and may be on"


def test_after_a_restart_what_was_promised_counts_before_anybody_is_back() -> None:
    before = two_runs(60.0)
    planned = before.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    fleet = restarted(before)
    connect(fleet, "nano")
    assert fleet.flower.plan(OTHER, 1, [NANO_NODE], 1.0).idle_w == set_aside_w(planned, "orin")


def test_a_restart_with_a_shorter_lifetime_counts_the_one_that_devices_were_told() -> None:
    before, now_s = small_fleet(), [0.0]
    planned = before.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    shorter = GrantSettings(lifetime_s=10.0)
    after = restarted(before, grants=shorter, stored=StoredGrants(600.0), now_s=lambda: now_s[0])
    reconnect(after, "orin", 3, planned.plan_id, GrantPhase.TRAINING)
    after.agents.disconnect("orin")  # before it received the shorter lifetime
    now_s[0] = 600.0
    assert after.check_grants() == [], "the device may still train"
    assert after.rounds.grants.unstored.take() == []
    now_s[0] = 700.0
    assert after.check_grants() == ["orin"]
    assert after.rounds.grants.unstored.take() == [GrantLifetime(10.0)], "nobody relies on the longer one any more"


@pytest.mark.parametrize("ends", [ends_by_finish, ends_with_its_run])
def test_a_training_of_an_ended_round_is_stored_until_it_is_over(ends: Callable[[Fleet], None]) -> None:
    fleet = two_runs()
    planned = fleet.flower.plan(RUN, 1, NODES, 1.0)
    train(fleet, "orin")
    train(fleet, "nano")
    end_training(fleet, "nano")
    fleet.rounds.grants.unstored.take()
    ends(fleet)
    assert fleet.rounds.grants.unstored.take() == [GivenUpTraining("orin", planned.plan_id)]
    fleet.check_grants()
    assert fleet.rounds.grants.unstored.take() == []
    end_training(fleet, "orin")
    fleet.check_grants()
    assert fleet.rounds.grants.unstored.take() == [GivenUpTraining("orin", None)]


def test_who_was_gone_when_the_watts_fell_is_trimmed_when_it_is_back() -> None:
    fleet = small_fleet()
    planned = fleet.flower.plan(RUN, 1, NODES, 1.0)
    train(fleet, "orin")
    fleet.agents.disconnect("orin")
    fleet.set_budget("site", watts(30.0))
    # The Orin cannot be reached, and its 30 W use up the budget.
    [(device_id, stop)] = fleet.take_orders()
    assert (device_id, stop.plan_id, stop.assignment) == ("nano", planned.plan_id, None)
    connect(fleet, "orin", DeviceState.TRAINING)
    [record] = fleet.trim()
    assert list(confirm_all(fleet)) == ["nano", "orin"] or list(fleet.agents.devices) == ["orin", "nano"]
    assert record.plan.planned_w == set_aside_w(record, "orin") + 3.0 <= 30.0
    assert fleet.trim() == []


def test_a_budget_that_fell_during_an_outage_is_kept_when_devices_return() -> None:
    before = small_fleet()
    before.flower.plan(RUN, 1, NODES, 1.0)
    fleet = restarted(before)
    assert fleet.set_budget("site", watts(17.0)) == []
    for device_id in ("orin", "nano"):
        connect(fleet, device_id, DeviceState.TRAINING)
    [record] = fleet.trim()
    assert record.plan.planned_w <= 17.0


def test_a_device_that_comes_back_is_told_what_it_may_have_missed() -> None:
    fleet = small_fleet()
    planned = fleet.flower.plan(RUN, 1, NODES, 1.0)
    train(fleet, "orin")
    had = fleet.rounds.grants.of("orin")
    fleet.set_budget("site", watts(20.0))
    stop = dict(fleet.take_orders())["orin"]
    fleet.agents.disconnect("orin")
    reconnect(fleet, "orin", had.grant.grant_id, planned.plan_id, GrantPhase.TRAINING)
    assert dict(fleet.take_orders())["orin"] == stop
    after = restarted(fleet)
    reconnect(after, "orin", 3, planned.plan_id, GrantPhase.OVER)
    reconnect(after, "nano", 4, planned.plan_id, GrantPhase.WAITING)
    assert after.take_orders() == [], "the grants from before are compared with the budgets first"
    after.trim()
    [kept] = fleet.rounds.records[planned.plan_id].plan.assignments
    assert dict(after.take_orders())["nano"].assignment == kept


def test_nothing_is_granted_before_a_device_has_said_what_it_still_has() -> None:
    before = small_fleet()
    before.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    fleet = restarted(before)
    fleet.agents.connect("orin", "agx-orin", "simulated", 18_096)
    fleet.rounds.grants.session_began("orin", 0.0)
    fleet.trim()
    assert fleet.take_orders() == []
    fleet.rounds.grants.confirm("orin", 0, "", GrantPhase.OVER)
    assert fleet.take_orders() == [], "what it may train by now is compared with the budgets first"
    fleet.trim()
    assert [device_id for device_id, _ in fleet.take_orders()] == ["orin"]


def test_a_device_that_comes_back_to_a_finished_round_is_not_told_to_train() -> None:
    fleet = small_fleet()
    planned = fleet.flower.plan(RUN, 1, NODES, 1.0)
    fleet.rounds.finish(planned.plan_id, [], 50.0)
    after = restarted(fleet)
    reconnect(after, "orin", 4, planned.plan_id, GrantPhase.OVER)
    assert after.take_orders() == []
    assert after.rounds.grants.of("orin").is_over


def test_a_device_without_a_supply_does_not_keep_rounds_from_being_planned() -> None:
    before = small_fleet()
    make_ready(before, "both", ORIN_FRONT, 5.0, 99)
    before.flower.plan(RUN, 1, [99], 1.0)
    ambiguous = SiteFile(
        before.operator.allowance.supplies,
        {"site": ConstantBudget(100.0)},
        attached=(("both", "site"), ("b*", "annexe")),
    )
    fleet = restarted(before, ambiguous)
    connect(fleet, "nano")
    assert fleet.flower.plan(RUN, 2, [NANO_NODE], 1.0).nodes == {"nano": NANO_NODE}
    assert fleet.trim() == []


# --- other draws of power -----------------------------------------------------------------------------------------


def test_a_device_that_measures_itself_anew_counts_with_its_hungriest_mode() -> None:
    fleet = small_fleet(60.0)
    fleet.agents.report_state("orin", DeviceState.PROFILING, 50, "drift")
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert (record.idle_w, record.plan.planned_w) == (50.0, 60.0)


def test_a_device_that_begins_to_measure_itself_trims_the_others() -> None:
    fleet = small_fleet(65.0)
    make_ready(fleet, "third", front((50, 60)), 4.0, 3)
    planned = fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert fleet.trim() == []
    fleet.agents.report_state("third", DeviceState.PROFILING, 50, "drift")
    assert [record.plan_id for record in fleet.trim()] == [planned.plan_id]


# --- several rounds in flight -------------------------------------------------------------------------------------


def test_rounds_in_flight_share_what_the_fall_of_the_watts_costs() -> None:
    fleet = small_fleet()
    first, second = fleet.flower.plan(RUN, 1, [NANO_NODE], 1.0), fleet.flower.plan(RUN, 2, [ORIN_NODE], 1.0)
    assert set_aside_w(first, "nano") + set_aside_w(second, "orin") == 65.0
    confirm_all(fleet)
    changed = fleet.set_budget("site", watts(50.0))
    # The older round need not be stopped for the newer one.
    assert [(device_id, each.plan_id) for device_id, each in confirm_all(fleet).items()] == [("orin", second.plan_id)]
    assert [record.plan_id for record in changed] == [second.plan_id]
    assert changed[0].plan.planned_w == 45.0
    changed = fleet.set_budget("site", watts(30.0))
    told = {device_id: each.plan_id for device_id, each in confirm_all(fleet).items()}
    assert told == {"nano": first.plan_id, "orin": second.plan_id}
    assert {record.plan.planned_w for record in changed} == {30.0}


def test_what_was_ended_idles_beside_those_that_were_observed() -> None:
    fleet = small_fleet()
    plan_id = fleet.flower.plan(RUN, 1, NODES, 1.0).plan_id
    [record] = fleet.set_budget("site", watts(20.0))
    assert (record.idle_w, [part.device_id for part in record.plan.assignments]) == (5.0, ["nano"])
    fleet.rounds.observe(plan_id, ObservedTraining("nano", 36.0, 14.5))
    assert fleet.rounds.records[plan_id].observed_site_w == 5.0 + 14.5


def test_a_round_of_which_everybody_was_ended_was_not_observed() -> None:
    fleet = small_fleet(policy=FastestK(1))
    plan_id = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0).plan_id
    [record] = fleet.set_budget("site", watts(0.0))
    assert not record.plan.assignments
    assert (record.observed_site_w, record.observed_duration_s) == (None, None)
    assert fleet.rounds.finish(plan_id, [DeviceResult("orin", share=0.5)], 20.0).failed == ()
