"""Measuring at random, then choosing from predictions alone: how PowerTrain uses its predictors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wattfleet.choosing import KnownModes
from wattfleet.modes import Profile
from wattfleet.prediction import Predictor
from wattfleet_evaluation.choice_methods.bench import Bench
from wattfleet_evaluation.choice_methods.choice_method import Choose
from wattfleet_evaluation.choice_methods.measured import fastest_known
from wattfleet_evaluation.choice_methods.random_best import measure_random

Fit = Callable[[Profile], Predictor]
"""Fits a predictor to measured modes; what it transfers from is its own affair."""


@dataclass(frozen=True)
class RandomThenPredict:
    """Fits a predictor to modes drawn at random, and takes its median predictions at their word.

    As published (doi:10.1016/j.future.2024.07.001, section 5): no margin, and no regard for what was measured.

    Attributes:
        name: the predictor's name.
        fit: fits it.
    """

    name: str
    fit: Fit

    def profile(self, bench: Bench, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure as many modes as the bench allows."""
        measure_random(bench, seed)
        prediction = self.fit(bench.profile()).predict(bench.modes)
        return fastest_known(KnownModes.of(bench.modes, prediction))
