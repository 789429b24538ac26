"""Brute force: measures every mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wattfleet.errors import InvalidInputError
from wattfleet_evaluation.choice_methods.choice_method import Choose
from wattfleet_evaluation.choice_methods.fastest_mode import fastest_measured
from wattfleet_evaluation.choice_methods.measurement_session import MeasurementSession


@dataclass(frozen=True)
class BruteForce:
    """Measures every mode, which gives the best possible choice. All other methods are compared with it."""

    name: str = "brute-force"

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure all modes.

        Raises:
            InvalidInputError: the session's limit is below the number of modes.
        """
        if session.limit < len(session.modes):
            raise InvalidInputError(
                f"brute force measures all {len(session.modes)} modes, but the limit is {session.limit}:"
                f" allow {len(session.modes)}"
            )
        session.measure_all(session.modes)
        return fastest_measured(session.profile())
