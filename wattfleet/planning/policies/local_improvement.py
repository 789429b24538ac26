"""Local search for a better set of devices that the supplies can power, by changes of one device at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from wattfleet.planning.curves import Indices, Values
from wattfleet.planning.headroom import Headroom


def improved(
    level: Indices,
    extra_w: Values,
    headroom: Headroom,
    places: int,
    rate: Callable[[Indices], float],
) -> Indices:
    """The local optimum that is reached from a set by adding, removing or replacing a device, or changing its work.

    The time grows with the square of the number of devices, so it is meant for small fleets.

    Args:
        level: `[n]` index of each device's work, the initial set; -1 for a device that is not in the set.
        extra_w: `[o, n]` watts above idle that each device needs for each kind of work; infinite if it cannot do it.
        headroom: headroom of the supplies.
        places: maximum number of devices.
        rate: the objective to maximize, as a function of `level`.

    Returns:
        The improved set, `[n]` as `level`.
    """
    best, most = level, rate(level)
    while True:
        tried = max(
            (step for step in _steps(best, extra_w) if _fits(step, extra_w, headroom, places)), key=rate, default=best
        )
        if (reached := rate(tried)) <= most * (1 + 1e-9):
            return best
        best, most = tried, reached


def _steps(level: Indices, extra_w: Values) -> Iterator[Indices]:
    """The sets that differ in one device, or in two where one replaces the other."""
    removals = [level] + [_with(level, device, -1) for device in map(int, np.flatnonzero(level >= 0))]
    yield from removals[1:]
    for start in removals:
        for work, watts in enumerate(extra_w):
            for device in map(int, np.flatnonzero(np.isfinite(watts) & (start != work))):
                yield _with(start, device, work)


def _with(level: Indices, device: int, work: int) -> Indices:
    changed = level.copy()
    changed[device] = work
    return changed


def _fits(level: Indices, extra_w: Values, headroom: Headroom, places: int) -> bool:
    chosen = level >= 0
    if np.count_nonzero(chosen) > places:
        return False
    watts = np.where(chosen, extra_w[np.maximum(level, 0), np.arange(len(level))], 0.0)
    return headroom.can_supply(watts, chosen)
