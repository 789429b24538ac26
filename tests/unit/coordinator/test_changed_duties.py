"""Rounds in flight while the duties of their devices change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.state.fleet import Fleet
from coordinator.state.records import RoundRecord
from tests.fakes.fronts import front
from tests.fakes.obedient_devices import confirm_all
from tests.fakes.small_fleet import NODES, RUN, restarted, small_fleet
from wattfleet.budgets import InForce
from wattfleet.choosing import Front
from wattfleet.duties import KeptDuty
from wattfleet.errors import ImplausibleError
from wattfleet_proto.device_state import DeviceState, GrantPhase

KEPT = KeptDuty("camera", 500, 0.95, 29.5, 12, 2, (*[1] * 11, *[0] * 6), 1500.0, 350.0, 4, 0.5, 1)
SLOWER = front((30, 50), (60, 30), (120, 20))
"""The Orin's front once its duty takes two thirds of it: its round of 35 s takes 60 s in its mode."""


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def in_training(clock: Clock, deadline_s: float | None = None) -> tuple[Fleet, str]:
    """A fleet in training: an Orin at up to 30 W, which has a duty, and a Nano at up to 15 W."""
    fleet = small_fleet(now_s=clock)
    record = fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert record.plan.duration_s == 35.0
    fleet.rounds.cache.put(replace(record, plan=replace(record.plan, deadline_s=deadline_s)))
    confirm_all(fleet)
    for device_id in ("orin", "nano"):
        report(fleet, clock, device_id, GrantPhase.TRAINING)
        fleet.agents.report_state(device_id, DeviceState.TRAINING, 50, "")
    fleet.duties.report("orin", KEPT)
    return fleet, record.plan_id


def report(fleet: Fleet, clock: Clock, device_id: str, phase: GrantPhase) -> None:
    known = fleet.rounds.grants.of(device_id)
    assert known is not None
    fleet.rounds.grants.confirm(device_id, known.grant.grant_id, known.plan_id, phase, clock())


def report_front(fleet: Fleet, now: Front, idle_w: float = 5.0, device_id: str = "orin") -> None:
    fleet.agents.report_front(device_id, now, idle_w, 50, "d" * 64)


def reason(record: RoundRecord) -> str:
    return next(each.reason for each in record.plan.decisions if each.device_id == "orin")


def test_a_longer_epoch_has_the_round_wait_longer() -> None:
    fleet, _ = in_training(Clock())
    before = fleet.rounds.grants.of("orin")
    assert before is not None
    report_front(fleet, SLOWER)
    [record] = fleet.trim()
    assert record.plan.duration_s == 60.0
    assert reason(record).endswith("ends later because its epochs take longer beside its duty")
    told = confirm_all(fleet)
    assert list(told) == ["orin"]
    assert before.assignment is not None and told["orin"].assignment is not None
    assert (told["orin"].assignment.mode, told["orin"].limit_w) == (before.assignment.mode, before.grant.limit_w)
    assert told["orin"].longest_s > before.grant.longest_s
    assert fleet.trim() == []


def test_a_device_without_a_duty_trains_on_as_planned() -> None:
    fleet, _ = in_training(Clock())
    fleet.duties.report("orin", None)
    report_front(fleet, SLOWER)
    assert fleet.trim() == []


def test_a_device_that_cannot_meet_the_deadline_is_left_out_and_frees_its_watts() -> None:
    clock = Clock()
    fleet, plan_id = in_training(clock, deadline_s=50.0)
    clock.now_s = 5.0  # three quarters of the training are left: 45 s
    report_front(fleet, SLOWER)
    assert [each.plan.stopped for each in fleet.trim()] == [()]
    clock.now_s = 2.0
    report_front(fleet, front((40, 50), (90, 30)))
    [record] = fleet.trim()
    assert record.plan.stopped == ("orin",)
    assert "left out: its duty leaves too little time: 83 s of training, the deadline is 50 s" in reason(record)
    assert confirm_all(fleet)["orin"].assignment is None
    assert fleet.rounds.get(plan_id).idle_w == 5.0


def test_a_duty_that_is_heard_of_after_its_front_is_reviewed_as_well() -> None:
    fleet, _ = in_training(Clock())
    fleet.duties.report("orin", None)
    report_front(fleet, SLOWER)
    assert fleet.trim() == []
    fleet.duties.report("orin", KEPT)
    assert [each.plan.duration_s for each in fleet.trim()] == [60.0]
    fleet.duties.report("orin", KEPT)
    assert fleet.trim() == []


def test_after_a_restart_nobody_is_left_out_for_its_progress() -> None:
    clock = Clock()
    fleet, _ = in_training(clock, deadline_s=50.0)
    again = restarted(fleet, now_s=clock)
    for device_id in ("orin", "nano"):
        again.agents.connect(device_id, "agx-orin", "simulated", 18_096)
        again.rounds.grants.session_began(device_id, 0.0)
        known = again.rounds.grants.of(device_id)
        assert known is not None
        again.rounds.grants.confirm(device_id, 1, known.plan_id, GrantPhase.TRAINING, 30.0)
    again.duties.report("orin", KEPT)
    report_front(again, SLOWER)
    [record] = again.trim()
    assert (record.plan.stopped, record.plan.duration_s) == ((), 60.0)


def test_the_budget_is_kept_after_a_review() -> None:
    fleet, _ = in_training(Clock())
    report_front(fleet, SLOWER)
    [record] = fleet.set_budget("site", InForce(30.0, "query", False, "the meter"))
    assert record.plan.planned_w <= 30.0
    assert "ends later" in reason(record) and "because the budget fell" in reason(record)


@pytest.mark.parametrize(("idle_w", "modes"), [(3.0, ()), (20.0, ("orin",))])
def test_more_idle_watts_at_rest_trim_the_round_in_flight(idle_w: float, modes: tuple[str, ...]) -> None:
    """The budget is used up. An idle device gets a duty and then idles in a mode that draws more power."""
    fleet = small_fleet(site_budget_w=40.0)
    record = fleet.flower.plan(RUN, 1, NODES[:1], 1.0)
    confirm_all(fleet)
    assert record.plan.planned_w <= 40.0
    report_front(fleet, front((35, 25), (60, 22)), idle_w, "nano")
    changed = fleet.trim()
    assert tuple(device for each in changed for device in each.plan.in_other_mode) == modes
    assert sum(fleet.draw.elsewhere_w(frozenset(), {"orin"}).values()) <= 40.0
    assert fleet.draw.idle_w() == {"site": 5.0 + idle_w}


def test_idle_watts_over_the_whole_budget_are_shown_as_reserved() -> None:
    fleet = small_fleet(site_budget_w=40.0)
    for device_id in ("orin", "nano"):
        fleet.agents.report_no_front(device_id, "the duty takes the whole board", 25.0)
    fleet.trim()
    assert fleet.draw.reserved_w() == {"site": 50.0}


def test_watts_at_rest_with_a_duty_may_be_those_of_a_training() -> None:
    """An AGX Orin idles at 35 W or less without a duty, and draws at most 150 W."""
    fleet = small_fleet()
    with pytest.raises(ImplausibleError, match="40 W as its idle power"):
        fleet.agents.report_front("orin", SLOWER, 40.0, 50, "")
    fleet.agents.report_front("orin", SLOWER, 40.0, 50, "", is_idle_with_duty=True)
    assert fleet.agents.get("orin").idle_w == 40.0
    assert fleet.agents.report_no_front("orin", "no time", 45.0, is_idle_with_duty=True).idle_w == 45.0
    with pytest.raises(ImplausibleError, match="151 W as its idle power"):
        fleet.agents.report_no_front("orin", "no time", 151.0, is_idle_with_duty=True)
