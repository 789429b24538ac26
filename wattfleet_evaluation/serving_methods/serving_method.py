"""The interface of all serving methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from wattfleet.choosing import ChosenMode, InfeasibleServiceError, KnownModes, Objective, ServiceLimits, choose_serving
from wattfleet.modes import Profile
from wattfleet_evaluation.serving_methods.serving_session import ServingSession

Choose = Callable[[ServiceLimits], ChosenMode | None]
"""Maps limits to a mode with its batch; None if no known setting keeps them."""


class ServingMethod(Protocol):
    """A way to find the best mode and batch size for inference from a limited number of measurements."""

    @property
    def name(self) -> str:
        """Name on command lines and in tables."""
        ...

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure settings within the session's limit and return the function that chooses one.

        The same arguments give the same measurements and choices.

        Args:
            session: measures the settings.
            problems: the limits to choose for. They differ only in their power budget.
            objective: what the choice optimizes.
            seed: seed of random draws, if the method makes any.

        Raises:
            InvalidInputError: the method cannot work with so few measurements.
        """
        ...


def best_known(known: KnownModes, objective: Objective, probability: float = 0.5) -> Choose:
    """Choose the best setting that keeps time and power, each with at least the given probability."""

    def choose(limits: ServiceLimits) -> ChosenMode | None:
        try:
            return choose_serving(known, limits, objective, probability)
        except InfeasibleServiceError:
            return None

    return choose


def best_measured(profile: Profile, objective: Objective) -> Choose:
    """Choose the best measured setting."""
    return best_known(KnownModes.only_measured(profile), objective)
