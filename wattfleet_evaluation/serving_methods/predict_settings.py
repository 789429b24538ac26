"""Measures random settings, predicts all others, and chooses with a margin for the uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import KnownModes, Objective, ServiceLimits
from wattfleet_evaluation.corpus_predictions import Fit
from wattfleet_evaluation.powertrain.corpus import predicted_corpus
from wattfleet_evaluation.powertrain.networks import Schedule
from wattfleet_evaluation.serving_methods.serving_method import Choose, best_known
from wattfleet_evaluation.serving_methods.serving_session import ServingSession

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


@dataclass(frozen=True)
class NetworkSettings:
    """Trains the published networks on settings drawn at random, and chooses among their predictions.

    As in the published work, a choice has no margin for the error of the prediction.
    """

    name: str = "network"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure random settings up to the session's limit, and train."""
        session.measure_random(np.arange(len(session.batch)), seed)
        rows = np.array(session.rows, dtype=np.intp)
        prediction = predicted_corpus(session.corpus, rows, Schedule(seed=seed))
        known = KnownModes.of(session.modes, prediction, session.profile(), session.batch)
        return best_known(known, objective)
