"""The best sets of devices within supplies: the shortest round, the most utility, and which ones measure."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from tests.fakes.fleets import (
    TREES,
    Fleet,
    best,
    done_s,
    fleet_on_racks,
    fleets,
    front,
    holds,
    modes_within_limit,
    planned_w,
)
from tests.fakes.short_forms import examples, first
from wattfleet.core.budgets import Supplies, Supply
from wattfleet.core.planning import Allowance, Headroom, Offer, curves_of, max_utility, min_makespan, plan_measuring
from wattfleet.core.planning.utility import greedy_by_utility

# --- The shortest round -----------------------------------------------------------------------------------------------
# The shortest round, compared with all sets in all modes, a mixed-integer program, and a simple bisection.


def found(
    fleet: Fleet, count: int, first: tuple[str, ...] = (), epochs: float = 1.0
) -> tuple[dict[str, int], float] | None:
    """The chosen devices with the indices of their points, and the seconds until all are done."""
    curves = curves_of(fleet.offers, epochs)
    allocation = min_makespan(
        curves,
        fleet.allowance.headroom(fleet.offers),
        count,
        np.ones(len(fleet.offers), dtype=np.bool_),
        np.array([offer.device_id in first for offer in fleet.offers], dtype=np.bool_),
    )
    if allocation is None:
        return None
    points = {
        offer.device_id: int(curves.point[step])
        for offer, step in zip(fleet.offers, allocation.step, strict=True)
        if step >= 0
    }
    return points, allocation.limit_s


def slowest_s(fleet: Fleet, points: dict[str, int], epochs: float = 1.0) -> float:
    return max(done_s(offer, points[offer.device_id], epochs) for offer in fleet.offers if offer.device_id in points)


@examples(80)
@given(fleets(), st.integers(1, 5), st.sampled_from([0.5, 1.0, 4.0]))
def test_the_makespan_is_the_minimum_over_all_sets_and_modes(fleet: Fleet, count: int, epochs: float) -> None:
    expected = best(fleet, count, epochs=epochs)
    plan = found(fleet, count, epochs=epochs)
    if expected is None:
        assert plan is None
        return
    assert plan is not None
    points, limit_s = plan
    assert len(points) == expected[1]
    assert limit_s == pytest.approx(expected[2], rel=1e-12)
    assert slowest_s(fleet, points, epochs) == pytest.approx(limit_s, rel=1e-12)
    assert holds(fleet, points)
    assert all(
        points[offer.device_id] in modes_within_limit(offer) for offer in fleet.offers if offer.device_id in points
    )


@examples(60)
@given(fleets(), st.integers(1, 4), st.sets(st.integers(0, 3)))
def test_priority_devices_are_taken_first_and_others_fill_the_rest(fleet: Fleet, count: int, indices: set[int]) -> None:
    first = tuple(f"device-{k}" for k in sorted(indices)[:count] if k < len(fleet.offers))
    expected = best(fleet, count, first)
    plan = found(fleet, count, first)
    if expected is None:
        assert plan is None
        return
    assert plan is not None
    points, limit_s = plan
    assert holds(fleet, points)
    assert slowest_s(fleet, points) <= limit_s * (1 + 1e-12)
    assert len(points) <= count
    assert len(set(first) & set(points)) == expected[0]
    if len(fleet.allowance.supplies.names) == 1:
        # Behind nested supplies, the cheapest of the `first` devices may block others.
        assert len(points) == expected[1]
        assert limit_s == pytest.approx(expected[2], rel=1e-12)


# --- larger fleets ------------------------------------------------------------------------------------------------


def random_fleet(draw: np.random.Generator, n: int, points: int, share: float, whole: bool = False) -> Fleet:
    """Devices with power laws like those of boards, on racks, halls and a site; any of these may lack watts.

    Args:
        draw: random number generator.
        n: number of devices.
        points: number of points of each front.
        share: part of the watts between idle and full power that the supplies provide.
        whole: whether all seconds are whole numbers, so that many are equal.
    """
    supplies = TREES[2]
    offers = []
    for k in range(n):
        speed = draw.uniform(1, 8) * np.geomspace(1, 5, points)
        if whole:
            speed = np.round(speed * 3) + np.arange(points)
        watts = 2 + draw.uniform(8, 40) * (speed / speed[0]) ** -draw.uniform(0.6, 1.6)
        spread = draw.uniform(0, 0.3, points)
        offers.append(
            Offer(
                f"device-{k:04}",
                front(*zip(speed.tolist(), watts.tolist(), strict=True), epoch_log_sd=spread.tolist()),
                float(draw.uniform(1, 6)),
                supplies.names[int(draw.integers(len(supplies.names)))],
            )
        )
    fullest = Fleet(offers, Allowance(supplies, dict.fromkeys(supplies.names, 1.0)))
    budget_w = {}
    for name in supplies.names:
        behind = [offer for offer in fullest.offers if name in supplies.path(offer.supply)]
        idle_w = sum(offer.idle_w for offer in behind)
        full_w = sum(planned_w(offer, 0) for offer in behind)
        budget_w[name] = idle_w + share * draw.uniform(0.7, 1.3) * (full_w - idle_w)
    return Fleet(offers, Allowance(supplies, budget_w))


def by_integer_program(fleet: Fleet, wanted: int) -> tuple[int, float]:
    """The most devices that the watts allow and their least time, by HiGHS with a binary for each device and mode."""
    names = fleet.allowance.supplies.names
    pairs = [(i, point) for i, offer in enumerate(fleet.offers) for point in modes_within_limit(offer)]
    times_s = np.array([done_s(fleet.offers[i], point) for i, point in pairs])
    owner = np.array([i for i, _ in pairs])
    n, m = len(fleet.offers), len(pairs)
    once = coo_array((np.ones(m), (owner, np.arange(m))), shape=(n, m))
    entries = [
        (names.index(name), column, planned_w(fleet.offers[i], point) - fleet.offers[i].idle_w)
        for column, (i, point) in enumerate(pairs)
        for name in fleet.allowance.supplies.path(fleet.offers[i].supply)
    ]
    rows, columns, watts = map(list, zip(*entries, strict=True))
    extra = coo_array((watts, (rows, columns)), shape=(len(names), m))
    idle_w = [
        sum(offer.idle_w for offer in fleet.offers if name in fleet.allowance.supplies.path(offer.supply))
        for name in names
    ]
    spare_w = np.array([fleet.allowance.budget_w[name] for name in names]) - idle_w
    carried = [LinearConstraint(csr_array(once), ub=1), LinearConstraint(csr_array(extra), ub=spare_w)]
    most = milp(-np.ones(m), integrality=np.ones(m), bounds=Bounds(0, 1), constraints=carried)
    count = min(wanted, round(-most.fun))
    # The last variable is the duration. A device's times, at most one of which counts, are limited by it.
    slowest = np.concatenate([(once * times_s[None, :]).toarray(), -np.ones((n, 1))], axis=1)
    wide = [
        LinearConstraint(np.concatenate([row.toarray(), np.zeros((row.shape[0], 1))], axis=1), ub=ub)
        for row, ub in ((once, 1.0), (extra, spare_w))
    ]
    duration = milp(
        np.append(np.zeros(m), 1.0),
        integrality=np.append(np.ones(m), 0),
        bounds=Bounds(0, np.append(np.ones(m), np.inf)),
        constraints=[*wide, LinearConstraint(slowest, ub=0), LinearConstraint(np.append(np.ones(m), 0), count, count)],
        options={"mip_rel_gap": 0.0},
    )
    assert duration.status == 0
    return count, float(duration.fun)


@pytest.mark.parametrize(("seed", "n", "points"), [(0, 20, 8), (1, 25, 8), (3, 40, 8), (4, 60, 8)])
def test_the_makespan_equals_that_of_a_mixed_integer_program(seed: int, n: int, points: int) -> None:
    draw = np.random.default_rng(seed)
    fleet = random_fleet(draw, n, points, share=draw.uniform(0.15, 0.6))
    wanted = int(draw.integers(n // 3, n + 1))
    plan = found(fleet, wanted)
    assert plan is not None
    count, duration_s = by_integer_program(fleet, wanted)
    assert len(plan[0]) == count
    assert plan[1] == pytest.approx(duration_s, rel=1e-5)  # the solver's own tolerance
    assert plan[1] <= duration_s * 1.001


def by_plain_bisection(fleet: Fleet, wanted: int) -> tuple[int, float]:
    """The same result by bisection, with loops over devices and watts."""
    costs = [
        [
            (done_s(offer, point), planned_w(offer, point) - offer.idle_w, offer.supply)
            for point in modes_within_limit(offer)
        ]
        for offer in fleet.offers
    ]

    def largest_count(limit_s: float) -> int:
        cheapest = [min(((w, supply) for s, w, supply in each if s <= limit_s), default=None) for each in costs]
        left_w = {name: fleet.allowance.budget_w[name] for name in fleet.allowance.supplies.names}
        for offer in fleet.offers:
            for name in fleet.allowance.supplies.path(offer.supply):
                left_w[name] -= offer.idle_w
        count = 0
        for watts, supply in sorted(each for each in cheapest if each is not None):
            path = fleet.allowance.supplies.path(supply)
            if all(left_w[name] >= watts for name in path):
                count += 1
                for name in path:
                    left_w[name] -= watts
        return count

    times_s = sorted({seconds for each in costs for seconds, _, _ in each})
    count = min(wanted, largest_count(times_s[-1]))
    low, high = 0, len(times_s) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if largest_count(times_s[middle]) >= count else (middle + 1, high)
    return count, times_s[low]


@pytest.mark.parametrize(("seed", "share", "whole"), [(0, 0.1, False), (1, 0.4, True)])
def test_the_makespan_of_3000_devices_equals_that_of_plain_bisection(seed: int, share: float, whole: bool) -> None:
    fleet = random_fleet(np.random.default_rng(seed), 3_000, 8, share, whole)
    plan = found(fleet, 1_200)
    assert plan is not None
    count, duration_s = by_plain_bisection(fleet, 1_200)
    assert len(plan[0]) == count
    assert plan[1] == pytest.approx(duration_s, rel=1e-12)
    assert holds(fleet, plan[0], slack=1e-6)


@examples(25)
@given(fleets(), st.integers(1, 4), st.integers(0, 20))
def test_more_watts_never_lose_a_device_or_slow_the_same_number(fleet: Fleet, count: int, more_w: int) -> None:
    poor = found(fleet, count)
    assume(poor is not None)
    rich = found(fleet.with_watts(more_w), count)
    assert poor is not None and rich is not None
    assert len(rich[0]) >= len(poor[0])
    if len(rich[0]) == len(poor[0]):
        assert rich[1] <= poor[1]


def test_a_supply_below_its_idle_power_excludes_only_its_own_devices() -> None:
    supplies = TREES[1]
    offers = [Offer("dark", front((10, 3)), 5.0, "left"), Offer("lit", front((20, 9)), 5.0, "right")]
    plan = found(Fleet(offers, Allowance(supplies, {"site": 50.0, "left": 4.0, "right": 9.0})), 2)
    assert plan is not None and set(plan[0]) == {"lit"}


def test_a_priority_device_that_does_not_fit_leaves_the_power_to_others() -> None:
    offers = [Offer("hungry", front((10, 200)), 2.0), Offer("other", front((10, 20)), 2.0)]
    plan = found(Fleet(offers, Allowance.of_site(50.0)), 2, first=("hungry",))
    assert plan is not None and set(plan[0]) == {"other"}


# --- The most utility -------------------------------------------------------------------------------------------------
# The device set of most utility within nested supplies, compared with all sets and a mixed-integer program.

Case = tuple[np.ndarray, np.ndarray, Headroom]


def feeds(headroom: Headroom) -> np.ndarray:
    """`[supplies, devices]`: whether a supply feeds a device."""
    supplies = np.arange(len(headroom.spare_w))
    return np.asarray((headroom.supply_at[None, :, :] == supplies[:, None, None]).any(axis=1))


def fits(case: Case, chosen: np.ndarray) -> bool:
    extra_w, _, headroom = case
    for supply, fed in enumerate(feeds(headroom)):
        if (fed & chosen).any() and extra_w[fed & chosen].sum() > headroom.spare_w[supply]:
            return False
    return bool(np.isfinite(extra_w[chosen]).all())


def best_of_all(case: Case) -> float:
    sets = (np.array(chosen) for chosen in itertools.product([False, True], repeat=len(case[0])))
    return max(float(case[1][chosen].sum()) for chosen in sets if fits(case, chosen))


@st.composite
def knapsacks(draw: st.DrawFn) -> Case:
    """Whole watts behind a site, two circuits and a rack. Devices are behind any of them; some supplies lack watts."""
    n = draw(st.integers(1, 7))
    paths = [(0, -1, -1), (0, 1, -1), (0, 2, -1), (0, 1, 3)]
    supply_at = np.array([draw(st.sampled_from(paths)) for _ in range(n)], dtype=np.intp).T
    watts = st.integers(0, 12).map(float) | st.just(float("inf"))
    extra_w = np.array(draw(st.lists(watts, min_size=n, max_size=n)))
    utility = np.array(draw(st.lists(st.integers(0, 20), min_size=n, max_size=n)), dtype=np.float64)
    spare_w = np.array(draw(st.lists(st.integers(-3, 40), min_size=4, max_size=4)), dtype=np.float64)
    return extra_w, utility, Headroom(spare_w, supply_at)


@examples(80)
@given(knapsacks())
def test_the_set_is_within_its_gap_of_the_best_set(case: Case) -> None:
    found = max_utility(*case)
    assert fits(case, found.chosen)
    best, reached = best_of_all(case), float(case[1][found.chosen].sum())
    assert reached >= best * (1 - 1e-3)
    assert reached >= best * (1 - found.gap) - 1e-9


def random_case(seed: int, n: int) -> Case:
    """Racks of five devices on two circuits of a site, with random watts and utilities."""
    draw = np.random.default_rng(seed)
    racks = max(1, n // 5)
    rack = draw.integers(racks, size=n)
    supply_at = np.array([np.zeros(n), 1 + rack % 2, 3 + rack], dtype=np.intp)
    extra_w, utility = draw.lognormal(2.5, 0.7, n), draw.lognormal(0.0, 1.0, n)
    spare_w = np.zeros(3 + racks)
    for supply in range(3 + racks):
        spare_w[supply] = draw.uniform(0.3, 0.7) * extra_w[(supply_at == supply).any(axis=0)].sum()
    return extra_w, utility, Headroom(spare_w, supply_at)


@pytest.mark.parametrize("seed", first(4, range(8)))
def test_the_set_is_within_a_thousandth_of_a_mixed_integer_program(seed: int) -> None:
    case = extra_w, utility, headroom = random_case(seed, n=20 + 10 * (seed % 4))
    best = milp(
        -utility,
        integrality=np.ones(len(utility)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(feeds(headroom) * extra_w[None, :], ub=headroom.spare_w),
        options={"mip_rel_gap": 0.0},
    )
    assert best.status == 0
    found = max_utility(*case)
    reached = float(utility[found.chosen].sum())
    assert fits(case, found.chosen)
    assert reached >= -best.fun * (1 - 1e-3)
    assert reached >= -best.fun * (1 - found.gap) * (1 - 1e-6)


def test_one_large_device_can_replace_small_ones_with_more_utility_per_watt() -> None:
    # The two small devices have more utility per watt, but with them the large one no longer fits.
    case = np.array([10.0, 1.0, 1.0]), np.array([10.0, 1.1, 1.1]), Headroom(np.array([10.0]), np.zeros((1, 3), np.intp))
    assert max_utility(*case).chosen.tolist() == [True, False, False]


@examples(80)
@given(knapsacks())
def test_greedy_by_utility_takes_the_most_useful_devices_that_fit(case: Case) -> None:
    extra_w, utility, headroom = case
    chosen = greedy_by_utility(*case)
    assert fits(case, chosen)
    alone = [k for k in range(len(utility)) if fits(case, np.arange(len(utility)) == k)]
    assert utility[chosen].max(initial=0.0) == max((utility[k] for k in alone), default=0.0)
    for k in np.flatnonzero(~chosen & (utility > 0)):
        more = chosen.copy()
        more[k] = True
        assert not fits(case, more)


def test_the_set_is_empty_without_utility_or_feasible_devices() -> None:
    headroom = Headroom(np.array([10.0]), np.zeros((1, 2), np.intp))
    for extra_w, utility in (([1.0, 2.0], [0.0, 0.0]), ([np.inf, np.inf], [1.0, 2.0])):
        found = max_utility(np.array(extra_w), np.array(utility), headroom)
        assert not found.chosen.any()
        assert found.gap == 0.0


# --- Measuring --------------------------------------------------------------------------------------------------------
# Which devices measure with the watts that are left, computed by hand and compared with the budgets.

# 2 W of idle power; 2, 4, 8 and 16 W above it.
POINTS = ((80, 4), (40, 6), (20, 10), (10, 18))


def offer(name: str, modes: int = 0, supply: str = "site") -> Offer:
    return Offer(name, front(*reversed(POINTS)), 2.0, supply, profiled_modes=modes)


def limits(offers: list[Offer], allowance: Allowance) -> dict[str, float]:
    return {each.device_id: each.power_limit_w for each in plan_measuring(offers, allowance, 1.0)}


def test_with_plenty_of_watts_every_device_may_measure_its_hungriest_mode() -> None:
    assert limits([offer("a"), offer("b")], Allowance.of_site(100.0)) == {"a": 18.0, "b": 18.0}
    assert plan_measuring([], Allowance.of_site(100.0), 1.0) == []


def test_a_device_trains_in_its_fastest_mode_within_its_watts() -> None:
    [planned] = plan_measuring([offer("a")], Allowance.of_site(2.0 + 9.0), 1.0)
    assert (planned.epoch_s, planned.power_w, planned.power_limit_w) == (20, 10, pytest.approx(11.0, abs=0.01))


def test_devices_with_the_fewest_modes_come_first() -> None:
    # 4 W are half of a device's modes; 10 W are enough for two devices, and 2 W remain for the first.
    offers = [offer("a", 20), offer("b"), offer("c", 5)]
    assert limits(offers, Allowance.of_site(3 * 2.0 + 10.0)) == pytest.approx(
        {"b": 2.0 + 6.0, "c": 2.0 + 4.0}, abs=0.01
    )


def test_without_watts_for_half_of_the_modes_the_lowest_ones_are_measured() -> None:
    assert limits([offer("a"), offer("b")], Allowance.of_site(2 * 2.0 + 3.0)) == pytest.approx(
        {"a": 2.0 + 3.0}, abs=0.01
    )
    assert limits([offer("a"), offer("b")], Allowance.of_site(2 * 2.0 + 1.9)) == {}


def test_what_others_draw_is_not_given_away() -> None:
    supplies = Supplies((Supply("site"), Supply("rack", "site")))
    allowance = Allowance(supplies, {"site": 60.0, "rack": 10.0}, {"site": 30.0, "rack": 2.0})
    found = limits([offer("a"), offer("b", supply="rack")], allowance)
    assert found == {"a": 18.0, "b": pytest.approx(10.0 - 2.0, abs=0.01)}


@given(st.integers(0, 10_000))
def test_no_supply_is_ever_exceeded(seed: int) -> None:
    chance = np.random.default_rng(seed)
    fleet = fleet_on_racks(chance, int(chance.integers(1, 12)))
    planned = plan_measuring(fleet.offers, fleet.allowance, 1.0)
    idle_w = {each.device_id: each.idle_w for each in fleet.offers}
    extra_w = {each.device_id: each.power_limit_w - idle_w[each.device_id] for each in planned}
    use = fleet.allowance.use(fleet.offers, extra_w)
    idle = fleet.allowance.exceeded(fleet.allowance.use(fleet.offers, {}))
    assert fleet.allowance.exceeded(use) <= idle
    assert all(each.power_w <= each.power_limit_w for each in planned)
