"""The set of devices with the highest utility that the supplies can power: a knapsack with nested capacities.

If fractions of devices were allowed, taking them by utility per watt would be optimal, since the capacities are nested.
This gives an upper bound for any set. If whole devices taken in this order are further than `_GAP` below the bound, the
HiGHS solver closes the gap, in fleets that are small enough for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattfleet.core.planning.curves import Headroom, Indices, Mask, Values, running_sums

_GAP = 1e-3
_MAX_NODES = 20_000
# With more devices, the solver takes seconds, and a single device hardly matters.
_MAX_SOLVED = 2_000


@dataclass(frozen=True)
class DeviceSet:
    """A set of devices with its optimality gap.

    Attributes:
        chosen: `[n]` whether a device is in the set.
        gap: upper bound of how far its utility is below that of the best set, relative to the best set.
    """

    chosen: Mask
    gap: float


def max_utility(extra_w: Values, utility: Values, headroom: Headroom) -> DeviceSet:
    """The set of devices with the highest utility that the supplies can power.

    Args:
        extra_w: `[n]` watts above idle of each device; infinite for devices that must not be taken.
        utility: `[n]` utility of each device, not negative.
        headroom: headroom of the supplies.
    """
    found = greedy_by_utility_per_watt(extra_w, utility, headroom)
    order = _order(extra_w, utility, headroom)
    if found.gap > _GAP and len(order) <= _MAX_SOLVED:
        solved = _solved(extra_w, utility, headroom, order)
        if solved is not None and utility[solved.chosen].sum() >= utility[found.chosen].sum():
            return DeviceSet(solved.chosen, min(found.gap, solved.gap))
    return found


def greedy_by_utility_per_watt(extra_w: Values, utility: Values, headroom: Headroom) -> DeviceSet:
    """A set that the supplies can power, of whole devices taken greedily by utility per watt.

    Args:
        extra_w: `[n]` watts above idle of each device; infinite for devices that must not be taken.
        utility: `[n]` utility of each device, not negative.
        headroom: headroom of the supplies.
    """
    order = _order(extra_w, utility, headroom)
    share = _fractions(extra_w, headroom, order)
    chosen = _whole(share, extra_w, headroom, order)
    return DeviceSet(chosen, _gap(chosen, utility, float((utility[order] * share).sum())))


def greedy_by_utility(extra_w: Values, utility: Values, headroom: Headroom) -> Mask:
    """A set that the supplies can power, of whole devices taken greedily by utility, regardless of their power.

    It can be better than the set by utility per watt if one device has more utility than all that could replace it, or
    if only a few devices are needed.

    Args:
        extra_w: `[n]` watts above idle of each device; infinite for devices that must not be taken.
        utility: `[n]` utility of each device, not negative.
        headroom: headroom of the supplies.
    """
    possible = np.flatnonzero((extra_w <= headroom.single_device_w) & (utility > 0))
    order = possible[np.argsort(-utility[possible], kind="stable")]
    return _whole(_fractions(extra_w, headroom, order), extra_w, headroom, order)


def _order(extra_w: Values, utility: Values, headroom: Headroom) -> Indices:
    """Indices of the devices with any utility, by descending utility per watt."""
    possible = np.flatnonzero(np.isfinite(extra_w) & (utility > 0) & headroom.idle_covered)
    with np.errstate(divide="ignore"):
        return possible[np.argsort(-utility[possible] / extra_w[possible], kind="stable")]


def _whole(share: Values, extra_w: Values, headroom: Headroom, order: Indices) -> Mask:
    """The devices that fit completely, and then all others that still fit."""
    chosen = np.zeros(len(extra_w), dtype=np.bool_)
    chosen[order[share == 1.0]] = True
    _fill(chosen, extra_w, headroom, order)
    return chosen


def _gap(chosen: Mask, utility: Values, bound: float) -> float:
    return max(0.0, 1.0 - float(utility[chosen].sum()) / bound) if bound > 0 else 0.0


def _fractions(extra_w: Values, headroom: Headroom, order: Indices) -> Values:
    """`[len(order)]` share of each device that fits, if devices are taken in order and may be taken partly."""
    wanted_w = extra_w[order]
    taken_w = wanted_w.copy()
    for level in headroom.supply_at[::-1]:
        supply = level[order]
        room_w = headroom.spare_w[supply] - (running_sums(taken_w, supply) - taken_w)
        fits = (supply < 0) | (taken_w <= room_w)
        taken_w = np.where(fits, taken_w, np.clip(room_w, 0.0, taken_w))
    return np.asarray(np.divide(taken_w, wanted_w, out=np.ones_like(wanted_w), where=wanted_w > 0))


def _fill(chosen: Mask, extra_w: Values, headroom: Headroom, order: Indices) -> None:
    """Add, in order, all whole devices that still fit."""
    left_w = headroom.spare_w.copy()
    for level in headroom.supply_at:
        held = chosen & (level >= 0)
        np.subtract.at(left_w, level[held], extra_w[held])
    rest = order[~chosen[order]]
    while True:
        paths = headroom.supply_at[:, rest]
        room_w = np.where(paths >= 0, left_w[paths], np.inf).min(axis=0)
        rest = rest[extra_w[rest] <= room_w]
        if not len(rest):
            return
        taken, rest = rest[0], rest[1:]
        chosen[taken] = True
        path = headroom.supply_at[:, taken]
        left_w[path[path >= 0]] -= extra_w[taken]


def _solved(extra_w: Values, utility: Values, headroom: Headroom, order: Indices) -> DeviceSet | None:
    """The best set by the mixed-integer solver; None if its bounded search finds no set."""
    # Imported here, so that coordinators with other policies save the memory and the import time.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    paths = headroom.supply_at[:, order]
    level, column = np.nonzero(paths >= 0)
    weights = csr_array(
        (extra_w[order][column], (paths[level, column], column)), shape=(len(headroom.spare_w), len(order))
    )
    found = milp(
        -utility[order],
        integrality=np.ones(len(order), dtype=np.int8),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(weights, ub=np.maximum(headroom.spare_w, 0.0)),
        options={"mip_rel_gap": _GAP / 2, "node_limit": _MAX_NODES},
    )
    if found.x is None:
        return None
    chosen = np.zeros(len(extra_w), dtype=np.bool_)
    chosen[order[found.x > 0.5]] = True
    # The solver has a tolerance, the budget has none.
    if not headroom.can_supply(extra_w, chosen):
        return None
    return DeviceSet(chosen, _gap(chosen, utility, -float(found.mip_dual_bound)))
