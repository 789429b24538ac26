"""The reasons in a round plan: each is true of its device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.fakes.fleets import (
    Fleet,
    able,
    done_s,
    drawn_w,
    fleets,
    modes_within_limit,
    planned_w,
)
from tests.fakes.plans import (
    histories,
    plan_of,
    points_of,
    policies,
)
from wattfleet.errors import InvalidInputError, NoCandidatesError
from wattfleet.planning import History, Offer, RoundPlan
from wattfleet.planning.policies import AllDevices, Deadline, Fair, FastestK, Oort, Policy, Progress, RandomK, Tiers

LEAST_MAKESPAN = r"the device with the least makespan|among the \d devices with the least makespan"
NOT_YET = "it has not trained in this run yet, and each device trains within its first rounds"

SELECTION_REASONS: Mapping[type[Policy], str] = {
    FastestK: LEAST_MAKESPAN,
    AllDevices: LEAST_MAKESPAN,
    Fair: rf"with priority, since it completed \d of \d rounds and the floor is \d+%"
    rf"|({LEAST_MAKESPAN})(, after \d with priority)?",
    RandomK: "drawn at random",
    Tiers: r"drawn from tier \d",
    Oort: "drawn for exploration|drawn for its high utility",
    Progress: f"in the set with the most progress per second|{NOT_YET}"
    "|it finishes within the round with the watts that the others leave",
    Deadline: r"in the largest set that meets the deadline of \d+ s|the device with the least makespan"
    r"|in the most useful set that meets the deadline of \d+ s",
}


@settings(max_examples=60)
@given(fleets(), policies, histories, st.sampled_from([0.5, 2.0]))
def test_every_reason_is_true(fleet: Fleet, policy: Policy, history: History, epochs: float) -> None:
    try:
        plan = plan_of(fleet, policy, epochs, history)
    except (InvalidInputError, NoCandidatesError):
        assume(False)
    points = points_of(plan, fleet)
    candidates = [offer for offer in able(fleet) if offer.device_id not in devices_with_reason(plan, "failed ")]
    by_id = {offer.device_id: offer for offer in fleet.offers}
    priority = devices_with_reason(plan, "selected: with priority") | devices_with_reason(plan, f"selected: {NOT_YET}")
    chosen_w = {device_id: planned_w(by_id[device_id], k) - by_id[device_id].idle_w for device_id, k in points.items()}
    [shortage] = {decision.reason.partition(" (")[2] for decision in plan.decisions if decision.selected}
    wanted = int(shortage.rpartition(" ")[2].rstrip(")")) if shortage else len(points)
    assert not shortage or shortage == f"the budget allows {devices(len(points))}, not {wanted})"
    assert not shortage or len(points) < wanted
    if isinstance(policy, (AllDevices, FastestK, Fair)):
        count = len(candidates) if isinstance(policy, AllDevices) else policy.count or (len(candidates) + 1) // 2
        assert wanted == min(len(candidates), count)
    if isinstance(policy, RandomK):
        assert len(candidates) - len(devices_with_reason(plan, "not drawn")) == min(
            len(candidates), policy.count or (len(candidates) + 1) // 2
        )
    if isinstance(policy, Oort):
        assert devices_with_reason(plan, "selected: drawn for exploration").isdisjoint(history.latest)
        assert devices_with_reason(plan, "selected: drawn for its high utility") <= set(history.latest)
    if isinstance(policy, Tiers):
        text = " ".join(decision.reason for decision in plan.decisions)
        assert len(set(re.findall(r"from (?:its )?tier (\d)", text))) == 1
        assert not set(re.findall(r"in tier (\d), but this round draws from tier \1", text))
    for decision in plan.decisions:
        offer = by_id[decision.device_id]
        modes = modes_within_limit(offer)
        in_time = [k for k in modes if done_s(offer, k, epochs) <= plan.duration_s * (1 + 1e-12)]
        if decision.selected:
            reason, _, figures = decision.reason.removeprefix("selected: ").partition("; done within ")
            assert decision.reason.startswith("selected: ")
            assert re.fullmatch(SELECTION_REASONS[type(policy)], reason), reason
            if reason == NOT_YET:
                assert offer.device_id not in history.last_selected
            elif number := re.match(r"among the (\d)", reason):
                assert int(number[1]) == len(points) - len(priority)
            elif reason.startswith("the device"):
                assert len(points) - len(priority) == 1
            stated = [float(number) for number in re.findall(r"-?\d+\.\d", figures)]
            assert stated == pytest.approx([plan.duration_s, chosen_w[offer.device_id]], abs=0.051)
        elif decision.reason.startswith("too slow") and plan.deadline_s is not None:
            assert all(done_s(offer, k, epochs) > plan.deadline_s for k in modes)
        elif decision.reason.startswith("too slow"):
            assert not in_time
        elif decision.reason.startswith("too much power: meeting the deadline"):
            assert plan.deadline_s is not None
            by_then = [k for k in modes if done_s(offer, k, epochs) <= plan.deadline_s]
            needed_w = min(planned_w(offer, k) for k in by_then) - offer.idle_w
            assert f"{needed_w:.1f} W above idle" in decision.reason
        elif decision.reason.startswith("too much power"):
            assert_too_much_power(decision.reason, offer, in_time, fleet, points, priority)
        elif decision.reason.startswith("over its own limit"):
            assert not modes
        elif decision.reason.startswith("over its supply's budget"):
            assert offer not in candidates
        elif decision.reason.startswith("not needed: devices with priority fill the round"):
            assert priority == set(points)
        else:
            reasons = {
                RandomK: "not drawn",
                Tiers: r"not drawn from its tier \d|in tier \d, but this round draws from tier \d",
                Oort: "not drawn, neither for utility nor for exploration",
                Progress: "other devices make more progress per second",
            }
            backoff = r"failed \d times in a row: excluded until round \d+"
            assert re.fullmatch(rf"{reasons.get(type(policy), backoff)}|{backoff}", decision.reason)


def devices_with_reason(plan: RoundPlan, beginning: str) -> set[str]:
    """The devices whose reason begins with the given text."""
    return {decision.device_id for decision in plan.decisions if decision.reason.startswith(beginning)}


def devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def assert_too_much_power(
    reason: str, offer: Offer, in_time: Sequence[int], fleet: Fleet, points: Mapping[str, int], priority: set[str]
) -> None:
    """Assert that a device reported to need too much power really does."""
    needed_w = min(planned_w(offer, k) for k in in_time) - offer.idle_w
    assert f"{needed_w:.1f} W above idle" in reason
    if supply := re.search(r"more than (\w+) has left", reason):
        assert supply[1] in fleet.allowance.supplies.path(offer.supply)
        assert drawn_w(fleet, points)[supply[1]] + needed_w > fleet.allowance.budget_w[supply[1]]
        return
    by_id = {each.device_id: each for each in fleet.offers}
    others_w = [planned_w(by_id[k], point) - by_id[k].idle_w for k, point in points.items() if k not in priority]
    assert needed_w >= max(others_w)
    assert reason.endswith(f" at most {max(others_w):.1f} W")
