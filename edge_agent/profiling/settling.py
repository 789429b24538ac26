"""Selects the values to use: the minibatches after the first, and power once it has settled.

Power rises over 2 to 3 s when training begins, single samples are a fifth too low, samplers repeat their first sample,
and a rail that cannot be read leaves a gap. From the raw logs of the PowerTrain measurements, the rules reproduce the
published tables (doi:10.1016/j.future.2024.07.001, section 2.5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.device import PowerTrace

# Number of consecutive samples that make a level.
_WINDOW = 3
# Largest relative difference of the first settled sample, and of its window's median, from the median of all later
# samples. On the 26 raw logs, 0.12 to 0.2 gives exactly the tables' values; a stalling loader makes power vary as much.
_TOLERANCE = 0.12
RISE_S = 2.0
"""Until this time after the start of a training, power is still rising, however flat it looks, s."""
# Converts a median absolute deviation to the standard deviation of a normal distribution, and that of single values to
# that of the median of many.
_MAD_TO_SD, _SD_OF_MEDIAN = 1.4826, 1.2533


@dataclass(frozen=True)
class Settled:
    """A settled quantity.

    Attributes:
        median: the median, in the quantity's unit.
        spread: robust standard deviation of single values, as a share of the median.
        count: number of values.
    """

    median: float
    spread: float
    count: int

    @property
    def error(self) -> float:
        """Standard error of the median, as a share of it."""
        return _SD_OF_MEDIAN * self.spread / math.sqrt(self.count)


def settled_minibatch_ms(minibatch_ms: NDArray[np.float64]) -> Settled:
    """Return the time of a minibatch, ms, from the times of `[k]` successive minibatches of one training, k >= 2.

    The first one, in which kernels are chosen and caches filled, is dropped.
    """
    if len(minibatch_ms) < 2:
        raise ValueError(f"{len(minibatch_ms)} minibatches: at least 2 are needed, as the first one is not used")
    return _summary(minibatch_ms[1:])


def settled_power_mw(trace: PowerTrace, *minibatch_end_s: NDArray[np.float64]) -> Settled | None:
    """Return the training power, mW, or None if it has not settled yet.

    Args:
        trace: power samples; NaN is a missing one.
        minibatch_end_s: for each run of minibatches without a pause, `[k]` device-clock seconds at which they ended; k
            >= 1.
    """
    # A sampler repeats its last sample until it has a new one.
    new = np.diff(trace.at_s, prepend=-np.inf) > 0
    training = np.zeros(len(trace.at_s), dtype=bool)
    for run_s in minibatch_end_s:
        training |= (trace.at_s > run_s[0] + RISE_S) & (trace.at_s <= run_s[-1])
    power_mw = trace.power_mw[new & training & np.isfinite(trace.power_mw)]
    for first in range(len(power_mw) - _WINDOW + 1):
        level = np.median(power_mw[first:])
        onset = np.array([power_mw[first], np.median(power_mw[first : first + _WINDOW])])
        if (np.abs(onset / level - 1) <= _TOLERANCE).all():
            return _summary(power_mw[first:])
    return None


def level_mw(trace: PowerTrace) -> Settled | None:
    """Return the power of a trace without transients, mW, or None if too few samples could be read."""
    new = np.diff(trace.at_s, prepend=-np.inf) > 0
    power_mw = trace.power_mw[new & np.isfinite(trace.power_mw)]
    return _summary(power_mw) if len(power_mw) >= _WINDOW else None


def _summary(values: NDArray[np.float64]) -> Settled:
    median = float(np.median(values))
    return Settled(median, _MAD_TO_SD * float(np.median(np.abs(values - median))) / median, len(values))
