"""MAXN: every knob at its highest, whatever the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wattfleet.choosing import descending_modes
from wattfleet.modes import array_to_modes
from wattfleet_evaluation.choice_methods.bench import Bench
from wattfleet_evaluation.choice_methods.choice_method import Choose


@dataclass(frozen=True)
class Maxn:
    """What a Jetson's owner gets who never thinks of power: the highest mode, unmeasured."""

    name: str = "maxn"

    def profile(self, bench: Bench, budgets_w: Sequence[float], seed: int) -> Choose:
        """Measure nothing."""
        highest = array_to_modes(descending_modes(bench.modes)[:1])[0]
        return lambda budget_w: highest
