"""A training's start: what its first minibatch takes beyond the steady pace of those that follow.

The first minibatch of a process loads libraries, chooses kernels and fills caches, which is work of the CPU: in the
logged runs of an Orin Nano it takes about 7e9 cycles of it, whatever the other knobs. A training of `n` minibatches
thus takes its start and `n` times its steady minibatch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattfleet.modes import ModeArray, PowerMode

_CPU_KHZ = PowerMode._fields.index("cpu_khz")

Values = NDArray[np.float64]


def first_minibatch_gcycles(modes: ModeArray, first_minibatch_ms: Values) -> float:
    """CPU cycles of a device's first minibatches, in units of 1e9: the median over modes, 0 where none was measured.

    Args:
        modes: `[n, 4]` measured modes.
        first_minibatch_ms: `[n]` milliseconds of the first minibatch in each.
    """
    return float(np.median(first_minibatch_ms / 1e3 * modes[:, _CPU_KHZ] / 1e6)) if len(modes) else 0.0


def warmup_s(modes: ModeArray, minibatch_ms: Values, first_gcycles: float) -> Values:
    """`[n]` seconds of the start, not below 0.

    Args:
        modes: `[n, 4]` modes.
        minibatch_ms: `[n]` milliseconds of their steady minibatches.
        first_gcycles: the device's, as `first_minibatch_gcycles` finds them.
    """
    return np.maximum(first_gcycles / (modes[:, _CPU_KHZ] / 1e6) - minibatch_ms / 1e3, 0.0)


def first_minibatch_s(mode: PowerMode, first_gcycles: float) -> float:
    """Seconds of a training's first minibatch, as far as it is the CPU's work.

    Args:
        mode: the mode of the training.
        first_gcycles: the device's, as `first_minibatch_gcycles` finds them.
    """
    return first_gcycles / (mode.cpu_khz / 1e6)


def steady_minibatch_s(training_s: float, minibatches: float, first_s: float) -> float | None:
    """Seconds of a whole training's steady minibatch, its start left out as `warmup_s` has it.

    Args:
        training_s: what all of it took.
        minibatches: of the training.
        first_s: what `first_minibatch_s` says.

    Returns:
        None where the first minibatch may have taken half of the training or more: little is told of the others then.
    """
    if training_s <= 2 * first_s:
        return None
    if training_s >= minibatches * first_s:
        return training_s / minibatches  # the first one is as the others
    return (training_s - first_s) / (minibatches - 1)
