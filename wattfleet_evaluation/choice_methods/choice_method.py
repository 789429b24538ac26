"""The interface of all choice methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from wattfleet.modes import PowerMode
from wattfleet_evaluation.choice_methods.measurement_session import MeasurementSession

Choose = Callable[[float], PowerMode | None]
"""Maps a budget in watts to the mode to train in; None if no known mode is within the budget."""


class ChoiceMethod(Protocol):
    """A way to find the fastest mode within a power budget from a limited number of measurements."""

    @property
    def name(self) -> str:
        """Name on command lines and in tables."""
        ...

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure modes within the session's limit and return the function that chooses a mode.

        The same arguments give the same measurements and choices.

        Args:
            session: measures the modes.
            budgets_w: budgets to choose modes for, W; one set of measurements serves them all.
            seed: seed of random draws, if the method makes any.

        Raises:
            InvalidInputError: the method cannot work with so few measurements.
        """
        ...
