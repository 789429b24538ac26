"""The best of some modes drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet_evaluation.choice_methods.bench import Bench
from wattfleet_evaluation.choice_methods.choice_method import Choose
from wattfleet_evaluation.choice_methods.measured import fastest_measured


@dataclass(frozen=True)
class RandomBest:
    """Measures modes drawn at random up to the limit, and chooses among them."""

    name: str = "random"

    def profile(self, bench: Bench, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure as many modes as the bench allows."""
        measure_random(bench, seed)
        return fastest_measured(bench.profile())


def measure_random(bench: Bench, seed: int) -> None:
    """Measure modes drawn uniformly at random, as many as the bench allows."""
    drawn = np.random.default_rng(seed).permutation(len(bench.modes))[: bench.limit]
    bench.measure_all(bench.modes[drawn])
