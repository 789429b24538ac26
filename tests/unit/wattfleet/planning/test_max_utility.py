"""The device set of most utility within nested supplies, compared with all sets and a mixed-integer program."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from wattfleet.planning import Headroom, max_utility
from wattfleet.planning.utility import greedy_by_utility

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


@settings(max_examples=80)
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


@pytest.mark.parametrize("seed", range(8))
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


@settings(max_examples=80)
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
