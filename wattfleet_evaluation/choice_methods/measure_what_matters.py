"""The default: the modes that would be chosen are measured before they are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import KnownModes, SamplingSettings, next_modes
from wattfleet.modes import Profile
from wattfleet.prediction import Prediction
from wattfleet_evaluation.choice_methods.bench import Bench
from wattfleet_evaluation.choice_methods.choice_method import Choose
from wattfleet_evaluation.choice_methods.measured import fastest_known
from wattfleet_evaluation.choice_methods.random_then_predict import Fit

# The chance that an unmeasured choice exceeds its budget is at most this over the number of measured modes. After
# few measurements nearly every choice is unmeasured and some risk buys much time; after many, little is left to gain.
_RISK = 6.0
_MOST_RISK = 0.3
# With a reference to transfer from, three spread modes tell enough to choose the next by prediction.
_SPREAD = 3


@dataclass(frozen=True)
class MeasureWhatMatters:
    """Measures as `sampling.next_modes` says for the budgets in force, and chooses as `choosing` says.

    A measured mode is judged by its own power; one that was not must keep the budget with a probability that rises
    with the number of measured modes (0.70 after up to 20, 0.88 after 50).

    Attributes:
        fit: fits the predictor, which must transfer from a reference.
        name: what tables call it.
    """

    fit: Fit
    name: str = "wattfleet"

    def profile(self, bench: Bench, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure up to the bench's limit, fewer where no measurement promises anything more.

        Raises:
            InvalidInputError: too few measurements for the predictor.
        """
        settings = SamplingSettings(limit=bench.limit, spread=_SPREAD, seed=seed)
        budgets_mw = np.array(budgets_w, dtype=np.float64) * 1e3

        def predict(profile: Profile) -> Prediction:
            return self.fit(profile).predict(bench.modes)

        while len(chosen := next_modes(bench.profile(), bench.modes, predict, settings, budgets_mw)):
            bench.measure_all(chosen)
        profile = bench.profile()
        risk = min(_MOST_RISK, _RISK / len(profile))
        return fastest_known(KnownModes.of(bench.modes, predict(profile), profile), 1 - risk)
