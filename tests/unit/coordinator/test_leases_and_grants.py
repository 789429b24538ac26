"""How long leases and grants last: first leases, silence, new sessions, and when granted watts are counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.budgets.site_file import SiteFile
from coordinator.errors import DuplicateSessionError, NoDevicesError, StillInUseError
from coordinator.settings import GrantSettings, SessionSettings
from coordinator.state.fleet import Fleet
from coordinator.state.leases import RECONNECTS_PER_S, Leases, pace_of
from coordinator.state.records import (
    DeviceResult,
    GivenUpTraining,
    GrantLifetime,
    ObservedTraining,
    RoundRecord,
    StoredGrants,
)
from tests.fakes.fleets import front
from tests.fakes.small_fleet import (
    NANO_NODE,
    NODES,
    ORIN_FRONT,
    ORIN_NODE,
    RUN,
    confirm_all,
    end_training,
    make_ready,
    restarted,
    small_fleet,
    train,
)
from wattfleet.core.budgets import ConstantBudget, InForce
from wattfleet.core.planning.policies import FastestK
from wattfleet_proto.device_state import DeviceState, GrantPhase

# --- Leases -----------------------------------------------------------------------------------------------------------
# Leases: longer in large fleets, expired after silence, and replaced when an agent opens a new session.


SETTINGS = SessionSettings()


def fleet_of(devices: int) -> Leases:
    leases = Leases(0.0)
    for k in range(devices):
        leases.begin(f"device-{k}", f"installation-{k}", 0.0)
    return leases


def test_a_small_fleet_is_heard_of_every_few_seconds_and_comes_back_at_once() -> None:
    pace = fleet_of(20).pace
    assert pace.lease_s == SETTINGS.lease_s
    assert pace.reconnect_s < 0.1


@pytest.mark.parametrize("devices", [2_000, 10_000])
def test_a_large_fleet_renews_and_comes_back_no_faster_than_can_be_served(devices: int) -> None:
    pace = fleet_of(devices).pace
    assert devices / pace.lease_s <= SETTINGS.renewals_per_s
    assert devices / pace.reconnect_s == pytest.approx(RECONNECTS_PER_S)


def test_the_pace_after_a_restart_is_that_of_the_fleet_that_is_expected() -> None:
    leases = Leases(0.0, expected=[f"device-{k}" for k in range(10_000)])
    before = leases.pace
    leases.begin("device-0", "a", 1.0)
    assert leases.pace == before


def test_a_lease_lapses_after_three_silent_intervals_and_not_before() -> None:
    leases = fleet_of(3)
    lease, _ = leases.begin("late", "x", 100.0)
    leases.renew(lease, 104.0)
    assert {each.device_id for each in leases.expired(104.0)} == {"device-0", "device-1", "device-2"}
    assert lease not in leases.expired(104.0 + 3 * SETTINGS.lease_s - 0.001)
    assert lease in leases.expired(104.0 + 3 * SETTINGS.lease_s)


def test_an_agent_that_is_back_takes_the_place_of_its_old_session() -> None:
    leases = Leases(0.0)
    old, replaced = leases.begin("orin", "same", 0.0)
    assert replaced is None
    new, replaced = leases.begin("orin", "same", 1.0)
    assert replaced is old
    assert not leases.end(old)  # the old session ends, but the device stays connected
    assert len(leases) == 1
    assert leases.end(new)
    assert len(leases) == 0


@pytest.mark.parametrize(("first", "second"), [("one", "other"), ("", ""), ("one", ""), ("", "one")])
def test_another_agent_of_the_same_id_is_refused_while_the_first_is_there(first: str, second: str) -> None:
    leases = Leases(0.0)
    lease, _ = leases.begin("orin", first, 0.0)
    with pytest.raises(DuplicateSessionError, match="orin is already connected from another installation"):
        leases.begin("orin", second, 1.0)
    leases.end(lease)
    leases.begin("orin", second, 2.0)


def test_devices_that_were_there_before_a_restart_are_waited_for_within_the_grace() -> None:
    leases = Leases(100.0, expected=["a", "b", "c"])
    leases.begin("a", "x", 101.0)
    fleet = {"a", "b", "c", "never seen"}
    assert leases.expected_back(fleet, 110.0) == (2, SETTINGS.return_grace_s - 10.0)
    assert leases.expected_back({"a", "c"}, 110.0) == (1, SETTINGS.return_grace_s - 10.0)
    leases.begin("b", "x", 111.0)
    leases.begin("never seen", "x", 111.0)
    leases.begin("c", "x", 112.0)
    assert leases.expected_back(fleet, 113.0) == (0, 0.0)


def test_after_the_grace_nobody_is_waited_for_and_who_is_missing_is_told_once() -> None:
    leases = Leases(100.0, expected=["gone", "lost", "back"])
    leases.begin("back", "x", 101.0)
    assert leases.take_missing(100.0 + SETTINGS.return_grace_s - 0.1) == []
    assert leases.expected_back({"gone", "back"}, 100.0 + SETTINGS.return_grace_s - 0.1)[0] == 1
    assert leases.expected_back({"gone", "back"}, 100.0 + SETTINGS.return_grace_s) == (0, 0.0)
    assert leases.take_missing(100.0 + SETTINGS.return_grace_s) == ["gone", "lost"]
    assert leases.take_missing(100.0 + SETTINGS.return_grace_s) == []
    assert leases.pace == pace_of(1), "no other device is waited for"


def test_devices_that_are_called_back_are_waited_for_from_the_end_of_their_sessions() -> None:
    leases = Leases(0.0)
    called = [leases.begin(device_id, "x", 0.0)[0] for device_id in ("a", "b")]
    other, _ = leases.begin("other", "x", 0.0)
    for lease in called:
        leases.expect_reconnect(lease, 1_000.0)
        leases.end(lease)
    leases.end(other)
    assert leases.expected_back({"a", "b", "other"}, 1_010.0) == (2, SETTINGS.return_grace_s - 10.0)
    leases.begin("a", "x", 1_011.0)
    assert leases.expected_back({"a", "b", "other"}, 1_012.0) == (1, SETTINGS.return_grace_s - 12.0)
    assert leases.take_missing(1_000.0 + SETTINGS.return_grace_s) == ["b"]


# --- First leases -----------------------------------------------------------------------------------------------------
# What waits for the first lease of a device's session, for how long, and what happens if it is late.

LAPSED_S = 1e9


def fleet_with_a_silent_session() -> tuple[Fleet, RoundRecord]:
    """A fleet whose Orin was sent a grant, began a new session and has sent no lease in it."""
    fleet = small_fleet()
    planned = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    assert [device_id for device_id, _ in fleet.take_orders()] == ["orin"]
    fleet.rounds.grants.session_began("orin", 0.0)
    fleet.trim()
    return fleet, planned


def test_a_grant_is_sent_again_after_the_first_lease_and_a_review() -> None:
    fleet, planned = fleet_with_a_silent_session()
    fleet.trim()
    assert fleet.take_orders() == []
    fleet.rounds.grants.confirm("orin", 0, "", GrantPhase.OVER)
    assert fleet.take_orders() == []
    fleet.trim()
    assert [grant.plan_id for _, grant in fleet.take_orders()] == [planned.plan_id]


def test_a_device_that_never_sent_a_lease_can_be_planned_once_its_grant_lapsed() -> None:
    fleet, planned = fleet_with_a_silent_session()
    fleet.agents.disconnect("orin")
    fleet.rounds.finish(planned.plan_id, [], 50.0)
    assert fleet.rounds.grants.check(LAPSED_S) == ["orin"]
    make_ready(fleet, "orin", ORIN_FRONT, 5.0, ORIN_NODE)
    fleet.rounds.grants.session_began("orin", LAPSED_S)
    fleet.rounds.grants.confirm("orin", 0, "", GrantPhase.OVER)
    fleet.flower.plan(RUN, 2, [ORIN_NODE], 1.0)
    fleet.trim()
    assert [device_id for device_id, _ in fleet.take_orders()] == ["orin"]


def round_that_ends_before_the_first_lease() -> Fleet:
    fleet = small_fleet()
    planned = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    fleet.rounds.grants.session_began("orin", 0.0)
    fleet.rounds.finish(planned.plan_id, [], 50.0)
    return fleet


def test_a_round_that_ended_before_a_first_lease_does_not_hold_the_next_one_back() -> None:
    fleet = round_that_ends_before_the_first_lease()
    fleet.flower.plan(RUN, 2, [ORIN_NODE], 1.0)
    fleet.rounds.grants.confirm("orin", 0, "", GrantPhase.OVER)
    fleet.trim()
    assert [grant.plan_id for _, grant in fleet.take_orders()] == [f"{RUN}/2"]


def test_a_device_that_confirms_late_is_told_of_the_budget_that_fell_meanwhile() -> None:
    now_s = [0.0]
    fleet = small_fleet(now_s=lambda: now_s[0])
    planned = fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    [(_, slow)] = fleet.take_orders()
    now_s[0] = 100.0
    fleet.set_budget("site", InForce(20.0, "query", False, "the meter"))
    assert fleet.take_orders() == [], "it has not obeyed so far"
    fleet.rounds.grants.confirm("orin", slow.grant_id, planned.plan_id, GrantPhase.TRAINING)
    assert not fleet.rounds.grants.may_be_renewed("orin"), "its limit is too high now"
    fleet.trim()
    [(device_id, stop)] = fleet.take_orders()
    assert (device_id, stop.assignment) == ("orin", None)


def test_a_grant_that_never_arrived_is_sent_again_within_a_budget_that_fell() -> None:
    now_s = [0.0]
    fleet = small_fleet(now_s=lambda: now_s[0])
    fleet.flower.plan(RUN, 1, [ORIN_NODE], 1.0)
    [(_, lost)] = fleet.take_orders()
    now_s[0] = 100.0
    fleet.set_budget("site", InForce(20.0, "query", False, "the meter"))
    counted_on = fleet.rounds.grants.counted_on(fleet.agents.is_connected, now_s[0])
    assert not counted_on.believed, "it has not confirmed the grant in time"
    fleet.rounds.grants.session_began("orin", now_s[0])
    fleet.rounds.grants.confirm("orin", 0, "", GrantPhase.OVER)
    fleet.trim()
    [(device_id, again)] = fleet.take_orders()
    assert (device_id, again.plan_id) == ("orin", lost.plan_id)
    assert again.limit_w < 20.0 < lost.limit_w


# --- Fleet grants -----------------------------------------------------------------------------------------------------
# From when until when a device's granted watts are counted.

OTHER = "another run"


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
    assert (record.observed_site_w, record.observed_s) == (None, None)
    assert fleet.rounds.finish(plan_id, [DeviceResult("orin", share=0.5)], 20.0).failed == ()
