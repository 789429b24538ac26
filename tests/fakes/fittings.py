"""Fittings in the test's own process: real ones, and ones that predict what a test states."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_agent.learning.fitting import Fitted, Fitting, FittingHere
from edge_agent.learning.transfer import Transfer
from edge_agent.profiling.known_workload import KnownWorkload
from wattfleet.core.choosing import SamplingSettings
from wattfleet.core.duties import ModesWithDuty, keep_duty
from wattfleet.core.modes import ModeArray, Profile, array_to_modes, modes_to_array
from wattfleet.core.prediction import Prediction, Predictor

# --- Fitting here -----------------------------------------------------------------------------------------------------
# Runs in the test's own process the computations for which an agent starts low-priority processes.


def fitting_here(
    transfer: Transfer, modes: ModeArray, stopping: threading.Event
) -> Callable[[], nullcontext[FittingHere]]:
    """Replaces `fitting_process`, so that no process is started for each round."""
    fitting = FittingHere(transfer, modes)
    return lambda: nullcontext(fitting)


def fitting_once(
    transfer: Transfer, modes: ModeArray, stopping: threading.Event
) -> Callable[[], nullcontext[FittingHere]]:
    """Replaces `fitting_process` where it does not matter how well a predictor fits."""
    fitting = FittingOnce(transfer, modes)
    return lambda: nullcontext(fitting)


class FittingOnce(FittingHere):
    """Fits to the first profile only, for tests that train often."""

    _first: Predictor | None = None
    _first_fit: Fitted | None = None

    def fit(self, profile: Profile, measured_modes: int) -> Fitted:
        """The first fit."""
        if self._first_fit is None:
            self._first_fit = super().fit(profile, measured_modes)
        return self._first_fit

    def _fitted(self, profile: Profile) -> Predictor:
        if self._first is None:
            self._first = super()._fitted(profile)
        return self._first


def keep_duty_here(is_stopping: Callable[[], bool], *arguments: Any) -> ModesWithDuty:
    """Replaces `keep_duty_in_process`."""
    return keep_duty(*arguments)


# --- Batch fitting ----------------------------------------------------------------------------------------------------
# A fitting whose power and times are functions of the batch size and the mode.

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


# --- Fitting of batches -----------------------------------------------------------------------------------------------
# A fitting that predicts every batch size that a plan may choose, from times and power given by a test.

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
