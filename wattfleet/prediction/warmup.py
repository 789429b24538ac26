"""Warm-up: the time that a training's first minibatch takes beyond a steady minibatch.

The first minibatch of a process loads libraries, selects kernels and fills caches, which is CPU work. In the logged
runs of an Orin Nano it takes about 7e9 CPU cycles, regardless of the other knobs. A training of `n` minibatches
therefore takes the warm-up and `n` steady minibatches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattfleet.modes import ModeArray, PowerMode

_CPU_KHZ = PowerMode._fields.index("cpu_khz")

Values = NDArray[np.float64]


def first_minibatch_gcycles(modes: ModeArray, first_minibatch_ms: Values) -> float:
    """CPU cycles of a device's first minibatch, in units of 1e9: the median over modes, 0 if none was measured.

    Args:
        modes: `[n, 4]` measured modes.
        first_minibatch_ms: `[n]` milliseconds of the first minibatch in each mode.
    """
    return float(np.median(first_minibatch_ms / 1e3 * modes[:, _CPU_KHZ] / 1e6)) if len(modes) else 0.0


def warmup_s(modes: ModeArray, minibatch_ms: Values, first_gcycles: float) -> Values:
    """Seconds of warm-up, `[n]`, not below 0.

    Args:
        modes: `[n, 4]` modes.
        minibatch_ms: `[n]` milliseconds of their steady minibatches.
        first_gcycles: the device's value of `first_minibatch_gcycles`.
    """
    return np.maximum(first_gcycles / (modes[:, _CPU_KHZ] / 1e6) - minibatch_ms / 1e3, 0.0)


def first_minibatch_s(mode: PowerMode, first_gcycles: float) -> float:
    """Seconds of CPU work in a training's first minibatch.

    Args:
        mode: the mode of the training.
        first_gcycles: the device's value of `first_minibatch_gcycles`.
    """
    return first_gcycles / (mode.cpu_khz / 1e6)


def steady_minibatch_s(training_s: float, minibatches: float, first_s: float) -> float | None:
    """Seconds of a steady minibatch, from the time of a whole training without its warm-up.

    Args:
        training_s: seconds of the whole training.
        minibatches: number of minibatches of the training.
        first_s: the value of `first_minibatch_s`.

    Returns:
        None if the first minibatch may have taken half of the training or more. The rest is then too short for an
        estimate.
    """
    if training_s <= 2 * first_s:
        return None
    if training_s >= minibatches * first_s:
        return training_s / minibatches  # no visible warm-up
    return (training_s - first_s) / (minibatches - 1)
