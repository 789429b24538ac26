"""What a board drew while it trained."""

from __future__ import annotations

import numpy as np

from edge_agent.devices.device import PowerTrace
from wattfleet.errors import WattfleetError

LISTENED_FOR_S = 3.0
"""Seconds within which a power meter that works is heard of."""

FEWEST_READ = 2
"""Samples that make a mean."""

# Where more is missing than was read, the mean tells when the rails answered rather than what the board drew.
_LEAST_READ = 0.5


class PowerNotReadError(WattfleetError):
    """Too little of the power could be read while training; missing is not zero, so nothing is reported."""


def mean_power_w(trace: PowerTrace, begun_s: float, ended_s: float) -> float | None:
    """Mean watts of a training; None where it ended before there were enough samples.

    Args:
        trace: sampled while it lasted.
        begun_s: when it began, device-clock seconds.
        ended_s: when it ended.

    Raises:
        PowerNotReadError: too much of it is missing.
    """
    during = trace.at_s >= begun_s
    # A board that runs draws some power, so that 0 W is a rail that was not read.
    was_read = during & np.isfinite(trace.power_mw) & (trace.power_mw > 0)
    # A sampler that has nothing new repeats itself.
    read_at_s = np.unique(trace.at_s[was_read])
    taken, read, lasted_s = int(during.sum()), int(was_read.sum()), ended_s - begun_s
    silent_s = float(np.diff(read_at_s, prepend=begun_s, append=ended_s).max())
    enough = len(read_at_s) >= FEWEST_READ
    if not enough and 0 < taken == read and lasted_s < LISTENED_FOR_S:
        return None
    # A meter that has stopped altogether leaves no missing samples, but silence.
    silent = silent_s > max(LISTENED_FOR_S, (1 - _LEAST_READ) * lasted_s)
    if not enough or read < _LEAST_READ * taken or silent:
        raise PowerNotReadError(
            f"power was read only {read} of {taken} times in {lasted_s:.0f} s, and for {silent_s:.0f} s not once: check"
            " the power rails"
        )
    return float(np.mean(trace.power_mw[was_read])) / 1e3
