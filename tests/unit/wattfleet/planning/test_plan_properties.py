"""Properties that hold for every round plan."""

from __future__ import annotations

import math
import random
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.fakes.fleets import (
    Fleet,
    able,
    best,
    done_s,
    drawn_w,
    fleets,
    modes_within_limit,
    planned_w,
)
from tests.fakes.fronts import front
from tests.fakes.plans import (
    draws,
    histories,
    plan_of,
    points_of,
    policies,
    sizes,
)
from wattfleet.errors import InfeasibleBudgetError, InvalidInputError, NoCandidatesError
from wattfleet.planning import Allowance, History, Offer, Selection, plan_round
from wattfleet.planning.policies import AllDevices, Deadline, FastestK, Policy


@settings(max_examples=60)
@given(fleets(power_log_sd=0.08), policies, histories, st.sampled_from([0.5, 1.0, 3.0]), st.floats(0, 1))
def test_plans_keep_budgets_and_decide_once_about_every_device(
    fleet: Fleet, policy: Policy, history: History, epochs: float, over_selection: float
) -> None:
    try:
        plan = plan_of(fleet, policy, epochs, history, Selection(over_selection=over_selection))
    except (InvalidInputError, NoCandidatesError):
        assume(False)
    by_id = {offer.device_id: offer for offer in fleet.offers}
    ids = [assignment.device_id for assignment in plan.assignments]
    assert ids == sorted(set(ids)) and ids
    points = points_of(plan, fleet)
    for assignment in plan.assignments:
        offer, point = by_id[assignment.device_id], points[assignment.device_id]
        assert point in modes_within_limit(offer)
        assert assignment.epoch_s == offer.front.epoch_s[point]
        assert assignment.warmup_s == offer.front.warmup_s[point]
        assert assignment.power_w == offer.front.power_w[point]
        assert assignment.power_limit_w == pytest.approx(planned_w(offer, point))
    slowest_s = max(done_s(by_id[device_id], point, epochs) for device_id, point in points.items())
    assert slowest_s <= plan.duration_s * (1 + 1e-12)
    if isinstance(policy, Deadline):
        assert plan.deadline_s == policy.deadline_s
        assert plan.duration_s <= policy.deadline_s * (1 + 1e-12)
    total = drawn_w(fleet, points)
    feeding = {name for device_id in ids for name in fleet.allowance.supplies.path(by_id[device_id].supply)}
    for use in plan.supplies:
        assert use.planned_w == pytest.approx(total[use.supply])
        assert use.budget_w == fleet.allowance.budget_w[use.supply]
        if use.supply in feeding:
            assert use.planned_w <= use.budget_w * (1 + 1e-8)
    roots = fleet.allowance.supplies.roots
    assert plan.planned_w == pytest.approx(sum(total[name] for name in roots))
    assert plan.site_budget_w == sum(fleet.allowance.budget_w[name] for name in roots)
    assert [decision.device_id for decision in plan.decisions] == sorted(by_id)
    assert [decision.device_id for decision in plan.decisions if decision.selected] == ids
    assert all(decision.reason for decision in plan.decisions)


@settings(max_examples=30)
@given(fleets(), policies, histories, st.integers(0, 99))
def test_plans_are_deterministic_and_independent_of_device_order(
    fleet: Fleet, policy: Policy, history: History, shuffle: int
) -> None:
    shuffled = Fleet(random.Random(shuffle).sample(fleet.offers, len(fleet.offers)), fleet.allowance)
    try:
        plan = plan_of(fleet, policy, history=history)
    except (InvalidInputError, NoCandidatesError) as refusal:
        with pytest.raises(type(refusal), match=re.escape(str(refusal))):
            plan_of(shuffled, policy, history=history)
    else:
        assert plan_of(shuffled, policy, history=history) == plan


@settings(max_examples=30)
@given(fleets(), st.builds(FastestK, sizes) | st.builds(AllDevices) | draws, histories, st.integers(0, 30))
def test_more_watts_never_lose_a_device_or_slow_the_same_number(
    fleet: Fleet, policy: Policy, history: History, more_w: int
) -> None:
    richer = fleet.with_watts(more_w)
    # With more able devices, random policies draw differently, and devices that failed can back off.
    assume(able(richer) == able(fleet) or (isinstance(policy, (FastestK, AllDevices)) and not history.rounds))
    try:
        poor = plan_of(fleet, policy, history=history)
    except (InvalidInputError, NoCandidatesError):
        assume(False)
    rich = plan_of(richer, policy, history=history)
    assert len(rich.assignments) >= len(poor.assignments)
    if len(rich.assignments) == len(poor.assignments):
        assert rich.duration_s <= poor.duration_s


@settings(max_examples=30)
@given(fleets(), sizes, st.sampled_from([0.5, 3.0]))
def test_fastest_k_is_the_best_of_all_plans(fleet: Fleet, count: int | None, epochs: float) -> None:
    candidates = able(fleet)
    assume(candidates)
    expected = best(fleet, min(len(candidates), count or math.ceil(len(candidates) / 2)), epochs=epochs)
    if expected is None:
        with pytest.raises(InfeasibleBudgetError):
            plan_of(fleet, FastestK(count), epochs)
        return
    plan = plan_of(fleet, FastestK(count), epochs)
    assert len(plan.assignments) == expected[1]
    assert plan.duration_s == pytest.approx(expected[2], rel=1e-12)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(30, 200), st.integers(0, 29)), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.07]),
)
def test_the_watts_in_a_refusal_are_enough_and_hardly_more_than_needed(
    tenths: list[tuple[int, int]], power_log_sd: float
) -> None:
    offers = [
        Offer(f"device-{k}", front((10, training / 10), power_log_sd=power_log_sd), idle / 10)
        for k, (training, idle) in enumerate(tenths)
    ]
    with pytest.raises(InfeasibleBudgetError, match="allow at least") as refusal:
        plan_round(offers, FastestK(1), Allowance.of_site(0.5), 1.0, 1)
    min_extra_w = float(re.findall(r"at least ([\d.]+) W", str(refusal.value))[0])
    assert len(plan_round(offers, FastestK(1), Allowance.of_site(min_extra_w), 1.0, 1).assignments) == 1
    with pytest.raises(InfeasibleBudgetError):
        plan_round(offers, FastestK(1), Allowance.of_site(min_extra_w - 0.11), 1.0, 1)


@settings(max_examples=40)
@given(fleets(), st.builds(FastestK, sizes), st.integers(0, 12).map(float))
def test_watts_drawn_elsewhere_are_watts_less(fleet: Fleet, policy: Policy, elsewhere_w: float) -> None:
    supplies, budget_w = fleet.allowance.supplies, fleet.allowance.budget_w
    try:
        alone = plan_of(Fleet(fleet.offers, Allowance(supplies, budget_w)), policy)
    except (InvalidInputError, NoCandidatesError):
        assume(False)
    root = supplies.roots[0]
    beside = plan_of(
        Fleet(fleet.offers, Allowance(supplies, {**budget_w, root: budget_w[root] + elsewhere_w}, {root: elsewhere_w})),
        policy,
    )
    assert (beside.assignments, beside.decisions) == (alone.assignments, alone.decisions)
    assert beside.planned_w == alone.planned_w + elsewhere_w
