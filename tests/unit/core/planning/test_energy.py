"""Plans of runs with an energy budget: they keep to it, spend it, and spend it where it brings progress."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.fleets import Fleet, fleet_on_racks, fleets, front, history_of, plan_of, reason_of, site
from tests.fakes.short_forms import first
from wattfleet.core.errors import EnergySpentError, InfeasibleBudgetError, InvalidInputError, NoCandidatesError
from wattfleet.core.planning import (
    EnergyLimit,
    EpochChoice,
    History,
    Offer,
    Participation,
    RoundPlan,
    plan_round,
)
from wattfleet.core.planning.policies import AllDevices, Deadline, FastestK, Policy, Progress

Z_WATTS, Z_SECONDS = NormalDist().inv_cdf(0.95), NormalDist().inv_cdf(0.95)


def most_j(offer: Offer, point: int, epochs: float = 1.0) -> float:
    """The joules above idle of a training at the 95 % quantiles of its power and its time."""
    front = offer.front
    watts = front.power_w[point] * math.exp(Z_WATTS * front.power_log_sd[point])
    seconds = front.warmup_s[point] + epochs * front.epoch_s[point] * math.exp(Z_SECONDS * front.epoch_log_sd[point])
    return max(0.0, float(watts) - offer.idle_w) * float(seconds)


def planned(
    fleet: Fleet, policy: Policy, left_j: float, rounds_left: int = 0, number: int = 1, history: History | None = None
) -> RoundPlan:
    """A plan within an energy budget."""
    energy = EnergyLimit(left_j, rounds_left)
    return plan_round(fleet.offers, policy, fleet.allowance, 1.0, number, history, None, energy)


def point_of(offer: Offer, plan: RoundPlan) -> int:
    """The point of a device's front that a plan has assigned."""
    assigned = plan.assignment_of(offer.device_id)
    assert assigned is not None
    [[point]] = (offer.front.modes == np.array(assigned.mode)).all(axis=1).nonzero()
    return int(point)


POLICIES = (AllDevices(), FastestK(2), Progress(overhead_s=0.0), Progress(count=2))


@given(fleets(power_log_sd=0.1), st.floats(1.0, 3_000.0), st.integers(0, 5), st.sampled_from(POLICIES))
def test_a_round_sets_its_95_percent_aside_and_never_more_than_is_left(
    fleet: Fleet, left_j: float, rounds_left: int, policy: Policy
) -> None:
    try:
        plan = planned(fleet, policy, left_j, rounds_left)
    except (EnergySpentError, InfeasibleBudgetError, NoCandidatesError):
        return
    assert plan.set_aside_j is not None and plan.set_aside_j <= left_j
    for offer in fleet.offers:
        if (assigned := plan.assignment_of(offer.device_id)) is not None:
            assert assigned.set_aside_j >= most_j(offer, point_of(offer, plan)) - 1e-6
            assert assigned.longest_s is not None and assigned.idle_w == offer.idle_w
    assert all(each.planned_w <= each.budget_w * (1 + 1e-9) for each in plan.supplies)


@given(fleets(power_log_sd=0.1), st.sampled_from(POLICIES))
def test_energy_that_is_not_scarce_lets_the_same_devices_train_as_fast(fleet: Fleet, policy: Policy) -> None:
    try:
        plain = plan_round(fleet.offers, policy, fleet.allowance, 1.0, 1)
    except (InfeasibleBudgetError, NoCandidatesError):
        return
    plan = planned(fleet, policy, 1e9, 1)
    assert plain.set_aside_j is None
    assert [each.device_id for each in plan.assignments] == [each.device_id for each in plain.assignments]
    assert plan.duration_s <= plain.duration_s
    assert plan.set_aside_j is not None


TWO = Fleet(
    [
        Offer("far", front((10.0, 20.0), (20.0, 9.0)), 2.0),
        Offer("near", front((10.0, 12.0), (20.0, 6.0)), 2.0),
    ],
    site(100.0),
)


def test_a_round_that_takes_too_much_is_planned_in_slower_modes() -> None:
    assert {each.epoch_s for each in planned(TWO, AllDevices(), 1e6, 1).assignments} == {10.0}
    # Both in their slow modes: 140 + 80 J are expected, and 26.8 s times 11 W set aside, plus the time to park.
    plan = planned(TWO, AllDevices(), 440.0, 1)
    assert {each.device_id: each.epoch_s for each in plan.assignments} == {"far": 20.0, "near": 20.0}


def test_devices_that_take_too_much_energy_are_left_out_with_the_reason() -> None:
    plan = planned(TWO, AllDevices(), 1_000.0, 10)
    assert [each.device_id for each in plan.assignments] == ["near"]
    assert reason_of(plan, "far") == "too much energy: this round may use 104 of the 1000 J that are left"


def test_a_share_too_small_for_any_device_lets_the_cheapest_train_alone() -> None:
    plan = planned(TWO, AllDevices(), 200.0, 100)
    assert [(each.device_id, each.epoch_s) for each in plan.assignments] == [("near", 20.0)]


@pytest.mark.parametrize("policy", POLICIES)
def test_energy_for_no_device_is_an_error_that_states_what_is_needed(policy: Policy) -> None:
    with pytest.raises(
        EnergySpentError,
        match="100 J of the energy budget are left, .* the least needs 148 J: raise energy_budget to at least 148 J",
    ):
        planned(TWO, policy, 100.0, 3)


@pytest.mark.parametrize("left_j", [-1.0, math.inf, math.nan])
def test_what_is_left_is_a_finite_number_of_joules(left_j: float) -> None:
    with pytest.raises(InvalidInputError, match="must be finite and 0 J or more"):
        EnergyLimit(left_j)


def test_a_wasteful_mode_is_not_used_although_it_draws_less_power() -> None:
    slow_and_wasteful = Offer("a", front((10.0, 10.0), (100.0, 9.0)), 2.0)
    fleet = Fleet([slow_and_wasteful, Offer("b", front((100.0, 5.0)), 2.0)], site(100.0))
    assert {each.device_id: each.epoch_s for each in planned(fleet, AllDevices(), 1e4).assignments} == {
        "a": 10.0,
        "b": 100.0,
    }


def test_a_mode_is_used_however_wasteful_if_the_watts_allow_no_other() -> None:
    fleet = Fleet([Offer("a", front((10.0, 10.0), (100.0, 9.0)), 2.0)], site(9.5))
    [assigned] = planned(fleet, AllDevices(), 1e4).assignments
    assert assigned.epoch_s == 100.0


def test_a_wasteful_mode_is_used_if_fewer_devices_could_train_otherwise() -> None:
    fleet = Fleet([Offer(name, front((10.0, 20.0), (19.0, 12.0)), 2.0) for name in "ab"], site(25.0))
    assert [each.epoch_s for each in planned(fleet, AllDevices(), 1e6, 5).assignments] == [19.0, 19.0]


def test_no_training_is_slowed_down_beyond_the_deadline() -> None:
    fleet = Fleet([Offer(name, front((10.0, 22.0), (40.0, 4.0)), 2.0) for name in "ab"], site(100.0))
    for left_j in (1_000.0, 600.0, 540.0):
        plan = planned(fleet, Deadline(15.0), left_j, 2)
        assert plan.assignments and {each.epoch_s for each in plan.assignments} == {10.0}
    with pytest.raises(EnergySpentError, match="needs 520 J"):
        planned(fleet, Deadline(15.0), 200.0, 2)


def test_nothing_is_planned_once_nothing_is_left() -> None:
    free = Fleet([Offer("a", front((10.0, 2.0)), 2.0)], site(100.0))  # it draws no more than while idle
    assert planned(free, AllDevices(), 1.0).assignments
    with pytest.raises(EnergySpentError, match="nothing of the energy budget is left: raise energy_budget"):
        planned(free, AllDevices(), 0.0)


# --- Progress ---------------------------------------------------------------------------------------------------------


def progress_of(devices: int, everybody: int, half: float = 3.0) -> float:
    """Progress of a round with equally worthy devices, as docs/planning.md states it."""
    return devices / (devices + half * (everybody - devices) / max(1, everybody - 1))


@given(fleets(most=4), st.floats(50.0, 2_000.0), st.integers(1, 4))
def test_a_round_of_a_few_devices_has_the_most_progress_within_its_share(
    fleet: Fleet, left_j: float, rounds_left: int
) -> None:
    try:
        plan = planned(fleet, Progress(), left_j, rounds_left)
    except (EnergySpentError, InfeasibleBudgetError, NoCandidatesError):
        return
    share_j, n = left_j / rounds_left, len(fleet.offers)

    def spent_j(offer: Offer, point: int) -> float:
        one_s = float(offer.front.epoch_s[point] + offer.front.warmup_s[point])
        return max(0.0, float(offer.front.power_w[point]) - offer.idle_w) * one_s

    def most_devices() -> int:
        """The most devices that any choice of modes allows within the share and the watts."""
        best = 0
        modes = [[None, *range(len(offer.front))] for offer in fleet.offers]
        for chosen in itertools.product(*modes):
            training = {k: point for k, point in enumerate(chosen) if point is not None}
            if len(training) <= best:
                continue
            expected_j = sum(spent_j(fleet.offers[k], point) for k, point in training.items())
            aside_j = sum(
                max(0.0, float(fleet.offers[k].front.planned_w[p]) - fleet.offers[k].idle_w)
                * (1.1 * float(fleet.offers[k].front.epoch_s[p] + fleet.offers[k].front.warmup_s[p]) + 15)
                for k, p in training.items()
            )
            extra_w = {
                fleet.offers[k].device_id: max(0.0, float(fleet.offers[k].front.planned_w[p]) - fleet.offers[k].idle_w)
                for k, p in training.items()
            }
            use = fleet.allowance.use(fleet.offers, extra_w)
            if expected_j <= share_j and aside_j <= left_j and not fleet.allowance.exceeded(use):
                best = len(training)
        return best

    possible = most_devices()
    if possible and not any(offer.limit_w for offer in fleet.offers):
        # All devices are worth the same in the first round. The plan with the most progress per second is taken if it
        # fits; otherwise the set may miss 2 % of the progress for a shorter round, and the greedy choice a little.
        reached = progress_of(len(plan.assignments), n)
        per_second = plan_round(fleet.offers, Progress(), fleet.allowance, 1.0, 1)
        assert len(plan.assignments) >= min(possible - 1, len(per_second.assignments)) or reached >= 0.9 * progress_of(
            possible, n
        )


def spend(
    fleet: Fleet, policy: Policy, budget_j: float, rounds: int, chance: np.random.Generator
) -> tuple[float, int, float]:
    """Train until the rounds or the energy end; returns the joules spent, the rounds, and their summed progress."""
    left_j, history, progress = budget_j, History(), 0.0
    for number in itertools.count(1):
        if rounds and number > rounds:
            return budget_j - left_j, number - 1, progress
        try:
            plan = planned(fleet, policy, left_j, max(0, rounds - number + 1) if rounds else 0, number, history)
        except EnergySpentError:
            return budget_j - left_j, number - 1, progress
        drawn_j = 0.0
        for each in plan.assignments:
            watts = each.power_w * math.exp(each.power_log_sd * chance.standard_normal())
            seconds = each.training_s(each.epoch_s * math.exp(each.epoch_log_sd * chance.standard_normal()))
            assert each.longest_s is not None
            drawn_j += max(0.0, min(watts, each.power_limit_w) - each.idle_w) * min(seconds + 2.0, each.longest_s)
        assert plan.set_aside_j is not None and drawn_j <= plan.set_aside_j <= left_j
        left_j -= drawn_j
        progress += progress_of(len(plan.assignments), len(fleet.offers))
        parts = {each.device_id: Participation(num_examples=100.0) for each in plan.assignments}
        history = history.after(number, parts)


def boards(chance: np.random.Generator) -> Fleet:
    """Eight boards on two racks that draw clearly more in training than while idle."""
    fleet = fleet_on_racks(chance, 8)
    return Fleet([replace(each, idle_w=0.6 * float(each.front.power_w[-1])) for each in fleet.offers], fleet.allowance)


def scarce_j(fleet: Fleet, policy: Policy, rounds: int) -> float:
    """The joules of so many rounds if each spends a third of what it would without an energy budget."""
    plain = plan_round(fleet.offers, policy, fleet.allowance, 1.0, 1)
    idle_w = {offer.device_id: offer.idle_w for offer in fleet.offers}
    return rounds * sum(
        (each.power_w - idle_w[each.device_id]) * each.training_s(each.epoch_s) / 3 for each in plain.assignments
    )


@pytest.mark.parametrize(
    ("policy", "rounds"), first(2, [(Progress(), 0), (AllDevices(), 30), (Progress(), 30), (AllDevices(), 0)])
)
def test_a_scarce_budget_is_spent_to_at_least_95_percent_and_never_exceeded(policy: Policy, rounds: int) -> None:
    for seed in range(3):
        chance = np.random.default_rng(seed)
        fleet = boards(chance)
        budget_j = scarce_j(fleet, policy, rounds or 40)
        spent_j, done, _ = spend(fleet, policy, budget_j, rounds, chance)
        assert 0.95 * budget_j <= spent_j <= budget_j, f"seed {seed}: {spent_j:.0f} of {budget_j:.0f} J in {done}"


def test_scarce_joules_bring_more_progress_than_with_the_watts_alone() -> None:
    """The same energy spent by plans that only know watts, until it is gone, makes less progress."""
    better = 0
    for seed in range(4):
        chance = np.random.default_rng(seed)
        fleet = boards(chance)
        plain = plan_round(fleet.offers, Progress(), fleet.allowance, 1.0, 1)
        idle_w = {offer.device_id: offer.idle_w for offer in fleet.offers}
        plain_j = sum(
            (each.power_w - idle_w[each.device_id]) * each.training_s(each.epoch_s) for each in plain.assignments
        )
        plain_progress = 10 * progress_of(len(plain.assignments), 8)
        _, _, progress = spend(fleet, Progress(), 10 * plain_j, 20, chance)
        better += progress > plain_progress
    assert better == 4


def test_the_number_of_epochs_is_chosen_within_the_energy() -> None:
    def epochs(left_j: float) -> set[float]:
        plan = plan_round(
            TWO.offers, Progress(overhead_s=300.0), TWO.allowance, choice, 1, None, None, EnergyLimit(left_j, 1)
        )
        assert plan.set_aside_j is not None and plan.set_aside_j <= left_j
        return {each.epochs for each in plan.assignments}

    choice = EpochChoice.of([1, 4])
    assert epochs(1e6) == {4.0}
    assert epochs(300.0) == {1.0}


def test_a_device_that_has_waited_longest_is_worth_the_most_joules() -> None:
    equal = Fleet([Offer(name, front((10.0, 8.0)), 2.0) for name in "abc"], site(100.0))
    seen = history_of(
        {"a": Participation(num_examples=10.0), "b": Participation(num_examples=10.0)},
        {"a": Participation(num_examples=10.0)},
    )
    plan = planned(equal, Progress(), 1_000.0, 15, 3, seen)
    assert [each.device_id for each in plan.assignments] == ["c"]


def test_without_a_budget_the_plan_is_as_before() -> None:
    fleet = fleet_on_racks(np.random.default_rng(1), 6)
    plain = plan_of(fleet, Progress())
    assert plain.set_aside_j is None
    assert all(each.longest_s is None and not each.set_aside_j for each in plain.assignments)
