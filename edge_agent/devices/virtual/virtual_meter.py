"""The power meter of a virtual board, with the sampling artefacts of a real one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.device import PowerTrace
from edge_agent.devices.virtual.power_timeline import PowerTimeline
from wattfleet_io.clock import Clock

# From the Orin Nano's logs: the first sample is repeated, the second comes 0.7 s later, later ones 1.3 s
# apart (1.1 to 2.5 s by mode); settled samples scatter by 1.6 %, and one in twenty falls 3 to 20 % short.
_SECOND_SAMPLE_S = 0.7
_INTERVAL_S = 1.3
_INTERVAL_LOG_SD = 0.08
_SCATTER = 0.016
_DIP_SHARE = 0.05
_DIP_DEPTH = (0.03, 0.20)
_BLOCK = 64


class VirtualMeter:
    """Samples a board's power at irregular times from its start (a `PowerMeter`).

    Samples do not depend on when, or how often, they are read.

    Args:
        timeline: the board's power over time.
        clock: the device's clock.
        rng: the random number generator for times and scatter.

    Attributes:
        start_s: its start, seconds of the clock.
    """

    def __init__(self, timeline: PowerTimeline, clock: Clock, rng: np.random.Generator) -> None:
        self._timeline = timeline
        self._clock = clock
        self._rng = rng
        self._stopped: PowerTrace | None = None
        self.start_s = clock.now_s()
        self._at_s = np.array([self.start_s, self.start_s, self.start_s + _SECOND_SAMPLE_S])
        self._factor = np.repeat(self._factors(2), [2, 1])

    def read(self) -> PowerTrace:
        """Return the samples so far."""
        if self._stopped is not None:
            return self._stopped
        until_s = self._clock.now_s()
        while self._at_s[-1] <= until_s:
            gaps_s = _INTERVAL_S * np.exp(self._rng.normal(0, _INTERVAL_LOG_SD, _BLOCK))
            self._at_s = np.concatenate([self._at_s, self._at_s[-1] + np.cumsum(gaps_s)])
            self._factor = np.concatenate([self._factor, self._factors(_BLOCK)])
        seen = slice(int(np.searchsorted(self._at_s, until_s, side="right")))
        at_s = self._at_s[seen].copy()
        return PowerTrace(at_s, self._timeline.at(at_s) * self._factor[seen])

    def stop(self) -> PowerTrace:
        """Stop sampling and return all samples."""
        self._stopped = self.read()
        return self._stopped

    @property
    def is_stopped(self) -> bool:
        """Whether it no longer needs the timeline."""
        return self._stopped is not None

    def _factors(self, n: int) -> NDArray[np.float64]:
        """Return the ratios of `n` samples to the true power."""
        dips = np.where(self._rng.random(n) < _DIP_SHARE, self._rng.uniform(*_DIP_DEPTH, n), 0.0)
        return np.asarray((1 + self._rng.normal(0, _SCATTER, n)) * (1 - dips))
