"""MAXN: every knob at its highest value, regardless of the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wattfleet.choosing import descending_modes
from wattfleet.modes import array_to_modes
from wattfleet_evaluation.choice_methods.choice_method import Choose
from wattfleet_evaluation.choice_methods.measurement_session import MeasurementSession


@dataclass(frozen=True)
class Maxn:
    """Always chooses the highest mode, without measuring. This is what a Jetson does if nobody sets a power mode."""

    name: str = "maxn"

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure nothing."""
        highest = array_to_modes(descending_modes(session.modes)[:1])[0]
        return lambda budget_w: highest
