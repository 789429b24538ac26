"""The least time in which so many devices can be done on the supplies' watts, exactly.

For a given time every device needs its thriftiest mode that is done by then, and the supplies carry the most devices if
they carry the cheapest. As that need only falls when the time grows, the least time is found by bisection over the
times of all modes (docs/planning.md has the proof).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wattfleet.planning.curves import Curves, Indices, Mask
from wattfleet.planning.headroom import Headroom

_FEW = 4096
_SAMPLE = 31


@dataclass(frozen=True)
class Allocation:
    """Who trains, at which step of its curve.

    Attributes:
        limit_s: seconds of training within which all chosen devices are done.
        step: `[n]` the steps of the chosen devices; -1 for all others.
    """

    limit_s: float
    step: Indices


def min_makespan(curves: Curves, headroom: Headroom, count: int, eligible: Mask, first: Mask) -> Allocation | None:
    """The allocation in which `count` devices are done soonest; if the watts carry fewer, as many as they carry.

    Args:
        curves: of all devices.
        headroom: of the supplies.
        count: devices wanted.
        eligible: `[n]` devices that may be taken.
        first: `[n]` devices to be taken before any other, `count` of them at most.

    Returns:
        None where not one device can be carried.
    """

    def tried(step: Indices, in_order: bool = True) -> Indices:
        extra_w = np.where(eligible, curves.extra_at(step), np.inf)
        return headroom.carried(extra_w, first if first.any() else None, in_order)

    low, high = curves.start[:-1] - 1, curves.start[1:] - 1
    most = tried(high)[:count]
    if not len(most):
        return None
    count, due = len(most), most[first[most]]

    def enough(step: Indices) -> bool:
        chosen = tried(step, in_order=False)
        return len(chosen) >= count and int(np.count_nonzero(first[chosen])) >= len(due)

    limit_s = _least_time(curves, low, np.where(eligible, high, low), enough)
    step = curves.steps_within(limit_s)
    taken = tried(step)[:count]
    chosen = np.full(len(curves), -1, dtype=np.intp)
    chosen[taken] = step[taken]
    return Allocation(limit_s, chosen)


def _least_time(curves: Curves, low: Indices, high: Indices, enough: Callable[[Indices], bool]) -> float:
    """The least time that is enough, among those of the steps above `low` up to `high`, the last of which is.

    Each pivot is the median of some times drawn at random, which leaves about half of them: the number of rounds is
    logarithmic, however the times are distributed, and no list of all of them is ever sorted.
    """
    draw = np.random.default_rng(0)
    while (left := int((high - low).sum())) > _FEW:
        counts = np.cumsum(high - low)
        drawn = np.sort(draw.integers(left, size=_SAMPLE))
        device = np.searchsorted(counts, drawn, side="right")
        pivot_s = float(np.median(curves.time_s[high[device] - (counts[device] - 1 - drawn)]))
        step = curves.steps_within(pivot_s, low, high)
        if enough(step):
            if (step == high).all():
                break
            high = step
        else:
            low = step
    return _least_of_few(curves, low, high, enough)


def _least_of_few(curves: Curves, low: Indices, high: Indices, enough: Callable[[Indices], bool]) -> float:
    counts = high - low
    offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    times_s = np.unique(curves.time_s[np.repeat(low + 1, counts) + offsets])
    left, right = 0, len(times_s) - 1
    while left < right:
        middle = (left + right) // 2
        if enough(curves.steps_within(float(times_s[middle]), low, high)):
            right = middle
        else:
            left = middle + 1
    return float(times_s[left])
