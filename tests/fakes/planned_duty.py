"""A device with three modes whose inference and training are known, and its plans beside a duty."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edge_agent.learning.fitting import FittedModes
from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_planning import DutyPlanning
from edge_agent.serving.inference import InferenceRows
from edge_agent.serving.turns import LiveTimes
from wattfleet.choosing import Front
from wattfleet.duties import ConstantArrivals, Duty
from wattfleet.modes import PowerMode, Profile, Workload, array_to_modes, modes_to_array
from wattfleet.prediction import Prediction

SLOW = PowerMode(8, 2_000_000, 250_000_000, 3_000_000_000)
HALF = PowerMode(8, 2_000_000, 500_000_000, 3_000_000_000)
FAST = PowerMode(8, 2_000_000, 1_000_000_000, 3_000_000_000)
MODES = modes_to_array([SLOW, HALF, FAST])
NONE = np.zeros(3)
TRAINING = Prediction(np.array([80.0, 40.0, 20.0]), np.array([5e3, 9e3, 15e3]), NONE, NONE)
KNOWN = KnownWorkload(Workload("digits"), 100)


class Planning(DutyPlanning):
    """Inference takes 40, 20 and 10 ms a request in the three modes; counts the predictions."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.turns, self.rows = DeviceTurns(lambda: self.now_s), InferenceRows(folder)
        self.times: LiveTimes = self.turns._turns.times  # noqa: SLF001 - the times that the turns observe
        super().__init__(self.turns, self.rows, MODES)
        self.turns.judge = self.judge
        self.fit = self.predict
        self.fits: list[tuple[str, tuple[int, ...], int]] = []

    def predict(self, workload: str, batches: tuple[int, ...], rows: Profile) -> Mapping[int, Prediction]:
        self.fits.append((workload, batches, len(rows)))
        power_mw = np.array([4e3, 7e3, 20e3])
        return {batch: Prediction(np.array([40.0, 20.0, 10.0]) * batch, power_mw, NONE, NONE) for batch in batches}

    def front(self) -> Front:
        fitted = FittedModes(MODES, TRAINING, {}, KNOWN)
        return fitted.front(KNOWN, np.ones(3, dtype=bool), 0.0, self.beside)[0]

    def modes_of_front(self) -> set[PowerMode]:
        return set(array_to_modes(self.front().modes))


def duty(latency_ms: float, per_s: float = 1.0) -> Duty:
    return Duty("camera", ConstantArrivals(per_s), latency_ms)
