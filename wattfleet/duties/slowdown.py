"""An upper bound of a batch's slowdown in another power mode, from the clocks alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattfleet.modes import ModeArray, PowerMode


def largest_slowdown(measured: PowerMode, other: PowerMode) -> float:
    """The largest factor by which any work can take longer in another mode than in the measured one.

    Work that needs the CPU, the GPU and the memory in any proportion, at the same time or in turn, slows down at most
    as much as the part that slows down most. Work on the CPU may use all cores. Below 1 where every clock is higher.

    Args:
        measured: the mode in which the time is known.
        other: the mode to bound the time in.
    """
    cpu = measured.cpu_khz / other.cpu_khz
    cores = max(1.0, measured.cores / other.cores)
    return max(cpu * cores, measured.gpu_hz / other.gpu_hz, measured.mem_hz / other.mem_hz)


def largest_slowdowns(measured: PowerMode, others: ModeArray) -> NDArray[np.float64]:
    """The results of `largest_slowdown` for `[n, 4]` other modes, `[n]`."""
    cores, cpu, gpu, mem = (np.array(measured, dtype=np.float64) / others).T
    return np.asarray(np.maximum.reduce([cpu * np.maximum(1.0, cores), gpu, mem]))
