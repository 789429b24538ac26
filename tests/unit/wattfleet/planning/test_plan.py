"""Whole round plans: what no plan may ever do, what its words have to say, and some worked out by hand."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.fakes.fleets import (
    WATTS_QUANTILE,
    Fleet,
    able,
    best,
    done_s,
    drawn_w,
    fleets,
    history_of,
    many,
    modes_within_limit,
    planned_w,
    tree,
)
from tests.fakes.fronts import front
from wattfleet.choosing import predicted_front
from wattfleet.errors import InfeasibleBudgetError, InvalidInputError, NoCandidatesError
from wattfleet.planning import Allowance, History, Offer, Part, RoundPlan, Selection, plan_round
from wattfleet.planning.policies import Deadline, Everyone, Fair, FastestK, Oort, Policy, Progress, RandomK, Tiers
from wattfleet.prediction import Prediction

sizes = st.none() | st.integers(1, 5)
seeds = st.integers(0, 9)
draws = st.builds(RandomK, sizes, seeds) | st.builds(Tiers, sizes, st.integers(1, 3), seeds) | st.builds(Oort, sizes)
policies = (
    st.builds(FastestK, sizes)
    | st.builds(Everyone)
    | st.builds(Fair, sizes, st.none() | st.floats(0, 1))
    | st.builds(Deadline, st.integers(1, 40).map(float), st.sampled_from(["equal", "loss"]))
    | st.builds(Progress, sizes, st.sampled_from([0.5, 3.0]), st.sampled_from([0.0, 10.0]))
    | draws
)
parts = st.builds(Part, st.booleans(), st.none() | st.integers(0, 500), st.none() | st.floats(0, 10))
histories = st.lists(
    st.dictionaries(st.sampled_from([f"device-{k}" for k in range(5)] + ["gone"]), parts, max_size=4), max_size=6
).map(lambda rounds: history_of(*rounds))


def plan_of(
    fleet: Fleet,
    policy: Policy,
    epochs: float = 1.0,
    history: History | None = None,
    selection: Selection | None = None,
) -> RoundPlan:
    server_round = len(history.rounds) + 1 if history else 1
    return plan_round(fleet.offers, policy, fleet.allowance, epochs, server_round, history, selection)


def points_of(plan: RoundPlan, fleet: Fleet) -> dict[str, int]:
    """The point of its front that each chosen device trains in."""
    by_id = {offer.device_id: offer.front for offer in fleet.offers}
    return {
        assignment.device_id: [
            by_id[assignment.device_id].mode(k) for k in range(len(by_id[assignment.device_id]))
        ].index(assignment.mode)
        for assignment in plan.assignments
    }


@settings(max_examples=60)
@given(fleets(power_log_sd=0.08), policies, histories, st.sampled_from([0.5, 1.0, 3.0]), st.floats(0, 1))
def test_no_plan_exceeds_any_budget_or_takes_a_device_twice_or_stays_silent_about_one(
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


WANTED_BECAUSE: Mapping[type[Policy], str] = {
    FastestK: r"the one that finishes soonest|one of the \d that together finish soonest",
    Everyone: r"the one that finishes soonest|one of the \d that together finish soonest",
    Fair: r"its turn: .*|(the one that finishes|one of the \d that together finish) soonest( beside the \d in turn)?",
    RandomK: "drawn",
    Tiers: r"drawn from tier \d, whose turn it is",
    Oort: "drawn to be explored|drawn from those of high utility",
    Progress: "among those that make the most progress per second",
    Deadline: r"among the most devices that can be done within \d+ s|the one that finishes soonest"
    r"|among those that there is the most to learn from within \d+ s",
}


@settings(max_examples=150)
@given(fleets(), policies, histories, st.sampled_from([0.5, 2.0]))
def test_every_reason_is_true(fleet: Fleet, policy: Policy, history: History, epochs: float) -> None:
    try:
        plan = plan_of(fleet, policy, epochs, history)
    except (InvalidInputError, NoCandidatesError):
        assume(False)
    points = points_of(plan, fleet)
    open_ = [offer for offer in able(fleet) if offer.device_id not in said_of(plan, "failed ")]
    by_id = {offer.device_id: offer for offer in fleet.offers}
    in_turn = said_of(plan, "its turn")
    chosen_w = {device_id: planned_w(by_id[device_id], k) - by_id[device_id].idle_w for device_id, k in points.items()}
    [short] = {decision.reason.partition(" (")[2] for decision in plan.decisions if decision.selected}
    wanted = int(short.rpartition(" ")[2].rstrip(")")) if short else len(points)
    assert not short or short == f"the watts carry {devices(len(points))}, not {wanted})" and len(points) < wanted
    if isinstance(policy, (Everyone, FastestK, Fair)):
        count = len(open_) if isinstance(policy, Everyone) else policy.count or (len(open_) + 1) // 2
        assert wanted == min(len(open_), count)
    if isinstance(policy, RandomK):
        assert len(open_) - len(said_of(plan, "not drawn")) == min(len(open_), policy.count or (len(open_) + 1) // 2)
    if isinstance(policy, Oort):
        assert said_of(plan, "drawn to be explored").isdisjoint(history.latest)
        assert said_of(plan, "drawn from those of high utility") <= set(history.latest)
    if isinstance(policy, Tiers):
        text = " ".join(decision.reason for decision in plan.decisions)
        assert len(set(re.findall(r"(?:from tier|it is tier) (\d)", text))) == 1
        assert not set(re.findall(r"in tier (\d); it is tier \1", text))
    for decision in plan.decisions:
        offer = by_id[decision.device_id]
        modes = modes_within_limit(offer)
        in_time = [k for k in modes if done_s(offer, k, epochs) <= plan.duration_s * (1 + 1e-12)]
        if decision.selected:
            because, _, carried = decision.reason.partition(": done within ")
            assert re.fullmatch(WANTED_BECAUSE[type(policy)], because), because
            if number := re.match(r"one of the (\d)", because):
                assert int(number[1]) == len(points) - len(in_turn)
            elif because.startswith("the one"):
                assert len(points) - len(in_turn) == 1
            said = [float(number) for number in re.findall(r"-?\d+\.\d", carried)]
            assert said == pytest.approx([plan.duration_s, chosen_w[offer.device_id]], abs=0.051)
        elif decision.reason.startswith("too slow") and plan.deadline_s is not None:
            assert all(done_s(offer, k, epochs) > plan.deadline_s for k in modes)
        elif decision.reason.startswith("too slow"):
            assert not in_time
        elif decision.reason.startswith("too hungry: done by the deadline"):
            assert plan.deadline_s is not None
            by_then = [k for k in modes if done_s(offer, k, epochs) <= plan.deadline_s]
            needed_w = min(planned_w(offer, k) for k in by_then) - offer.idle_w
            assert f"{needed_w:.1f} W above idling" in decision.reason
        elif decision.reason.startswith("too hungry"):
            assert_too_hungry(decision.reason, offer, in_time, fleet, points, in_turn)
        elif decision.reason.startswith("over its own limit"):
            assert not modes
        elif decision.reason.startswith("its supply cannot carry it"):
            assert offer not in open_
        elif decision.reason.startswith("not needed: all that were chosen are in their turn"):
            assert in_turn == set(points)
        else:
            aside = {
                RandomK: "not drawn",
                Tiers: r"not drawn from its tier|in tier \d; it is tier \d's turn",
                Oort: "not drawn, by its utility or to be explored",
                Progress: "others make more progress per second",
            }
            left_alone = r"failed \d times in a row: left out until round \d+"
            assert re.fullmatch(rf"{aside.get(type(policy), left_alone)}|{left_alone}", decision.reason)


def said_of(plan: RoundPlan, beginning: str) -> set[str]:
    """The devices whose reason begins like that."""
    return {decision.device_id for decision in plan.decisions if decision.reason.startswith(beginning)}


def devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def assert_too_hungry(
    reason: str, offer: Offer, in_time: Sequence[int], fleet: Fleet, points: Mapping[str, int], in_turn: set[str]
) -> None:
    """A device that is said to need too many watts does."""
    needed_w = min(planned_w(offer, k) for k in in_time) - offer.idle_w
    assert f"{needed_w:.1f} W above idling" in reason
    if held := re.search(r"which (\w+) cannot carry", reason):
        assert held[1] in fleet.allowance.supplies.path(offer.supply)
        assert drawn_w(fleet, points)[held[1]] + needed_w > fleet.allowance.budget_w[held[1]]
        return
    by_id = {each.device_id: each for each in fleet.offers}
    others_w = [planned_w(by_id[k], point) - by_id[k].idle_w for k, point in points.items() if k not in in_turn]
    assert needed_w >= max(others_w)
    assert reason.endswith(f" {max(others_w):.1f} W at most")


@settings(max_examples=30)
@given(fleets(), policies, histories, st.integers(0, 99))
def test_the_order_of_the_devices_does_not_matter_and_the_same_round_is_planned_the_same(
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
@given(fleets(), st.builds(FastestK, sizes) | st.builds(Everyone) | draws, histories, st.integers(0, 30))
def test_more_watts_never_cost_a_device_and_never_slow_the_same_number(
    fleet: Fleet, policy: Policy, history: History, more_w: int
) -> None:
    richer = fleet.with_watts(more_w)
    # A draw among more devices is another one, and whoever failed rests once there are others.
    assume(able(richer) == able(fleet) or (isinstance(policy, (FastestK, Everyone)) and not history.rounds))
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
    open_ = able(fleet)
    assume(open_)
    expected = best(fleet, min(len(open_), count or math.ceil(len(open_) / 2)), epochs=epochs)
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
def test_the_watts_that_a_refusal_names_are_enough_and_hardly_more_than_needed(
    tenths: list[tuple[int, int]], power_log_sd: float
) -> None:
    offers = [
        Offer(f"device-{k}", front((10, training / 10), power_log_sd=power_log_sd), idle / 10)
        for k, (training, idle) in enumerate(tenths)
    ]
    with pytest.raises(InfeasibleBudgetError, match="allow at least") as refusal:
        plan_round(offers, FastestK(1), Allowance.of_site(0.5), 1.0, 1)
    least_w = float(re.findall(r"at least ([\d.]+) W", str(refusal.value))[0])
    assert len(plan_round(offers, FastestK(1), Allowance.of_site(least_w), 1.0, 1).assignments) == 1
    with pytest.raises(InfeasibleBudgetError):
        plan_round(offers, FastestK(1), Allowance.of_site(least_w - 0.11), 1.0, 1)


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


# --- by hand ------------------------------------------------------------------------------------------------------

ORIN = Offer("orin", front((10, 50), (20, 30), (40, 20)), 5.0)
NANO = Offer("nano", front((35, 15), (60, 10)), 3.0)
XAVIER = Offer("xavier", front((25, 40), (45, 25)), 6.0)
THREE = [ORIN, NANO, XAVIER]


def site(watts: float) -> Allowance:
    return Allowance.of_site(watts)


def modes_of(plan: RoundPlan) -> dict[str, tuple[float, float]]:
    return {assignment.device_id: (assignment.epoch_s, assignment.power_w) for assignment in plan.assignments}


def reason_of(plan: RoundPlan, device_id: str) -> str:
    return next(decision.reason for decision in plan.decisions if decision.device_id == device_id)


def test_whoever_waits_for_the_slowest_trains_in_a_thriftier_mode() -> None:
    # Beside 14 W of idling, 35 s cost the Orin 25 W more and the Nano 12 W; at 25 s only the Xavier keeps up.
    plan = plan_round(THREE, FastestK(2), site(51.0), 1.0, 1)
    assert modes_of(plan) == {"nano": (35, 15), "orin": (20, 30)}
    assert (plan.duration_s, plan.planned_w, plan.deadline_s) == (35, 51, None)
    assert reason_of(plan, "xavier") == (
        "too hungry: 35.0 s would take it 34.0 W above idling, which site cannot carry beside the others"
    )


def test_less_watts_take_a_longer_round() -> None:
    # A watt less, and the Orin has to wait for its 40 s mode; the Nano then needs no more than its 35 s one.
    assert modes_of(plan_round(THREE, FastestK(2), site(50.0), 1.0, 1)) == {"nano": (35, 15), "orin": (40, 20)}


def test_whoever_is_not_needed_is_told_what_the_chosen_ones_need() -> None:
    plan = plan_round(THREE, FastestK(2), site(500.0), 1.0, 1)
    assert modes_of(plan) == {"orin": (20, 30), "xavier": (25, 40)}
    assert reason_of(plan, "nano") == "too slow: 35.0 s in its fastest mode, the round lasts 25.0 s"
    plan = plan_round([ORIN, replace(ORIN, device_id="twin", idle_w=1.0)], FastestK(1), site(500.0), 1.0, 1)
    assert reason_of(plan, "twin") == (
        "too hungry: 10.0 s would take it 49.0 W above idling, the chosen ones need 45.0 W at most"
    )


def test_watts_for_fewer_devices_than_wanted_are_said() -> None:
    # All three idle at 14 W; their thriftiest modes cost 7, 15 and 19 W more.
    plan = plan_round(THREE, Everyone(), site(54.0), 1.0, 1)
    assert set(modes_of(plan)) == {"nano", "orin"}
    assert plan.decisions[0].reason.endswith("(the watts carry 2 devices, not 3)")
    assert len(plan_round(THREE, Everyone(), site(55.0), 1.0, 1).assignments) == 3


def test_a_circuit_bounds_its_own_devices_only() -> None:
    # The Orin and the Xavier share a circuit that idles at 11 W and carries one of them; the Nano hangs elsewhere.
    supplies = tree(house=None, shed="house", roof="house")
    offers = [replace(ORIN, supply="shed"), replace(XAVIER, supply="shed"), replace(NANO, supply="roof")]
    allowance = Allowance(supplies, {"house": 500.0, "shed": 36.0, "roof": 500.0})
    plan = plan_round(offers, Everyone(), allowance, 1.0, 1)
    assert modes_of(plan) == {"nano": (35, 15), "orin": (20, 30)}
    assert [(use.supply, use.planned_w) for use in plan.supplies] == [("house", 51), ("shed", 36), ("roof", 15)]
    assert reason_of(plan, "xavier") == (
        "too hungry: 35.0 s would take it 34.0 W above idling, which shed cannot carry beside the others"
    )


def test_a_device_that_idles_dearer_than_it_trains_makes_no_room_for_another() -> None:
    # It may be done early, and then parks and idles while the others still train.
    odd = Offer("odd", front((10, 6)), 9.0)
    other = Offer("other", front((10, 20)), 1.0)
    plan = plan_round([odd, other], Everyone(), site(29.0), 1.0, 1)
    assert (set(modes_of(plan)), plan.planned_w) == ({"odd", "other"}, 29)
    assert set(modes_of(plan_round([odd, other], Everyone(), site(28.9), 1.0, 1))) == {"odd"}


def test_what_a_device_may_draw_is_set_aside_not_its_median() -> None:
    unsure = Offer("unsure", front((10, 50), power_log_sd=0.1), 5.0)
    needed_w = 50 * math.exp(0.1 * WATTS_QUANTILE)
    assert needed_w > 58
    with pytest.raises(InfeasibleBudgetError):
        plan_round([unsure], FastestK(1), site(58.0), 1.0, 1)
    [assignment] = plan_round([unsure], FastestK(1), site(59.0), 1.0, 1).assignments
    assert (assignment.power_w, assignment.power_limit_w) == (50, pytest.approx(needed_w))


def test_a_round_lasts_as_long_as_its_devices_may_take_not_their_median() -> None:
    unsure = Offer("unsure", front((10, 20), epoch_log_sd=0.5), 1.0)
    sure = Offer("sure", front((15, 20)), 1.0)
    plan = plan_round([unsure, sure], FastestK(1), site(500.0), 2.0, 1)
    assert (modes_of(plan), plan.duration_s) == ({"sure": (15, 20)}, 30)
    plan = plan_round([unsure], FastestK(1), site(500.0), 2.0, 1)
    assert plan.duration_s == pytest.approx(20 * math.exp(0.5 * 1.2815515655446004))


def test_a_thriftier_mode_that_is_surely_done_before_a_faster_uncertain_one_is_taken() -> None:
    either = Offer("either", front((10, 40), (12, 20), epoch_log_sd=[0.5, 0.0]), 1.0)
    assert modes_of(plan_round([either], FastestK(1), site(500.0), 1.0, 1)) == {"either": (12, 20)}


def test_a_short_training_has_a_high_cpu_clock_and_a_long_one_a_thrifty_mode() -> None:
    # At the low clock a first minibatch takes 17 s, at the high one 3.5 s; minibatches are nearly as fast.
    modes = np.array([[4, 2_000_000, 6e8, 2e9], [4, 400_000, 6e8, 2e9]])
    prediction = Prediction(np.array([100.0, 110.0]), np.array([20_000.0, 12_000.0]), np.zeros(2), np.zeros(2))
    offer = Offer("board", predicted_front(modes, prediction, 100, first_gcycles=7.0), 2.0)
    rival = Offer("rival", front((30, 10)), 2.0)

    def clock(epochs: float) -> int:
        plan = plan_round([offer, rival], Everyone(), site(500.0), epochs, 1)
        return {assignment.device_id: assignment.mode.cpu_khz for assignment in plan.assignments}["board"]

    assert [clock(epochs) for epochs in (0.5, 10.0)] == [2_000_000, 400_000]


def test_the_seconds_in_a_plans_words_and_its_duration_hold_the_start() -> None:
    quick, late = Offer("quick", front((10, 20), warmup_s=5), 1.0), Offer("late", front((30, 20), warmup_s=7), 1.0)
    plan = plan_round([quick, late], FastestK(1), site(500.0), 2.0, 1)
    assert plan.duration_s == 5 + 2 * 10
    [assignment] = plan.assignments
    assert (assignment.warmup_s, assignment.epoch_s) == (5, 10)
    assert reason_of(plan, "quick").endswith("done within 25.0 s for 19.0 W above idling")
    assert reason_of(plan, "late") == "too slow: 67.0 s in its fastest mode, the round lasts 25.0 s"
    with pytest.raises(InfeasibleBudgetError, match="within 24 s: allow at least 25 s"):
        plan_round([quick, late], Deadline(24.0), site(500.0), 2.0, 1)


def test_watts_that_add_up_to_the_budget_in_decimals_are_used() -> None:
    # 0.1 + 0.2 is a little more than 0.3 in binary.
    offers = [Offer("one", front((10, 0.1)), 0.0), Offer("two", front((10, 0.2)), 0.0)]
    for policy in (Everyone(), Deadline(20.0), Deadline(20.0, utility="loss")):
        assert len(plan_round(offers, policy, site(0.3), 1.0, 1).assignments) == 2


def test_a_fleet_smaller_than_wanted_is_not_blamed_on_the_watts() -> None:
    plan = plan_round([ORIN, NANO], FastestK(5), site(500.0), 1.0, 1)
    assert len(plan.assignments) == 2
    assert not any("the watts carry" in decision.reason for decision in plan.decisions)


def test_a_device_without_a_mode_within_its_own_limit_is_left_out_with_that_reason() -> None:
    plan = plan_round([replace(NANO, limit_w=9.0), ORIN], Everyone(), site(500.0), 1.0, 1)
    assert set(modes_of(plan)) == {"orin"}
    assert reason_of(plan, "nano") == "over its own limit of 9 W: its thriftiest mode takes 10.0 W"


def test_a_device_that_its_circuit_cannot_carry_is_left_out_with_that_reason_and_makes_no_half_larger() -> None:
    allowance = Allowance(tree(site=None, shed="site"), {"site": 500.0, "shed": 10.0})
    twins = [replace(ORIN, device_id="one"), replace(ORIN, device_id="two")]
    plan = plan_round([*twins, replace(XAVIER, supply="shed")], FastestK(), allowance, 1.0, 1)
    assert set(modes_of(plan)) == {"one"}
    assert reason_of(plan, "xavier") == (
        "its supply cannot carry it: its thriftiest mode takes 19.0 W above idling, shed can give it 4.0 W"
    )


def test_a_device_trains_within_its_own_limit() -> None:
    plan = plan_round([replace(ORIN, limit_w=30.0)], Everyone(), site(500.0), 1.0, 1)
    assert modes_of(plan) == {"orin": (20, 30)}


# --- what cannot be planned ---------------------------------------------------------------------------------------


def test_a_round_of_no_devices_or_of_one_twice_is_refused() -> None:
    for offers in ([], [ORIN, NANO, ORIN]):
        with pytest.raises(InvalidInputError, match="one or more devices, each once"):
            plan_round(offers, Everyone(), site(50.0), 1.0, 1)


@pytest.mark.parametrize("epochs", [0.0, -1.0, math.nan, math.inf])
def test_epochs_must_be_above_zero(epochs: float) -> None:
    with pytest.raises(InvalidInputError, match="epochs above zero"):
        plan_round(THREE, Everyone(), site(50.0), epochs, 1)


def test_a_device_behind_an_unknown_supply_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="hang behind attic, known are site"):
        plan_round([ORIN, replace(NANO, supply="attic")], Everyone(), site(50.0), 1.0, 1)


def test_a_budget_below_idling_is_refused_with_what_would_do() -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"13 W cannot carry .* beside 14\.0 W of idling.* least 21\.0 W"):
        plan_round(THREE, Everyone(), site(13.0), 1.0, 1)


def test_the_circuit_that_carries_nobody_is_named() -> None:
    allowance = Allowance(tree(house=None, shed="house"), {"house": 500.0, "shed": 10.0})
    offers = [replace(offer, supply="shed") for offer in THREE]
    with pytest.raises(InfeasibleBudgetError, match=r"^shed: 10 W cannot carry .* allow at least 21\.0 W"):
        plan_round(offers, Everyone(), allowance, 1.0, 1)


def test_a_round_whose_every_device_is_left_out_says_why_for_each() -> None:
    with pytest.raises(NoCandidatesError, match=r"nano: excluded as id:nano; orin: over its own limit of 6 W"):
        plan_round(
            [NANO, replace(ORIN, limit_w=6.0)],
            Everyone(),
            site(50.0),
            1.0,
            1,
            selection=Selection(exclude=("id:nano",)),
        )


# --- failures -----------------------------------------------------------------------------------------------------


def test_over_selection_takes_more_than_the_policy_wants() -> None:
    offers = many(10)
    plan = plan_round(offers, FastestK(4), site(500.0), 1.0, 1, selection=Selection(over_selection=0.25))
    assert len(plan.assignments) == 5


@pytest.mark.parametrize("cannot", [{"limit_w": 1.0}, {"supply": "shed"}])
def test_the_only_device_that_can_train_does_not_rest_beside_one_that_cannot(cannot: dict[str, Any]) -> None:
    failing = history_of(*[{"orin": Part(failed=True)}] * 3)
    allowance = Allowance(tree(site=None, shed="site"), {"site": 500.0, "shed": 3.0})
    plan = plan_round([ORIN, replace(NANO, **cannot)], Everyone(), allowance, 1.0, 4, failing)
    assert set(modes_of(plan)) == {"orin"}
