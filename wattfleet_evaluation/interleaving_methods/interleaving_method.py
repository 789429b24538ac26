"""The interface of all interleaving methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from wattfleet.choosing import (
    InfeasibleServiceError,
    InterleavedChoice,
    InterleavingObjective,
    PairedModes,
    ServiceLimits,
    choose_interleaved,
)
from wattfleet_evaluation.interleaving_methods.session import InterleavingSession

Choose = Callable[[ServiceLimits], int | None]
"""Maps limits to a row of inference, which is a mode with a batch; None if no known row keeps them."""


class InterleavingMethod(Protocol):
    """A way to find the best mode and inference batch from a limited number of measurements."""

    @property
    def name(self) -> str:
        """Name on command lines and in tables."""
        ...

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Measure within the session's limit and return the function that chooses.

        The same arguments give the same measurements and choices.

        Args:
            session: makes the measurements.
            problems: the limits to choose for, each separately.
            objective: what the choice maximizes.
            seed: seed of random draws, if the method makes any.

        Raises:
            InvalidInputError: the method cannot work with so few measurements.
        """
        ...


def best_known(pair: PairedModes, objective: InterleavingObjective, probability: float = 0.5) -> Choose:
    """Choose the best row that keeps its limits, each value with at least the given probability."""

    def choose(limits: ServiceLimits) -> int | None:
        found = _best(pair, limits, objective, probability)
        return None if found is None else found.row

    return choose


def best_measured(session: InterleavingSession, objective: InterleavingObjective) -> Choose:
    """Choose the best row of which both training and inference were measured."""
    rows = session.is_measured().nonzero()[0]
    measured = session.corpora.measured.among(session.is_measured())

    def choose(limits: ServiceLimits) -> int | None:
        found = _best(measured, limits, objective, 0.5) if len(rows) else None
        return None if found is None else int(rows[found.row])

    return choose


def _best(
    pair: PairedModes, limits: ServiceLimits, objective: InterleavingObjective, probability: float
) -> InterleavedChoice | None:
    try:
        return choose_interleaved(pair, limits, objective, probability)
    except InfeasibleServiceError:
        return None
