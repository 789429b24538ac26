"""What every predictor of time and power offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from wattfleet.modes import ModeArray

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """Predicted time and power at `n` modes; the logarithms are taken as normally distributed.

    Attributes:
        minibatch_ms: `[n]` median milliseconds per minibatch.
        power_mw: `[n]` median board milliwatts while training.
        time_log_sd: `[n]` standard deviation of the logarithm of the time (0.03 is about 3 %).
        power_log_sd: `[n]` standard deviation of the logarithm of the power.
    """

    minibatch_ms: Values
    power_mw: Values
    time_log_sd: Values
    power_log_sd: Values

    def minibatch_ms_quantile(self, q: float) -> Values:
        """The time that is not exceeded with probability `q`, `[n]` ms."""
        return np.asarray(self.minibatch_ms * np.exp(ndtri(q) * self.time_log_sd))

    def power_mw_quantile(self, q: float) -> Values:
        """The power that is not exceeded with probability `q`, `[n]` mW."""
        return np.asarray(self.power_mw * np.exp(ndtri(q) * self.power_log_sd))


class Predictor(Protocol):
    """A fitted predictor of one workload on one device.

    How it is fitted is the class's own affair; what it saved, its class's `load` reads.
    """

    @property
    def name(self) -> str:
        """The kind of predictor, as manifests and command lines name it."""
        ...

    def predict(self, modes: ModeArray) -> Prediction:
        """Predict `[n, 4]` modes, measured or not."""
        ...

    def save(self) -> bytes:
        """The predictor in safetensors format; the same predictor gives the same bytes."""
        ...
