"""How much slower a batch can become in another power mode, by the clocks alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattfleet.modes import ModeArray, PowerMode


def largest_slowdown(measured: PowerMode, other: PowerMode) -> float:
    """The factor by which any work may at most take longer in another mode than in the measured one.

    Work that needs the CPU, the GPU and the memory in any shares, at the same time or in turn, slows down at most as
    much as the part that slows down most. Work on the CPU may use all cores. Below 1 where every clock is higher.

    Args:
        measured: the mode in which the time is known.
        other: the mode in which it is asked for.
    """
    cpu = measured.cpu_khz / other.cpu_khz
    cores = max(1.0, measured.cores / other.cores)
    return max(cpu * cores, measured.gpu_hz / other.gpu_hz, measured.mem_hz / other.mem_hz)


def largest_slowdowns(measured: PowerMode, others: ModeArray) -> NDArray[np.float64]:
    """`largest_slowdown` of `[n, 4]` other modes, `[n]`."""
    cores, cpu, gpu, mem = (np.array(measured, dtype=np.float64) / others).T
    return np.asarray(np.maximum.reduce([cpu * np.maximum(1.0, cores), gpu, mem]))
