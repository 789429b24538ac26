"""Random search: chooses the best of the modes drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet_evaluation.choice_methods.choice_method import Choose
from wattfleet_evaluation.choice_methods.fastest_mode import fastest_measured
from wattfleet_evaluation.choice_methods.measurement_session import MeasurementSession


@dataclass(frozen=True)
class RandomBest:
    """Measures modes drawn at random up to the limit, and chooses among them."""

    name: str = "random"

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure random modes up to the session's limit."""
        measure_random(session, seed)
        return fastest_measured(session.profile())


def measure_random(session: MeasurementSession, seed: int) -> None:
    """Measure modes drawn uniformly at random, up to the session's limit."""
    drawn = np.random.default_rng(seed).permutation(len(session.modes))[: session.limit]
    session.measure_all(session.modes[drawn])
