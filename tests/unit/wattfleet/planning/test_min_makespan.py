"""The shortest round, compared with all sets in all modes, a mixed-integer program, and a simple bisection."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from tests.fakes.fleets import TREES, Fleet, best, done_s, fleets, holds, modes_within_limit, planned_w
from tests.fakes.fronts import front
from wattfleet.planning import Allowance, Offer, curves_of, min_makespan


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


@settings(max_examples=80)
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


@settings(max_examples=60)
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


@settings(max_examples=25)
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
