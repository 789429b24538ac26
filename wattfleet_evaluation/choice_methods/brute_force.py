"""Brute force: what is best when every mode is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wattfleet.errors import InvalidInputError
from wattfleet_evaluation.choice_methods.bench import Bench
from wattfleet_evaluation.choice_methods.choice_method import Choose
from wattfleet_evaluation.choice_methods.measured import fastest_measured


@dataclass(frozen=True)
class BruteForce:
    """Measures every mode: the best possible choice, which all others are judged by."""

    name: str = "brute-force"

    def profile(self, bench: Bench, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure all modes.

        Raises:
            InvalidInputError: the bench does not allow that many.
        """
        if bench.limit < len(bench.modes):
            raise InvalidInputError(f"brute force measures all {len(bench.modes)} modes: allow it as many")
        bench.measure_all(bench.modes)
        return fastest_measured(bench.profile())
