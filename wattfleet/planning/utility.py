"""The most utility that the supplies' watts can carry within a deadline: a knapsack with nested capacities.

With fractions of devices allowed, the best is to take them by utility per watt, as the capacities are nested; that
bounds what any set can reach. Where whole devices taken in that order stay further below the bound than `_GAP`, the
HiGHS solver closes the gap, in fleets that are not too large for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattfleet.planning.curves import Indices, Mask, Values
from wattfleet.planning.headroom import Headroom, running_sums

_GAP = 1e-3
_MOST_NODES = 20_000
# The solver needs seconds for more devices than these, of which a device more or less is hardly worth as much.
_MOST_SOLVED = 2_000


@dataclass(frozen=True)
class UsefulSet:
    """A set of devices.

    Attributes:
        chosen: `[n]` whether a device is in it.
        gap: how far, relative to the best set, this one is below it at most.
    """

    chosen: Mask
    gap: float


def max_utility(extra_w: Values, utility: Values, headroom: Headroom) -> UsefulSet:
    """The set of devices with the most utility that the supplies can carry.

    Args:
        extra_w: `[n]` watts above idling of each device; infinite for those that cannot be taken.
        utility: `[n]` worth of each device, not negative.
        headroom: of the supplies.
    """
    found = by_utility_per_watt(extra_w, utility, headroom)
    order = _order(extra_w, utility, headroom)
    if found.gap > _GAP and len(order) <= _MOST_SOLVED:
        solved = _solved(extra_w, utility, headroom, order)
        if solved is not None and utility[solved.chosen].sum() >= utility[found.chosen].sum():
            return UsefulSet(solved.chosen, min(found.gap, solved.gap))
    return found


def by_utility_per_watt(extra_w: Values, utility: Values, headroom: Headroom) -> UsefulSet:
    """A set that the supplies can carry, of whole devices taken by utility per watt; its `gap` says how good it is.

    Args:
        extra_w: `[n]` watts above idling of each device; infinite for those that cannot be taken.
        utility: `[n]` worth of each device, not negative.
        headroom: of the supplies.
    """
    order = _order(extra_w, utility, headroom)
    share = _fractions(extra_w, headroom, order)
    chosen = _whole(share, extra_w, headroom, order)
    return UsefulSet(chosen, _gap(chosen, utility, float((utility[order] * share).sum())))


def by_utility(extra_w: Values, utility: Values, headroom: Headroom) -> Mask:
    """A set that the supplies can carry, of whole devices taken by utility whatever their watts.

    It is the better one where one device is of more use than all that could train in its place, or where only the
    first few are wanted.

    Args:
        extra_w: `[n]` watts above idling of each device; infinite for those that cannot be taken.
        utility: `[n]` worth of each device, not negative.
        headroom: of the supplies.
    """
    possible = np.flatnonzero((extra_w <= headroom.alone_w) & (utility > 0))
    order = possible[np.argsort(-utility[possible], kind="stable")]
    return _whole(_fractions(extra_w, headroom, order), extra_w, headroom, order)


def _order(extra_w: Values, utility: Values, headroom: Headroom) -> Indices:
    """Devices that are any use, by utility per watt."""
    possible = np.flatnonzero(np.isfinite(extra_w) & (utility > 0) & headroom.covered)
    with np.errstate(divide="ignore"):
        return possible[np.argsort(-utility[possible] / extra_w[possible], kind="stable")]


def _whole(share: Values, extra_w: Values, headroom: Headroom, order: Indices) -> Mask:
    """Those of which all fits, and whatever others then still do."""
    chosen = np.zeros(len(extra_w), dtype=np.bool_)
    chosen[order[share == 1.0]] = True
    _fill(chosen, extra_w, headroom, order)
    return chosen


def _gap(chosen: Mask, utility: Values, bound: float) -> float:
    return max(0.0, 1.0 - float(utility[chosen].sum()) / bound) if bound > 0 else 0.0


def _fractions(extra_w: Values, headroom: Headroom, order: Indices) -> Values:
    """`[len(order)]` how much of each device fits, if they are taken in order and one can be taken in part."""
    wanted_w = extra_w[order]
    taken_w = wanted_w.copy()
    for above in headroom.above[::-1]:
        supply = above[order]
        room_w = headroom.spare_w[supply] - (running_sums(taken_w, supply) - taken_w)
        fits = (supply < 0) | (taken_w <= room_w)
        taken_w = np.where(fits, taken_w, np.clip(room_w, 0.0, taken_w))
    return np.asarray(np.divide(taken_w, wanted_w, out=np.ones_like(wanted_w), where=wanted_w > 0))


def _fill(chosen: Mask, extra_w: Values, headroom: Headroom, order: Indices) -> None:
    """Take, in order, whatever whole devices still fit."""
    left_w = headroom.spare_w.copy()
    for above in headroom.above:
        held = chosen & (above >= 0)
        np.subtract.at(left_w, above[held], extra_w[held])
    rest = order[~chosen[order]]
    while True:
        paths = headroom.above[:, rest]
        room_w = np.where(paths >= 0, left_w[paths], np.inf).min(axis=0)
        rest = rest[extra_w[rest] <= room_w]
        if not len(rest):
            return
        taken, rest = rest[0], rest[1:]
        chosen[taken] = True
        path = headroom.above[:, taken]
        left_w[path[path >= 0]] -= extra_w[taken]


def _solved(extra_w: Values, utility: Values, headroom: Headroom, order: Indices) -> UsefulSet | None:
    """The same by a mixed-integer solver; None where it found none within its bounded search."""
    # Here, as a coordinator that plans by other policies can spare their memory, and the time of their import.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    paths = headroom.above[:, order]
    level, column = np.nonzero(paths >= 0)
    weights = csr_array(
        (extra_w[order][column], (paths[level, column], column)), shape=(len(headroom.spare_w), len(order))
    )
    found = milp(
        -utility[order],
        integrality=np.ones(len(order), dtype=np.int8),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(weights, ub=np.maximum(headroom.spare_w, 0.0)),
        options={"mip_rel_gap": _GAP / 2, "node_limit": _MOST_NODES},
    )
    if found.x is None:
        return None
    chosen = np.zeros(len(extra_w), dtype=np.bool_)
    chosen[order[found.x > 0.5]] = True
    # A solver's own tolerance is no reason to draw more than is allowed.
    if not headroom.carries(extra_w, chosen):
        return None
    return UsefulSet(chosen, _gap(chosen, utility, -float(found.mip_dual_bound)))
