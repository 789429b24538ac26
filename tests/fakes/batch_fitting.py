"""A fitting whose power and times are functions of the batch size and the mode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_agent.learning.fitting import Fitted
from wattfleet.choosing import SamplingSettings
from wattfleet.modes import ModeArray, Profile, array_to_modes, modes_to_array
from wattfleet.prediction import Prediction

POWER_LOG_SD = 0.01


@dataclass
class BatchFitting:
    """Predicts the times and power that it is constructed with (a `Fitting`).

    Attributes:
        modes: `[n, 4]` modes of the device.
        power_mw: `[n]` milliwatts.
        minibatch_ms: `[n]` milliseconds.
        measures: whether it requests modes to be measured.
    """

    modes: ModeArray
    power_mw: np.ndarray
    minibatch_ms: np.ndarray
    measures: bool = True

    def fit(self, profile: Profile, measured_modes: int) -> Fitted:
        sd = np.full(len(self.modes), POWER_LOG_SD)
        predicted = Prediction(self.minibatch_ms, self.power_mw, sd, sd)
        return Fitted(None, predicted)  # type: ignore[arg-type] # never stored

    def next_modes(self, profile: Profile, settings: SamplingSettings, exclude: ModeArray) -> ModeArray:
        if not self.measures:
            return self.modes[:0]
        excluded = set(array_to_modes(exclude))
        return modes_to_array([mode for mode in array_to_modes(self.modes) if mode not in excluded])
