"""A fitting that predicts every batch size that a plan may choose, from times and power given by a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from edge_agent.learning.fitting import Fitted, Fitting
from edge_agent.profiling.known_workload import KnownWorkload
from wattfleet.choosing import SamplingSettings
from wattfleet.modes import ModeArray, Profile
from wattfleet.prediction import Prediction

POWER_LOG_SD = 0.01
TIME_LOG_SD = 0.02


@dataclass
class Table:
    """The time per minibatch and the power of each mode for each batch size.

    Attributes:
        minibatch_ms: `[n]` milliseconds by batch size.
        power_mw: `[n]` milliwatts by batch size.
        fits: the number of fits so far.
    """

    minibatch_ms: Mapping[int, np.ndarray]
    power_mw: Mapping[int, np.ndarray]
    fits: int = 0

    @classmethod
    def drawn(cls, seed: int, modes: int, batches: tuple[int, ...]) -> Table:
        """Modes whose power rises with their speed, so that no mode and no batch size is best in every respect."""
        rng = np.random.default_rng(seed)
        speed = {batch: rng.uniform(1, 10, modes) for batch in batches}
        times = {batch: 200 * np.sqrt(batch) / speed[batch] for batch in batches}
        return cls(times, {batch: 4e3 * speed[batch] * rng.uniform(0.8, 1.25, modes) for batch in batches})

    def prediction(self, batch: int) -> Prediction:
        n = len(self.power_mw[batch])
        times, watts = self.minibatch_ms[batch], self.power_mw[batch]
        return Prediction(times, watts, np.full(n, TIME_LOG_SD), np.full(n, POWER_LOG_SD))

    def opener(self) -> Callable[[KnownWorkload], AbstractContextManager[Fitting]]:
        """Opens fittings to what is known of a workload."""
        return lambda known: nullcontext(_Fitting(self, known))


@dataclass
class _Fitting:
    table: Table
    known: KnownWorkload

    def fit(self, profile: Profile, measured_modes: int) -> Fitted:
        self.table.fits += 1
        workload = self.known.workload
        chosen = self.known.offered_batches
        own = self.table.prediction(workload.facts.batch or min(self.table.power_mw))
        by_batch = {batch: self.table.prediction(batch) for batch in chosen}
        return Fitted(None, own, by_batch)  # type: ignore[arg-type] # never stored

    def next_modes(self, profile: Profile, settings: SamplingSettings, exclude: ModeArray) -> ModeArray:
        return np.empty((0, 4))
