"""Round plans: computed by hand, properties of every plan, reasons, refusals, and the watts that supplies allow."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.fakes.fleets import (
    NANO,
    ORIN,
    THREE,
    WATTS_QUANTILE,
    XAVIER,
    Fleet,
    able,
    best,
    done_s,
    drawn_w,
    draws,
    fleets,
    front,
    histories,
    history_of,
    many,
    modes_of,
    modes_within_limit,
    plan_of,
    planned_w,
    points_of,
    policies,
    reason_of,
    site,
    sizes,
    tree,
)
from tests.fakes.short_forms import examples
from wattfleet.core.choosing import predicted_front
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError, NoCandidatesError
from wattfleet.core.planning import Allowance, History, Offer, Participation, RoundPlan, Selection, plan_round
from wattfleet.core.planning.policies import (
    AllDevices,
    Deadline,
    Fair,
    FastestK,
    Oort,
    Policy,
    Progress,
    RandomK,
    Tiers,
)
from wattfleet.core.planning.round_plan import SupplyUse
from wattfleet.core.prediction import Prediction

# --- Plan by hand -----------------------------------------------------------------------------------------------------
# Round plans computed by hand.


def test_faster_devices_train_in_a_lower_power_mode() -> None:
    # All idle at 14 W. For 35 s the Orin needs 25 W more and the Nano 12 W; only the Xavier can finish within 25 s.
    plan = plan_round(THREE, FastestK(2), site(51.0), 1.0, 1)
    assert modes_of(plan) == {"nano": (35, 15), "orin": (20, 30)}
    assert (plan.duration_s, plan.planned_w, plan.deadline_s) == (35, 51, None)
    assert reason_of(plan, "xavier") == (
        "too much power: finishing within 35.0 s needs 34.0 W above idle, more than site has left"
    )


def test_fewer_watts_make_a_longer_round() -> None:
    # With one watt less, the Orin must use its 40 s mode. The Nano still needs its 35 s mode.
    assert modes_of(plan_round(THREE, FastestK(2), site(50.0), 1.0, 1)) == {"nano": (35, 15), "orin": (40, 20)}


def test_the_reason_for_an_unneeded_device_names_what_others_need() -> None:
    plan = plan_round(THREE, FastestK(2), site(500.0), 1.0, 1)
    assert modes_of(plan) == {"orin": (20, 30), "xavier": (25, 40)}
    assert reason_of(plan, "nano") == "too slow: 35.0 s in its fastest mode, the round lasts 25.0 s"
    plan = plan_round([ORIN, replace(ORIN, device_id="twin", idle_w=1.0)], FastestK(1), site(500.0), 1.0, 1)
    assert reason_of(plan, "twin") == (
        "too much power: finishing within 10.0 s needs 49.0 W above idle, the selected devices need at most 45.0 W"
    )


def test_a_budget_for_fewer_devices_is_stated_in_the_reasons() -> None:
    # All three idle at 14 W. Their lowest-power modes need 7, 15 and 19 W more.
    plan = plan_round(THREE, AllDevices(), site(54.0), 1.0, 1)
    assert set(modes_of(plan)) == {"nano", "orin"}
    assert plan.decisions[0].reason.endswith("(the budget allows 2 devices, not 3)")
    assert len(plan_round(THREE, AllDevices(), site(55.0), 1.0, 1).assignments) == 3


def test_a_circuit_bounds_its_own_devices_only() -> None:
    # The Orin and the Xavier share a circuit that idles at 11 W and can power one of them. The Nano is on another one.
    supplies = tree(house=None, shed="house", roof="house")
    offers = [replace(ORIN, supply="shed"), replace(XAVIER, supply="shed"), replace(NANO, supply="roof")]
    allowance = Allowance(supplies, {"house": 500.0, "shed": 36.0, "roof": 500.0})
    plan = plan_round(offers, AllDevices(), allowance, 1.0, 1)
    assert modes_of(plan) == {"nano": (35, 15), "orin": (20, 30)}
    assert [(use.supply, use.planned_w) for use in plan.supplies] == [("house", 51), ("shed", 36), ("roof", 15)]
    assert reason_of(plan, "xavier") == (
        "too much power: finishing within 35.0 s needs 34.0 W above idle, more than shed has left"
    )


def test_idle_power_above_training_power_stays_allocated() -> None:
    # The device may finish early and then idles while the other one still trains.
    odd = Offer("odd", front((10, 6)), 9.0)
    other = Offer("other", front((10, 20)), 1.0)
    plan = plan_round([odd, other], AllDevices(), site(29.0), 1.0, 1)
    assert (set(modes_of(plan)), plan.planned_w) == ({"odd", "other"}, 29)
    assert set(modes_of(plan_round([odd, other], AllDevices(), site(28.9), 1.0, 1))) == {"odd"}


def test_the_power_quantile_is_allocated_not_the_median() -> None:
    unsure = Offer("unsure", front((10, 50), power_log_sd=0.1), 5.0)
    needed_w = 50 * math.exp(0.1 * WATTS_QUANTILE)
    assert needed_w > 58
    with pytest.raises(InfeasibleBudgetError):
        plan_round([unsure], FastestK(1), site(58.0), 1.0, 1)
    [assignment] = plan_round([unsure], FastestK(1), site(59.0), 1.0, 1).assignments
    assert (assignment.power_w, assignment.power_limit_w) == (50, pytest.approx(needed_w))


def test_the_duration_is_the_time_quantile_not_the_median() -> None:
    unsure = Offer("unsure", front((10, 20), epoch_log_sd=0.5), 1.0)
    sure = Offer("sure", front((15, 20)), 1.0)
    plan = plan_round([unsure, sure], FastestK(1), site(500.0), 2.0, 1)
    assert (modes_of(plan), plan.duration_s) == ({"sure": (15, 20)}, 30)
    plan = plan_round([unsure], FastestK(1), site(500.0), 2.0, 1)
    assert plan.duration_s == pytest.approx(20 * math.exp(0.5 * 1.2815515655446004))


def test_a_certain_low_power_mode_replaces_a_faster_uncertain_one() -> None:
    either = Offer("either", front((10, 40), (12, 20), epoch_log_sd=[0.5, 0.0]), 1.0)
    assert modes_of(plan_round([either], FastestK(1), site(500.0), 1.0, 1)) == {"either": (12, 20)}


def test_short_trainings_get_a_high_cpu_clock_and_long_ones_a_low_one() -> None:
    # A first minibatch takes 17 s at the low clock and 3.5 s at the high one. Later ones are nearly as fast.
    modes = np.array([[4, 2_000_000, 6e8, 2e9], [4, 400_000, 6e8, 2e9]])
    prediction = Prediction(np.array([100.0, 110.0]), np.array([20_000.0, 12_000.0]), np.zeros(2), np.zeros(2))
    offer = Offer("board", predicted_front(modes, prediction, 100, first_gcycles=7.0), 2.0)
    rival = Offer("rival", front((30, 10)), 2.0)

    def clock(epochs: float) -> int:
        plan = plan_round([offer, rival], AllDevices(), site(500.0), epochs, 1)
        return {assignment.device_id: assignment.mode.cpu_khz for assignment in plan.assignments}["board"]

    assert [clock(epochs) for epochs in (0.5, 10.0)] == [2_000_000, 400_000]


def test_the_warm_up_counts_in_the_duration_and_in_the_reasons() -> None:
    quick, late = Offer("quick", front((10, 20), warmup_s=5), 1.0), Offer("late", front((30, 20), warmup_s=7), 1.0)
    plan = plan_round([quick, late], FastestK(1), site(500.0), 2.0, 1)
    assert plan.duration_s == 5 + 2 * 10
    [assignment] = plan.assignments
    assert (assignment.warmup_s, assignment.epoch_s) == (5, 10)
    assert reason_of(plan, "quick").endswith("done within 25.0 s at 19.0 W above idle")
    assert reason_of(plan, "late") == "too slow: 67.0 s in its fastest mode, the round lasts 25.0 s"
    with pytest.raises(NoCandidatesError, match="within 24 s, even in its fastest mode: allow at least 25 s"):
        plan_round([quick, late], Deadline(24.0), site(500.0), 2.0, 1)


def test_watts_that_add_up_to_the_budget_in_decimals_are_used() -> None:
    # 0.1 + 0.2 is a little more than 0.3 in binary.
    offers = [Offer("one", front((10, 0.1)), 0.0), Offer("two", front((10, 0.2)), 0.0)]
    for policy in (AllDevices(), Deadline(20.0), Deadline(20.0, utility="loss")):
        assert len(plan_round(offers, policy, site(0.3), 1.0, 1).assignments) == 2


def test_a_small_fleet_is_not_reported_as_a_low_budget() -> None:
    plan = plan_round([ORIN, NANO], FastestK(5), site(500.0), 1.0, 1)
    assert len(plan.assignments) == 2
    assert not any("the budget allows" in decision.reason for decision in plan.decisions)


def test_a_device_without_a_mode_within_its_own_limit_is_excluded() -> None:
    plan = plan_round([replace(NANO, limit_w=9.0), ORIN], AllDevices(), site(500.0), 1.0, 1)
    assert set(modes_of(plan)) == {"orin"}
    assert reason_of(plan, "nano") == "over its own limit of 9 W: its lowest-power mode needs 10.0 W"


def test_a_device_over_its_circuits_budget_is_excluded_and_not_counted() -> None:
    allowance = Allowance(tree(site=None, shed="site"), {"site": 500.0, "shed": 10.0})
    twins = [replace(ORIN, device_id="one"), replace(ORIN, device_id="two")]
    plan = plan_round([*twins, replace(XAVIER, supply="shed")], FastestK(), allowance, 1.0, 1)
    assert set(modes_of(plan)) == {"one"}
    assert reason_of(plan, "xavier") == (
        "over its supply's budget: its lowest-power mode needs 19.0 W above idle, shed has 4.0 W"
    )


def test_a_device_trains_within_its_own_limit() -> None:
    plan = plan_round([replace(ORIN, limit_w=30.0)], AllDevices(), site(500.0), 1.0, 1)
    assert modes_of(plan) == {"orin": (20, 30)}


def test_over_selection_adds_to_the_policys_number() -> None:
    offers = many(10)
    plan = plan_round(offers, FastestK(4), site(500.0), 1.0, 1, selection=Selection(over_selection=0.25))
    assert len(plan.assignments) == 5


@pytest.mark.parametrize("cannot", [{"limit_w": 1.0}, {"supply": "shed"}])
def test_the_only_trainable_device_does_not_back_off(cannot: dict[str, Any]) -> None:
    failing = history_of(*[{"orin": Participation(failed=True)}] * 3)
    allowance = Allowance(tree(site=None, shed="site"), {"site": 500.0, "shed": 3.0})
    plan = plan_round([ORIN, replace(NANO, **cannot)], AllDevices(), allowance, 1.0, 4, failing)
    assert set(modes_of(plan)) == {"orin"}


# --- Plan properties --------------------------------------------------------------------------------------------------
# Properties that hold for every round plan.


@examples(60)
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


@examples(30)
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


@examples(30)
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


@examples(30)
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


@examples(40)
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


@examples(40)
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


# --- Plan reasons -----------------------------------------------------------------------------------------------------
# The reasons in a round plan: each is true of its device.

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


@examples(60)
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


# --- Plan refusals ----------------------------------------------------------------------------------------------------
# Rounds that cannot be planned, and the errors that state what to change.


def test_a_round_without_devices_or_with_duplicates_is_refused() -> None:
    for offers in ([], [ORIN, NANO, ORIN]):
        with pytest.raises(InvalidInputError, match="1 or more devices, each listed once"):
            plan_round(offers, AllDevices(), site(50.0), 1.0, 1)


@pytest.mark.parametrize("epochs", [0.0, -1.0, math.nan, math.inf])
def test_epochs_must_be_above_zero(epochs: float) -> None:
    with pytest.raises(InvalidInputError, match="epochs above 0"):
        plan_round(THREE, AllDevices(), site(50.0), epochs, 1)


def test_a_device_behind_an_unknown_supply_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown supplies \(attic\): use site"):
        plan_round([ORIN, replace(NANO, supply="attic")], AllDevices(), site(50.0), 1.0, 1)


def test_a_budget_below_idle_power_is_refused_with_a_sufficient_one() -> None:
    with pytest.raises(
        InfeasibleBudgetError, match=r"13 W is not enough .* on top of 14\.0 W of idle .* least 21\.0 W"
    ):
        plan_round(THREE, AllDevices(), site(13.0), 1.0, 1)


def test_the_circuit_with_too_low_a_budget_is_named() -> None:
    allowance = Allowance(tree(house=None, shed="house"), {"house": 500.0, "shed": 10.0})
    offers = [replace(offer, supply="shed") for offer in THREE]
    with pytest.raises(InfeasibleBudgetError, match=r"^shed: 10 W is not enough .* allow at least 21\.0 W"):
        plan_round(offers, AllDevices(), allowance, 1.0, 1)


def test_a_round_without_candidates_states_each_devices_reason() -> None:
    with pytest.raises(NoCandidatesError, match=r"nano: excluded: matches id:nano; orin: over its own limit of 6 W"):
        plan_round(
            [NANO, replace(ORIN, limit_w=6.0)],
            AllDevices(),
            site(50.0),
            1.0,
            1,
            selection=Selection(exclude=("id:nano",)),
        )


# --- Allowance --------------------------------------------------------------------------------------------------------
# The watts that supplies allow, and which values are refused.

HOUSE = tree(house=None, shed="house", bench="shed", barn=None)
BUDGET_W = {"house": 100.0, "shed": 60.0, "bench": 20.0, "barn": 40.0}
FRONT = front((10, 20), (20, 10))
OFFERS = [
    Offer("a", FRONT, 1.0, "house"),
    Offer("b", FRONT, 2.0, "shed"),
    Offer("c", FRONT, 4.0, "bench"),
    Offer("d", FRONT, 8.0, "barn"),
]


def test_a_supply_counts_all_devices_below_it_at_any_level() -> None:
    allowance = Allowance(HOUSE, BUDGET_W, {"bench": 0.5, "barn": 0.25})
    assert allowance.idle_w(OFFERS) == {"house": 7.5, "shed": 6.5, "bench": 4.5, "barn": 8.25}
    assert allowance.use(OFFERS, {"c": 10.0, "a": 3.0}) == (
        SupplyUse("house", 100.0, 20.5),
        SupplyUse("shed", 60.0, 16.5),
        SupplyUse("bench", 20.0, 14.5),
        SupplyUse("barn", 40.0, 8.25),
    )
    assert allowance.headroom(OFFERS).spare_w == pytest.approx([92.5, 53.5, 15.5, 31.75])


def test_a_supply_is_exceeded_only_beyond_the_rounding_tolerance() -> None:
    allowance = Allowance(HOUSE, BUDGET_W)
    spare_w = dict(zip(HOUSE.names, allowance.headroom(OFFERS).spare_w, strict=True))
    assert allowance.exceeded(allowance.use(OFFERS, {"c": spare_w["bench"]})) == set()
    assert allowance.exceeded(allowance.use(OFFERS, {"c": spare_w["bench"] + 1e-6})) == {"bench"}
    assert allowance.exceeded(allowance.use(OFFERS, {"b": 93.0, "c": 16.5})) == {"house", "shed", "bench"}


def test_the_site_budget_is_the_sum_of_all_sites() -> None:
    assert Allowance(HOUSE, BUDGET_W).site_budget_w == 140.0
    assert Allowance.of_site(55.0, 5.0).site_budget_w == 55.0


@pytest.mark.parametrize("watts", [-5.0, math.nan, math.inf])
def test_an_invalid_budget_is_refused_with_its_supply(watts: float) -> None:
    with pytest.raises(InvalidInputError, match="supply 'shed' needs a budget of 0 or more finite watts"):
        Allowance(HOUSE, {**BUDGET_W, "shed": watts})
    with pytest.raises(InvalidInputError, match="supply 'site' needs"):
        Allowance.of_site(watts)


def test_supplies_and_budgets_must_match() -> None:
    with pytest.raises(InvalidInputError, match="supply 'barn' needs a budget"):
        Allowance(HOUSE, {name: watts for name, watts in BUDGET_W.items() if name != "barn"})
    with pytest.raises(InvalidInputError, match=r"given for unknown supplies \(attic\)"):
        Allowance(HOUSE, {**BUDGET_W, "attic": 5.0})
    with pytest.raises(InvalidInputError, match=r"given for unknown supplies \(attic\)"):
        Allowance(HOUSE, BUDGET_W, {"attic": 5.0})


@pytest.mark.parametrize("watts", [-0.1, math.nan, math.inf])
def test_watts_drawn_elsewhere_must_be_valid(watts: float) -> None:
    with pytest.raises(InvalidInputError, match="drawn elsewhere must be finite and 0 or more"):
        Allowance.of_site(50.0, watts)


@pytest.mark.parametrize("idle_w", [-0.1, math.nan, math.inf])
def test_invalid_idle_watts_are_refused_with_their_device(idle_w: float) -> None:
    with pytest.raises(InvalidInputError, match="^orin: idle watts"):
        Offer("orin", FRONT, idle_w)


@pytest.mark.parametrize("limit_w", [-1.0, math.nan, math.inf])
def test_a_limit_of_0_w_or_less_is_refused_with_its_device(limit_w: float) -> None:
    with pytest.raises(InvalidInputError, match="^orin: a device's limit must be above 0 W"):
        Offer("orin", FRONT, 1.0, limit_w=limit_w)
