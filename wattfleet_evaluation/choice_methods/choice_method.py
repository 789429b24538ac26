"""What every strategy of choosing modes offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from wattfleet.modes import PowerMode
from wattfleet_evaluation.choice_methods.bench import Bench

Choose = Callable[[float], PowerMode | None]
"""From a budget in watts to the mode to train in; None where no mode is known to keep it."""


class Strategy(Protocol):
    """A way to come from measurements to the fastest mode within a power budget."""

    @property
    def name(self) -> str:
        """What command lines and tables call it."""
        ...

    def profile(self, bench: Bench, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure modes, none twice and no more than the bench allows, and say how to choose.

        The same arguments give the same measurements and choices.

        Args:
            bench: what can be measured.
            budgets_w: budgets in force, W; one set of measurements serves them all.
            seed: another seed, another profile, where chance plays a part.

        Raises:
            InvalidInputError: the strategy cannot work with so few measurements.
        """
        ...
