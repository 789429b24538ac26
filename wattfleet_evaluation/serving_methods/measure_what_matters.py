"""Wattfleet's own method: measures the modes and batch sizes that it would choose before it chooses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wattfleet.choosing import KnownModes, Objective, SamplingSettings, ServiceLimits, ServingGoal, next_modes
from wattfleet.modes import Profile
from wattfleet.prediction import Prediction
from wattfleet_evaluation.corpus_predictions import CorpusPredictions, Fit
from wattfleet_evaluation.serving_methods.predict_settings import PROBABILITY
from wattfleet_evaluation.serving_methods.serving_method import Choose, best_known, best_measured
from wattfleet_evaluation.serving_methods.serving_session import ServingSession

# With a reference to transfer from, three spread-out settings are enough to choose the next ones by prediction.
_SPREAD = 3
# Measuring two settings per fit halves the time for fitting.
_SETTINGS_PER_FIT = 2


@dataclass
class MeasureWhatMattersForServing:
    """Measures the settings that `wattfleet.choosing.next_modes` proposes for the limits, then chooses the best.

    A measured setting must keep the limits by its measured time and power, and an unmeasured one with `PROBABILITY`.

    Attributes:
        fit: fits the predictor, which must predict several batch sizes after three measurements.
        chooses_measured: whether only measured settings are chosen, which cannot break a limit. The predictor is then
            fitted only to the first measurements, and conditioned on the others. This is fast enough for thousands of
            problems.
        name: name in tables.
    """

    fit: Fit
    chooses_measured: bool = False
    name: str = "wattfleet"

    def __post_init__(self) -> None:
        self._predictions = CorpusPredictions(self.fit)

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure up to the session's limit, or fewer if no further measurement can improve a choice."""
        goal = ServingGoal(tuple(problems), objective)
        settings = SamplingSettings(
            limit=max(1, session.limit),
            spread=_SPREAD,
            batch=1 if self.chooses_measured else _SETTINGS_PER_FIT,
            tolerance=0,
            seed=seed,
        )

        def predict(profile: Profile) -> Prediction:
            return self._predictions.after(session.corpus, session.rows, _SPREAD if self.chooses_measured else None)

        while session.remaining and len(
            found := next_modes(session.profile(), session.modes, predict, settings, batch=session.batch, serving=goal)
        ):
            session.measure_all(found)
        profile = session.profile()
        if self.chooses_measured:
            return best_measured(profile, objective)
        known = KnownModes.of(session.modes, predict(profile), profile, session.batch)
        return best_known(known, objective, PROBABILITY)
