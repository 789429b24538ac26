"""The most devices or utility within a deadline, compared with all sets in all modes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.fleets import Fleet, every_plan, fleets, history_of, many, modes_within_limit
from tests.fakes.fronts import front
from wattfleet.errors import InfeasibleBudgetError, InvalidInputError, NoCandidatesError
from wattfleet.planning import Allowance, Offer, Participation, plan_round
from wattfleet.planning.policies import Deadline


@settings(max_examples=40)
@given(fleets(), st.integers(1, 30).map(float), st.sampled_from([0.5, 2.0]))
def test_the_most_devices_that_meet_the_deadline_are_selected(fleet: Fleet, deadline_s: float, epochs: float) -> None:
    in_time = [(len(devices), -s) for devices, s in every_plan(fleet, epochs) if s <= deadline_s]
    if not in_time:
        with pytest.raises((InvalidInputError, NoCandidatesError)):
            plan_round(fleet.offers, Deadline(deadline_s), fleet.allowance, epochs, 1)
        return
    plan = plan_round(fleet.offers, Deadline(deadline_s), fleet.allowance, epochs, 1)
    count, least_s = max(in_time)
    assert len(plan.assignments) == count
    # As many devices as possible finish by the deadline, and these finish as early as possible.
    assert plan.duration_s <= deadline_s * (1 + 1e-12)
    assert plan.duration_s >= -least_s * (1 - 1e-12)
    assert plan.deadline_s == deadline_s


@settings(max_examples=40)
@given(
    fleets(),
    st.integers(2, 30).map(float),
    st.lists(st.none() | st.integers(0, 9), min_size=4, max_size=4),
)
def test_the_most_useful_set_that_meets_the_deadline_is_selected(
    fleet: Fleet, deadline_s: float, losses: list[int | None]
) -> None:
    known = {f"device-{k}": loss for k, loss in enumerate(losses[: len(fleet.offers)])}
    history = history_of(
        {device: Participation(False, 10, float(loss)) for device, loss in known.items() if loss is not None}
    )
    able = [offer.device_id for offer in fleet.offers if modes_within_limit(offer)]
    # A device that never trained counts as much as the best of the others.
    most = max((known[device] or 0 for device in able), default=0) or 0
    nobody_known = all(known[device] is None for device in able)
    worth = {
        device: (1 if nobody_known or most == 0 else most) if loss is None else loss for device, loss in known.items()
    }
    reachable = [sum(worth[d] for d in devices) for devices, s in every_plan(fleet) if s <= deadline_s]
    if not reachable:
        return
    plan = plan_round(fleet.offers, Deadline(deadline_s, "loss"), fleet.allowance, 1.0, 2, history)
    assert sum(worth[a.device_id] for a in plan.assignments) >= max(reachable) * (1 - 1e-3)
    assert plan.duration_s <= deadline_s * (1 + 1e-12)


def test_reasons_name_slow_devices_and_those_with_too_much_power() -> None:
    offers = [
        Offer("late", front((40, 5)), 1.0),
        Offer("dear", front((10, 60)), 1.0),
        Offer("good", front((20, 15)), 1.0),
    ]
    plan = plan_round(offers, Deadline(30.0), Allowance.of_site(63.0), 1.0, 1)
    said = {decision.device_id: (decision.selected, decision.reason) for decision in plan.decisions}
    assert said["good"][0]
    assert said["late"] == (False, "too slow: 40.0 s in its fastest mode, the deadline is 30 s")
    assert said["dear"][1].startswith("too much power: meeting the deadline needs 59.0 W above idle")


@pytest.mark.parametrize("utility", ["equal", "loss"])
@pytest.mark.parametrize("site_w", [30.0, 500.0])
def test_an_impossible_deadline_is_refused_with_a_possible_one(utility: str, site_w: float) -> None:
    # 30 W only allow the slow mode.
    offers = [Offer("a", front((10, 50), (20, 20)), 2.0)]
    # With more watts a round of 15 s is possible, but none of 9 s.
    deadline_s, error = (9.0, NoCandidatesError) if site_w == 500.0 else (15.0, InfeasibleBudgetError)
    with pytest.raises(error, match=f"within {deadline_s:g} s.*: allow at least") as refusal:
        plan_round(offers, Deadline(deadline_s, utility), Allowance.of_site(site_w), 1.5, 1)
    least_s = float(re.findall(r"at least (\d+) s", str(refusal.value))[0])
    assert least_s == (15 if site_w == 500.0 else 30)
    assert plan_round(offers, Deadline(least_s, utility), Allowance.of_site(site_w), 1.5, 1).duration_s <= least_s


def test_a_budget_too_low_for_any_device_is_reported_before_the_deadline() -> None:
    with pytest.raises(InfeasibleBudgetError, match="5 W is not enough to train one device"):
        plan_round(many(2), Deadline(500.0), Allowance.of_site(5.0), 1.0, 1)


def test_a_fleet_without_utility_still_trains() -> None:
    history = history_of({offer.device_id: Participation(False, 10, 0.0) for offer in many(3)})
    assert plan_round(many(3), Deadline(30.0, "loss"), Allowance.of_site(500.0), 1.0, 2, history).assignments
