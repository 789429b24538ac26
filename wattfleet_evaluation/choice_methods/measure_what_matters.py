"""Wattfleet's own method: measures the modes it would choose before it chooses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import POWER_QUANTILE, KnownModes, SamplingSettings, next_modes
from wattfleet.modes import Profile
from wattfleet.prediction import Prediction
from wattfleet_evaluation.choice_methods.choice_method import Choose
from wattfleet_evaluation.choice_methods.fastest_mode import fastest_known
from wattfleet_evaluation.choice_methods.measurement_session import MeasurementSession
from wattfleet_evaluation.corpus_predictions import Fit

# An unmeasured choice may exceed its budget with a probability of at most _RISK / (measured modes). After few
# measurements nearly every choice is unmeasured, and some risk saves much time. After many, little is left to gain.
_RISK = 6.0
_MAX_RISK = 0.3
# Before any measurement, the errors at all modes are nearly the same. The choices then keep either every budget or
# hardly any, so that a risk does not average out over the budgets.
_RISK_UNMEASURED = 1 - POWER_QUANTILE
SPREAD_OF_TRANSFER = 3
"""With a reference to transfer from, three spread-out modes are enough to choose the next ones by prediction."""


@dataclass(frozen=True)
class MeasureWhatMatters:
    """Measures the modes that `wattfleet.choosing.next_modes` proposes for the budgets, then chooses the fastest.

    A measured mode must be within the budget by its measured power. An unmeasured mode must be within it with a
    probability that rises with the number of measured modes (0.70 after up to 20, 0.88 after 50). Without any
    measurement, the probability is 0.95.

    Attributes:
        fit: fits the predictor.
        name: name in tables.
        spread: modes that are measured before the predictor is used. The predictor has to accept that few.
    """

    fit: Fit
    name: str = "wattfleet"
    spread: int = SPREAD_OF_TRANSFER

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure up to the session's limit, or fewer if more modes would not help.

        Raises:
            InvalidInputError: there are too few measurements for the predictor.
        """
        settings = SamplingSettings(limit=max(1, session.limit), spread=self.spread, seed=seed)
        budgets_mw = np.array(budgets_w, dtype=np.float64) * 1e3

        def predict(profile: Profile) -> Prediction:
            return self.fit(profile).predict(session.modes)

        while session.remaining and len(
            chosen := next_modes(session.profile(), session.modes, predict, settings, budgets_mw)
        ):
            session.measure_all(chosen)
        profile = session.profile()
        risk = min(_MAX_RISK, _RISK / len(profile)) if len(profile) else _RISK_UNMEASURED
        return fastest_known(KnownModes.of(session.modes, predict(profile), profile), 1 - risk)
