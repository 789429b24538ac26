"""Multi-dimensional binary search: halves the range of one knob after the other, depending on the measured power."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wattfleet.choosing import search_within_budgets
from wattfleet.modes import PowerMode
from wattfleet_evaluation.choice_methods.choice_method import Choose
from wattfleet_evaluation.choice_methods.fastest_mode import fastest_measured
from wattfleet_evaluation.choice_methods.measurement_session import MeasurementSession


@dataclass(frozen=True)
class BinarySearch:
    """Searches for each budget by `wattfleet.choosing.search_within_budgets`, then chooses the best measured mode.

    Searches share their measurements and continue up to the limit.
    """

    name: str = "binary-search"

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Search for each of the budgets. The seed has no effect."""

        def power_of(mode: PowerMode) -> float | None:
            return session.measure(mode).power_mw if session.remaining else None

        search_within_budgets(session.modes, [budget_w * 1e3 for budget_w in budgets_w], power_of)
        return fastest_measured(session.profile())
