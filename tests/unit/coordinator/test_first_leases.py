"""What waits for the first lease of a device's session, for how long, and what happens if it is late."""

from __future__ import annotations

from coordinator.state.fleet import Fleet
from coordinator.state.records import RoundRecord
from tests.fakes.small_fleet import ORIN_FRONT, ORIN_NODE, RUN, make_ready, small_fleet
from wattfleet.budgets import InForce
from wattfleet_proto.device_state import GrantPhase

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
