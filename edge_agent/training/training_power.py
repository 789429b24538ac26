"""The mean power of a training."""

from __future__ import annotations

import numpy as np

from edge_agent.devices.device import PowerTrace
from wattfleet.errors import WattfleetError

MAX_SILENCE_S = 3.0
"""A working power meter delivers samples within this time, s."""

MIN_SAMPLES = 2
"""Minimum number of samples for a mean."""

# With fewer samples, the mean would depend on the moments at which the rails were read.
_MIN_SHARE_READ = 0.5


class PowerNotReadError(WattfleetError):
    """Too few power samples could be read during the training, so no power is reported."""


def mean_power_w(trace: PowerTrace, begun_s: float, ended_s: float) -> float | None:
    """Return the mean power of a training, W; None if it ended before there were enough samples.

    Args:
        trace: power samples of the training.
        begun_s: when the training began, device-clock seconds.
        ended_s: when it ended.

    Raises:
        PowerNotReadError: too many samples are missing.
    """
    during = trace.at_s >= begun_s
    # A running board draws power, so 0 W means that the rail was not read.
    was_read = during & np.isfinite(trace.power_mw) & (trace.power_mw > 0)
    # A sampler without a new value repeats the last one.
    read_at_s = np.unique(trace.at_s[was_read])
    taken, read, lasted_s = int(during.sum()), int(was_read.sum()), ended_s - begun_s
    silent_s = float(np.diff(read_at_s, prepend=begun_s, append=ended_s).max())
    enough = len(read_at_s) >= MIN_SAMPLES
    if not enough and 0 < taken == read and lasted_s < MAX_SILENCE_S:
        return None
    # A meter that has stopped leaves a gap instead of missing samples.
    silent = silent_s > max(MAX_SILENCE_S, (1 - _MIN_SHARE_READ) * lasted_s)
    if not enough or read < _MIN_SHARE_READ * taken or silent:
        raise PowerNotReadError(
            f"power was read only {read} of {taken} times in {lasted_s:.0f} s, with a gap of {silent_s:.0f} s: check"
            " the power rails"
        )
    return float(np.mean(trace.power_mw[was_read])) / 1e3
