"""The power of a virtual board over time, which approaches its level as on real boards."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

# The Orin Nano's logs (`orin_nano_resnet18_telemetry`): the first sample after training began, 0.7 s on
# average, is at about 60 % of the rise from idle, a sample at 2 s at about 90 %, one at 3 s at the full level.
_RESPONSE_S = 0.8


class PowerTimeline:
    """Board power over time: piecewise constant targets, each approached exponentially.

    Args:
        start_s: time from which power is known, s.
        power_mw: power at that time, mW.
    """

    def __init__(self, start_s: float, power_mw: float) -> None:
        self._start_s = [start_s]
        self._target_mw = [power_mw]
        self._initial_mw = [power_mw]

    def aim(self, from_s: float, target_mw: float) -> None:
        """Approach `target_mw` from `from_s` on, replacing all later targets."""
        initial_mw = float(self.at(np.array([from_s]))[0])
        while self._start_s and self._start_s[-1] >= from_s:
            self._start_s.pop(), self._target_mw.pop(), self._initial_mw.pop()
        if self._target_mw and self._target_mw[-1] == target_mw:
            return
        self._start_s.append(from_s)
        self._target_mw.append(target_mw)
        self._initial_mw.append(initial_mw)

    def forget_before(self, moment_s: float) -> None:
        """Forget targets that no longer affect power after a given time, to save memory during weeks of training."""
        past = max(0, bisect_right(self._start_s, moment_s) - 1)
        del self._start_s[:past], self._target_mw[:past], self._initial_mw[:past]

    def at(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the power at `[n]` times from the start on, `[n]` mW."""
        start_s = np.array(self._start_s)
        piece = np.maximum(np.searchsorted(start_s, times_s, side="right") - 1, 0)
        target = np.array(self._target_mw)[piece]
        initial = np.array(self._initial_mw)[piece]
        return np.asarray(target + (initial - target) * np.exp(-(times_s - start_s[piece]) / _RESPONSE_S))
