"""Which modes to profile: first spread over the mode space, then along the predicted front.

Modes come back in descending order of their frequencies: Jetsons take a sweep downwards more reliably than
upwards (PowerTrain, doi:10.1016/j.future.2024.07.001, footnote to section 3.3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.front import pareto_front
from wattfleet.modes import ModeArray
from wattfleet.predictor import Prediction

# The fractional parts of k times these fill the unit cube in four dimensions evenly for every number of points:
# negative powers of the root of x^5 = x + 1 (the golden ratio's kin).
_STRIDES = 1.1673039782614187 ** -np.arange(1, 5)


def spread_modes(modes: ModeArray, count: int, seed: int) -> ModeArray:
    """Modes that fill the space evenly in the logarithms of the knobs, the highest among them.

    Args:
        modes: `[n, 4]` modes to choose from.
        count: how many; at least 1, at most n.
        seed: another seed, another choice.

    Returns:
        `[count, 4]` distinct modes in descending order.

    Raises:
        InvalidInputError: the count is out of range.
    """
    _check_count(count, len(modes))
    logs = np.log(modes)
    low, span = logs.min(axis=0), np.ptp(logs, axis=0)
    unit = (logs - low) / np.where(span > 0, span, 1.0)
    points = (np.random.default_rng(seed).random(4) + np.arange(1, count)[:, None] * _STRIDES) % 1.0
    free = np.ones(len(modes), dtype=bool)
    for point in (np.ones(4), *points):
        distance = ((unit - point) ** 2).sum(axis=1)
        free[np.where(free, distance, np.inf).argmin()] = False
    return descending(modes[~free])


def front_modes(prediction: Prediction, modes: ModeArray, already: ModeArray, count: int) -> ModeArray:
    """The unmeasured modes that would be chosen under budgets spread evenly along the predicted front.

    Args:
        prediction: what is predicted for `modes`.
        modes: `[n, 4]` modes to choose from.
        already: `[k, 4]` modes that have been measured.
        count: how many; fewer come back where fewer are left.

    Returns:
        Up to `[count, 4]` distinct modes in descending order.

    Raises:
        InvalidInputError: the count is below 1.
    """
    _check_count(count, len(modes) + count)
    time, power = prediction.minibatch_ms, prediction.power_mw
    measured = {tuple(row) for row in already.tolist()}
    free = np.array([tuple(row) not in measured for row in modes.tolist()])
    count = min(count, int(free.sum()))
    front_power = power[pareto_front(time, power)]
    chosen = np.zeros(len(modes), dtype=bool)
    for budget in np.linspace(front_power.max(), front_power.min(), count):
        candidates = np.flatnonzero(free & ~chosen)
        affordable = candidates[power[candidates] <= budget]
        # Below the cheapest unmeasured mode nothing is affordable: that mode is then the nearest to the front.
        pick = affordable[time[affordable].argmin()] if len(affordable) else candidates[power[candidates].argmin()]
        chosen[pick] = True
    return descending(modes[chosen])


def descending(modes: ModeArray) -> ModeArray:
    """Modes ordered from high to low: by CPU, then GPU, then memory frequency, then cores; `[n, 4]`."""
    cores, cpu, gpu, mem = modes.T
    order: NDArray[np.intp] = np.lexsort((cores, mem, gpu, cpu))[::-1]
    return np.asarray(modes[order])


def _check_count(count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise InvalidInputError(f"{count} modes cannot be chosen: give a number from 1 to {most}")
