"""Measures random modes, then chooses by predictions alone, as PowerTrain does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.modes import PowerMode, array_to_modes
from wattfleet_evaluation.choice_methods.choice_method import Choose
from wattfleet_evaluation.choice_methods.measurement_session import MeasurementSession
from wattfleet_evaluation.choice_methods.random_best import measure_random
from wattfleet_evaluation.corpus_predictions import Fit


@dataclass(frozen=True)
class RandomThenPredict:
    """Fits a predictor to modes drawn at random and chooses by its median predictions.

    As published (doi:10.1016/j.future.2024.07.001, section 5): the least predicted time, without a margin, without
    preferring the lower power among nearly equal times, and ignoring the measured values.

    Attributes:
        name: the predictor's name.
        fit: fits it.
    """

    name: str
    fit: Fit

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure random modes up to the session's limit."""
        measure_random(session, seed)
        prediction = self.fit(session.profile()).predict(session.modes)
        by_time = np.lexsort((prediction.power_mw, prediction.minibatch_ms))

        def choose(budget_w: float) -> PowerMode | None:
            within = by_time[prediction.power_mw[by_time] <= budget_w * 1e3][:1]
            return next(iter(array_to_modes(session.modes[within])), None)

        return choose
