"""How long a mode takes to measure, before it is measured."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_agent.profiling.mode_measurement import DEFAULT_SETTINGS, ProfilerSettings
from edge_agent.profiling.settling import RISE_S

Values = NDArray[np.float64]

# Between two samples of a Jetson's power: 1.3 s on average in the logs of an Orin Nano (1.1 to 2.5 s by mode).
_SAMPLE_S = 1.3


def measuring_s(minibatch_ms: Values, settings: ProfilerSettings = DEFAULT_SETTINGS) -> Values:
    """Seconds to measure modes, `[n]`: one minibatch as a warm-up, and then until time and power are known.

    Fast modes wait for their power samples, which count once the power has risen. Disturbed measurements and the start
    of the workload come on top.

    Args:
        minibatch_ms: `[n]` milliseconds of a minibatch in each mode.
        settings: how long each mode is measured.
    """
    first_s = minibatch_ms / 1e3
    return first_s + np.maximum(settings.minibatches * first_s, RISE_S + settings.power_samples * _SAMPLE_S)
