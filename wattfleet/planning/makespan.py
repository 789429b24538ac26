"""The exact minimal makespan: the least time in which a number of devices can finish within the supplies' budgets.

For a given time, every device needs its lowest-power mode that finishes in time, and the supplies power the most
devices if they take those with the least power. This power never rises as the time grows, so bisection over the times
of all modes finds the least time (docs/planning.md has the proof).
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
    """The selected devices and the step of each on its power curve.

    Attributes:
        limit_s: seconds of training within which all selected devices finish.
        step: `[n]` steps of the selected devices; -1 for all others.
    """

    limit_s: float
    step: Indices


def min_makespan(curves: Curves, headroom: Headroom, count: int, eligible: Mask, priority: Mask) -> Allocation | None:
    """The allocation of `count` devices with the least makespan; of fewer if the supplies cannot power as many.

    Args:
        curves: power curves of all devices.
        headroom: headroom of the supplies.
        count: number of devices to select.
        eligible: `[n]` devices that may be selected.
        priority: `[n]` devices to select before all others, `count` of them at most.

    Returns:
        The allocation; None if the supplies cannot power a single device.
    """

    def largest_set(step: Indices, stable: bool = True) -> Indices:
        extra_w = np.where(eligible, curves.extra_at(step), np.inf)
        return headroom.largest_set(extra_w, priority if priority.any() else None, stable)

    low, high = curves.start[:-1] - 1, curves.start[1:] - 1
    most = largest_set(high)[:count]
    if not len(most):
        return None
    count, priority_count = len(most), int(np.count_nonzero(priority[most]))

    def enough(step: Indices) -> bool:
        chosen = largest_set(step, stable=False)
        return len(chosen) >= count and int(np.count_nonzero(priority[chosen])) >= priority_count

    limit_s = _least_time(curves, low, np.where(eligible, high, low), enough)
    step = curves.steps_within(limit_s)
    taken = largest_set(step)[:count]
    chosen = np.full(len(curves), -1, dtype=np.intp)
    chosen[taken] = step[taken]
    return Allocation(limit_s, chosen)


def _least_time(curves: Curves, low: Indices, high: Indices, enough: Callable[[Indices], bool]) -> float:
    """The least sufficient time among the times of the steps after `low` up to `high`. `high` must be sufficient.

    Each pivot is the median of a random sample of the times, so it removes about half of them. The number of
    iterations is logarithmic for any distribution of times, and the list of all times is never sorted.
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
