"""Measures random settings, predicts all others, and chooses with a margin for the uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import KnownModes, Objective, ServiceLimits
from wattfleet.modes import Profile
from wattfleet.prediction import Predictor
from wattfleet_evaluation.serving_methods.serving_method import Choose, best_known
from wattfleet_evaluation.serving_methods.serving_session import ServingSession

Fit = Callable[[Profile], Predictor]
"""Fits a predictor to measured settings. The function itself knows which reference it transfers from."""

PROBABILITY = 0.95
"""Probability with which an unmeasured setting must keep its time, and the same for its power."""


@dataclass(frozen=True)
class PredictSettings:
    """Fits a predictor to settings drawn at random and chooses among all by measurements and predictions.

    A measured setting must keep the limits by its measured time and power, and an unmeasured one with `PROBABILITY`.

    Attributes:
        fit: fits the predictor, which must predict several batch sizes.
        name: name in tables.
    """

    fit: Fit
    name: str = "roofline"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure random settings up to the session's limit."""
        session.measure_random(np.arange(len(session.batch)), seed)
        profile = session.profile()
        prediction = self.fit(profile).predict(session.modes, session.batch)
        known = KnownModes.of(session.modes, prediction, profile, session.batch)
        return best_known(known, objective, PROBABILITY)
