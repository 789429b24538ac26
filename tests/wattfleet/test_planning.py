"""Round plans, against all sets of devices with all their modes, and against what a plan must never do."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from statistics import NormalDist

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.fronts import front, fronts
from wattfleet.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.front import Front
from wattfleet.planning.offers import Offer
from wattfleet.planning.plan import plan_round
from wattfleet.planning.policies.fastest_k import Everyone, FastestK
from wattfleet.planning.policies.policy import Policy
from wattfleet.planning.policies.random_k import RandomK
from wattfleet.planning.policies.registry import POLICIES, policy
from wattfleet.planning.round_plan import Assignment, RoundPlan

QUANTILE_95 = NormalDist().inv_cdf(0.95)


@st.composite
def fleets(draw: st.DrawFn, most: int = 4) -> list[Offer]:
    """Devices of whole watts and seconds; an idling one may draw more than a training one does."""
    return [
        Offer(f"device-{k}", draw(fronts()), float(draw(st.integers(0, 6)))) for k in range(draw(st.integers(1, most)))
    ]


budgets = st.integers(1, 70).map(float)
epochs = st.sampled_from([0.5, 1.0, 2.0])
sizes = st.none() | st.integers(1, 5)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    return draw(st.builds(FastestK, sizes) | st.builds(Everyone) | st.builds(RandomK, sizes, st.integers(0, 9)))


def planned_w(training: Front, point: int) -> float:
    """What a plan sets aside for a point, computed anew from the prediction."""
    return float(training.power_w[point] * math.exp(QUANTILE_95 * training.power_log_sd[point]))


def every_plan(offers: Sequence[Offer]) -> Iterator[tuple[int, float, float]]:
    """Number of devices, seconds of the slowest one, and watts of the site: all sets in all their modes."""
    for points in itertools.product(*([None, *range(len(offer.front))] for offer in offers)):
        training = [(offer, k) for offer, k in zip(offers, points, strict=True) if k is not None]
        if training:
            idle = [offer.idle_w for offer, k in zip(offers, points, strict=True) if k is None]
            yield (
                len(training),
                max(float(offer.front.epoch_s[k]) for offer, k in training),
                sum(planned_w(offer.front, k) for offer, k in training) + sum(idle),
            )


def best(offers: Sequence[Offer], wanted: int, budget_w: float) -> tuple[int, float] | None:
    """As many of the wanted devices as the watts carry, and the least time in which they can be done."""
    possible = [(-count, slowest_s) for count, slowest_s, watts in every_plan(offers) if watts <= budget_w]
    possible = [(count, slowest_s) for count, slowest_s in possible if -count <= wanted]
    return (-min(possible)[0], min(possible)[1]) if possible else None


def points_of(plan: RoundPlan, offers: Sequence[Offer]) -> list[tuple[Offer, int, Assignment]]:
    """Each assignment with the device's offer and the point of its front that the mode is."""
    by_id = {offer.device_id: offer for offer in offers}
    found = []
    for assignment in plan.assignments:
        offer = by_id[assignment.device_id]
        modes = [offer.front.mode(k) for k in range(len(offer.front))]
        found.append((offer, modes.index(assignment.mode), assignment))
    return found


@given(fleets(), sizes, budgets, epochs)
def test_fastest_k_is_the_best_of_all_plans(
    offers: list[Offer], count: int | None, budget_w: float, epochs: float
) -> None:
    expected = best(offers, count or math.ceil(len(offers) / 2), budget_w)
    if expected is None:
        with pytest.raises(InfeasibleBudgetError):
            plan_round(offers, FastestK(count), budget_w, epochs, 1)
        return
    plan = plan_round(offers, FastestK(count), budget_w, epochs, 1)
    assert (len(plan.assignments), plan.duration_s) == (expected[0], epochs * expected[1])


@given(fleets(), budgets)
def test_all_takes_as_many_as_the_watts_carry_and_is_the_best_of_those_plans(
    offers: list[Offer], budget_w: float
) -> None:
    expected = best(offers, len(offers), budget_w)
    assume(expected is not None)
    plan = plan_round(offers, Everyone(), budget_w, 1.0, 1)
    assert (len(plan.assignments), plan.duration_s) == expected


@given(
    st.lists(st.tuples(fronts(power_log_sd=0.08), st.floats(0, 6)), min_size=1, max_size=6),
    st.floats(1, 100),
    policies(),
    st.integers(1, 20),
)
def test_a_plan_never_exceeds_the_watts_and_says_what_its_modes_are_predicted_to_need(
    devices: list[tuple[Front, float]], budget_w: float, chosen_policy: Policy, server_round: int
) -> None:
    offers = [Offer(f"device-{k}", training, idle_w) for k, (training, idle_w) in enumerate(devices)]
    try:
        plan = plan_round(offers, chosen_policy, budget_w, 2.0, server_round)
    except InfeasibleBudgetError:
        assume(False)
    chosen = points_of(plan, offers)
    ids = [assignment.device_id for assignment in plan.assignments]
    assert ids == sorted(set(ids))
    for offer, k, assignment in chosen:
        assert assignment.epoch_s == offer.front.epoch_s[k]
        assert assignment.power_w == offer.front.power_w[k]
        assert assignment.power_limit_w == pytest.approx(planned_w(offer.front, k))
    idle_w = sum(offer.idle_w for offer in offers if offer.device_id not in ids)
    needed_w = sum(planned_w(offer.front, k) for offer, k, _ in chosen) + idle_w
    assert plan.planned_w == pytest.approx(needed_w)
    assert needed_w <= budget_w * (1 + 1e-12)
    assert plan.site_budget_w == budget_w
    assert plan.duration_s == 2.0 * max(assignment.epoch_s for assignment in plan.assignments)


@given(fleets(), policies(), budgets, epochs)
def test_every_device_gets_a_reason_and_every_reason_is_true(
    offers: list[Offer], chosen_policy: Policy, budget_w: float, epochs: float
) -> None:
    try:
        plan = plan_round(offers, chosen_policy, budget_w, epochs, 1)
    except InfeasibleBudgetError:
        assume(False)
    chosen = {offer.device_id: planned_w(offer.front, k) - offer.idle_w for offer, k, _ in points_of(plan, offers)}
    candidates, wanted = chosen_policy.candidates(offers, 1)
    wanted = min(wanted, len(candidates))
    assert [decision.device_id for decision in plan.decisions] == sorted(offer.device_id for offer in offers)
    assert {decision.device_id for decision in plan.decisions if decision.selected} == set(chosen)
    for decision, offer in zip(plan.decisions, sorted(offers, key=lambda offer: offer.device_id), strict=True):
        said = [float(number) for number in re.findall(r"-?\d+\.\d", decision.reason)]
        quickest_s = epochs * float(offer.front.epoch_s[0])
        in_time = [k for k in range(len(offer.front)) if epochs * offer.front.epoch_s[k] <= plan.duration_s]
        if decision.selected:
            assert said == [plan.duration_s, chosen[offer.device_id]]
            assert f"one of the {len(chosen)} " in decision.reason
            assert ("the watts carry" in decision.reason) == (len(chosen) < wanted)
            if len(chosen) < wanted:
                assert f"the watts carry {len(chosen)} devices, not {wanted}" in decision.reason
        elif decision.reason == "not drawn":
            assert offer not in candidates
        elif decision.reason.startswith("too slow"):
            assert quickest_s > plan.duration_s
            assert said == [quickest_s, plan.duration_s]
        else:
            assert decision.reason.startswith("too hungry")
            thriftiest_w = min(planned_w(offer.front, k) for k in in_time) - offer.idle_w
            assert thriftiest_w >= max(chosen.values())
            assert said == [plan.duration_s, thriftiest_w, max(chosen.values())]


@given(fleets(), policies(), budgets, st.randoms(use_true_random=False))
def test_the_order_of_the_devices_does_not_matter(
    offers: list[Offer], chosen_policy: Policy, budget_w: float, shuffler: object
) -> None:
    shuffled = list(offers)
    shuffler.shuffle(shuffled)  # type: ignore[attr-defined]
    try:
        plan = plan_round(offers, chosen_policy, budget_w, 1.0, 4)
    except InfeasibleBudgetError as refusal:
        with pytest.raises(InfeasibleBudgetError, match=re.escape(str(refusal))):
            plan_round(shuffled, chosen_policy, budget_w, 1.0, 4)
    else:
        assert plan_round(shuffled, chosen_policy, budget_w, 1.0, 4) == plan


@given(fleets(), policies(), budgets, st.integers(0, 40))
def test_more_watts_never_cost_a_device_and_never_slow_the_same_number(
    offers: list[Offer], chosen_policy: Policy, budget_w: float, more_w: int
) -> None:
    try:
        poor = plan_round(offers, chosen_policy, budget_w, 1.0, 1)
    except InfeasibleBudgetError:
        assume(False)
    rich = plan_round(offers, chosen_policy, budget_w + more_w, 1.0, 1)
    assert len(rich.assignments) >= len(poor.assignments)
    if len(rich.assignments) == len(poor.assignments):
        assert rich.duration_s <= poor.duration_s


@given(
    st.lists(st.tuples(fronts(power_log_sd=0.07), st.floats(0, 2.9)), min_size=1, max_size=5),
    policies(),
    st.floats(0.01, 1),
)
def test_the_watts_that_a_refusal_names_are_enough_and_hardly_more_than_needed(
    devices: list[tuple[Front, float]], chosen_policy: Policy, share: float
) -> None:
    offers = [Offer(f"device-{k}", training, idle_w) for k, (training, idle_w) in enumerate(devices)]
    with pytest.raises(InfeasibleBudgetError, match="allow at least") as refusal:
        # Less than any of them trains on.
        plan_round(offers, chosen_policy, share * 2.9, 1.0, 1)
    least_w = float(re.findall(r"at least ([\d.]+) W", str(refusal.value))[0])
    assert len(plan_round(offers, chosen_policy, least_w, 1.0, 1).assignments) >= 1
    with pytest.raises(InfeasibleBudgetError):
        plan_round(offers, chosen_policy, least_w - 0.11, 1.0, 1)


@given(fleets(), policies(), st.integers(1, 40).map(float), st.integers(0, 12).map(float))
def test_watts_that_idle_elsewhere_are_watts_less(
    offers: list[Offer], chosen_policy: Policy, rest_w: float, elsewhere_w: float
) -> None:
    try:
        alone = plan_round(offers, chosen_policy, rest_w, 1.0, 1)
    except InfeasibleBudgetError:
        with pytest.raises(InfeasibleBudgetError) as refusal:
            plan_round(offers, chosen_policy, rest_w + elsewhere_w, 1.0, 1, elsewhere_w)
        least_w = float(re.findall(r"at least ([\d.]+) W", str(refusal.value))[0])
        assert plan_round(offers, chosen_policy, least_w, 1.0, 1, elsewhere_w).planned_w <= least_w
    else:
        beside = plan_round(offers, chosen_policy, rest_w + elsewhere_w, 1.0, 1, elsewhere_w)
        assert (beside.assignments, beside.decisions) == (alone.assignments, alone.decisions)
        assert beside.planned_w == alone.planned_w + elsewhere_w
        assert beside.site_budget_w == rest_w + elsewhere_w


# --- by hand ------------------------------------------------------------------------------------------------------

ORIN = Offer("orin", front((10, 50), (20, 30), (40, 20)), 5.0)
NANO = Offer("nano", front((35, 15), (60, 10)), 3.0)
XAVIER = Offer("xavier", front((25, 40), (45, 25)), 6.0)
THREE = [ORIN, NANO, XAVIER]


def modes_of(plan: RoundPlan) -> dict[str, tuple[float, float]]:
    return {assignment.device_id: (assignment.epoch_s, assignment.power_w) for assignment in plan.assignments}


def test_whoever_waits_for_the_slowest_trains_in_a_thriftier_mode() -> None:
    # Beside 14 W of idling, 35 s cost the Orin 25 W more and the Nano 12 W; at 25 s only the Xavier keeps up.
    plan = plan_round(THREE, FastestK(2), 51.0, 1.0, 1)
    assert modes_of(plan) == {"nano": (35, 15), "orin": (20, 30)}
    assert (plan.duration_s, plan.planned_w) == (35, 51)
    assert [(d.device_id, d.selected) for d in plan.decisions] == [("nano", True), ("orin", True), ("xavier", False)]
    assert plan.decisions[2].reason == (
        "too hungry: 35.0 s would take it 34.0 W above idling, the chosen ones need 25.0 W at most"
    )


def test_less_watts_take_a_longer_round() -> None:
    # A watt less, and the Orin has to wait for its 40 s mode; the Nano then needs no more than its 35 s one.
    assert modes_of(plan_round(THREE, FastestK(2), 50.0, 1.0, 1)) == {"nano": (35, 15), "orin": (40, 20)}


def test_watts_for_fewer_devices_than_wanted_are_said() -> None:
    # All three idle at 14 W; their thriftiest modes cost 7, 15 and 19 W more.
    plan = plan_round(THREE, Everyone(), 54.0, 1.0, 1)
    assert set(modes_of(plan)) == {"nano", "orin"}
    assert plan.decisions[0].reason.endswith("(the watts carry 2 devices, not 3)")
    assert len(plan_round(THREE, Everyone(), 55.0, 1.0, 1).assignments) == 3


def test_a_device_that_idles_dearer_than_it_trains_makes_room_for_another() -> None:
    odd = Offer("odd", front((10, 6)), 9.0)
    other = Offer("other", front((10, 20)), 1.0)
    plan = plan_round([odd, other], Everyone(), 26.0, 1.0, 1)
    assert (set(modes_of(plan)), plan.planned_w) == ({"odd", "other"}, 26)


def test_two_such_devices_may_fit_where_one_does_not() -> None:
    # Idle they take 18 W, one training and one idling 15 W, both training 12 W.
    odd = [Offer(name, front((10, 6)), 9.0) for name in ("one", "two")]
    assert plan_round(odd, Everyone(), 14.0, 1.0, 1).planned_w == 12


def test_what_a_device_may_draw_is_set_aside_not_its_median() -> None:
    unsure = Offer("unsure", front((10, 50), power_log_sd=0.1), 5.0)
    needed_w = 50 * math.exp(0.1 * QUANTILE_95)
    assert needed_w > 58
    with pytest.raises(InfeasibleBudgetError):
        plan_round([unsure], FastestK(1), 58.0, 1.0, 1)
    [assignment] = plan_round([unsure], FastestK(1), 59.0, 1.0, 1).assignments
    assert (assignment.power_w, assignment.power_limit_w) == (50, pytest.approx(needed_w))


def test_a_fleet_smaller_than_wanted_is_not_blamed_on_the_watts() -> None:
    plan = plan_round([ORIN, NANO], FastestK(5), 500.0, 1.0, 1)
    assert len(plan.assignments) == 2
    assert not any("the watts carry" in decision.reason for decision in plan.decisions)


# --- policies -----------------------------------------------------------------------------------------------------

MANY = [Offer(f"device-{k:02}", front((10 + k, 30), (20 + k, 20)), 2.0) for k in range(12)]


def drawn(seed: int, server_round: int, budget_w: float = 1_000.0) -> set[str]:
    return {
        assignment.device_id
        for assignment in plan_round(MANY, RandomK(5, seed), budget_w, 1.0, server_round).assignments
    }


def test_a_random_draw_is_the_same_for_the_same_seed_and_round_only() -> None:
    rounds = [drawn(seed=1, server_round=number) for number in range(1, 30)]
    assert rounds == [drawn(seed=1, server_round=number) for number in range(1, 30)]
    assert all(len(devices) == 5 for devices in rounds)
    assert len({frozenset(devices) for devices in rounds}) > 20
    assert set().union(*rounds) == {offer.device_id for offer in MANY}
    assert rounds != [drawn(seed=2, server_round=number) for number in range(1, 30)]


def test_a_random_draw_takes_the_slow_as_often_as_the_fast() -> None:
    taken = [device for number in range(400) for device in drawn(seed=7, server_round=number)]
    for offer in MANY:  # 400 draws of 5 in 12: 167 expected, standard deviation 10
        assert 120 < taken.count(offer.device_id) < 214


def test_a_random_draw_holds_the_watts() -> None:
    # 24 W idle and 18 W more a device: 70 W carry two of the five.
    plan = plan_round(MANY, RandomK(5, 1), 70.0, 1.0, 3)
    assert len(plan.assignments) == 2
    assert plan.planned_w <= 70
    assert {assignment.device_id for assignment in plan.assignments} <= drawn(1, 3)
    assert [decision.reason for decision in plan.decisions].count("not drawn") == 7


@pytest.mark.parametrize(("devices", "half"), [(1, 1), (2, 1), (5, 3), (12, 6)])
@pytest.mark.parametrize("name", ["fastest-k", "random"])
def test_half_the_fleet_is_taken_where_no_number_is_given(name: str, devices: int, half: int) -> None:
    assert len(plan_round(MANY[:devices], policy(name), 1_000.0, 1.0, 1).assignments) == half


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_found_by_the_name_they_show(name: str) -> None:
    assert policy(name).name == name


def test_a_policy_takes_the_number_and_the_seed() -> None:
    assert policy("fastest-k", 3) == FastestK(3)
    assert policy("random", 3, 8) == RandomK(3, 8)


@pytest.mark.parametrize(("name", "count"), [("fastest-k", 0), ("random", -1), ("all", 2)])
def test_a_number_of_devices_that_a_policy_cannot_take_is_refused(name: str, count: int) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}.*{count} devices"):
        policy(name, count)


@pytest.mark.parametrize("count", [None, 2])
def test_an_unknown_policy_is_refused_with_those_there_are(count: int | None) -> None:
    with pytest.raises(InvalidInputError, match="unknown policy 'oort': choose one of fastest-k, all, random"):
        policy("oort", count)


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("idle_w", [-0.1, math.nan, math.inf])
def test_idle_watts_that_are_no_watts_are_refused_by_device(idle_w: float) -> None:
    with pytest.raises(InvalidInputError, match="^orin: idle watts"):
        Offer("orin", ORIN.front, idle_w)


def test_a_round_of_no_devices_or_of_one_twice_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="one or more devices, each once"):
        plan_round([], Everyone(), 50.0, 1.0, 1)
    with pytest.raises(InvalidInputError, match="one or more devices, each once"):
        plan_round([ORIN, NANO, ORIN], Everyone(), 50.0, 1.0, 1)


@pytest.mark.parametrize(
    ("budget_w", "epochs"), [(0.0, 1.0), (-5.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (50.0, 0.0), (50.0, math.nan)]
)
def test_watts_and_epochs_must_be_above_zero(budget_w: float, epochs: float) -> None:
    with pytest.raises(InvalidInputError, match="watts and epochs above zero") as refusal:
        plan_round(THREE, Everyone(), budget_w, epochs, 1)
    assert not isinstance(refusal.value, InfeasibleBudgetError)
