"""Estimates in advance how long measuring a mode takes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_agent.profiling.mode_measurement import DEFAULT_SETTINGS, ProfilerSettings
from edge_agent.profiling.settling import RISE_S
from wattfleet.modes import ModeArray
from wattfleet.prediction import warmup_s

Values = NDArray[np.float64]

# Both from the logs of an Orin Nano: CPU cycles of a first minibatch, in units of 1e9, and the seconds between two
# samples of power (1.1 to 2.5, depending on the mode).
_FIRST_GCYCLES = 7.0
_SAMPLE_S = 1.3
# Minibatches until the median is known: on average 24 on the raw logs of the Orin Nano (10 in most modes with steady
# times, and 40 where they vary by more than 4 %), and 19 to 21 on simulated boards.
_USUAL_MINIBATCHES = 20


def measuring_s(
    modes: ModeArray,
    minibatch_ms: Values,
    settings: ProfilerSettings = DEFAULT_SETTINGS,
    first_gcycles: float = _FIRST_GCYCLES,
) -> Values:
    """Return the seconds to measure each mode, `[n]`: a warm-up minibatch, then until time and power are known.

    Fast modes wait for their power samples, which are used once the power has risen. Disturbed measurements, times that
    vary much, and the start of the workload take additional time.

    Args:
        modes: `[n, 4]` modes.
        minibatch_ms: `[n]` milliseconds of a minibatch in each mode.
        settings: how long each mode is measured.
        first_gcycles: CPU cycles of the warm-up minibatch, in units of 1e9; 0 if the app has trained for a while.
    """
    minibatch_s = minibatch_ms / 1e3
    usual = min(max(_USUAL_MINIBATCHES, settings.fewest_minibatches), settings.minibatches)
    first_s = minibatch_s + warmup_s(modes, minibatch_ms, first_gcycles)
    return first_s + np.maximum(usual * minibatch_s, RISE_S + settings.power_samples * _SAMPLE_S)
