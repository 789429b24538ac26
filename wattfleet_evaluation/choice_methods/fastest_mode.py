"""Choosing the fastest mode from measurements, which never exceeds a budget, or from predictions."""

from __future__ import annotations

from wattfleet.choosing import KnownModes, fastest_within_budget
from wattfleet.errors import InfeasibleBudgetError
from wattfleet.modes import PowerMode, Profile
from wattfleet_evaluation.choice_methods.choice_method import Choose


def fastest_measured(profile: Profile) -> Choose:
    """Choose the fastest measured mode within the budget."""
    return fastest_known(KnownModes.only_measured(profile))


def fastest_known(known: KnownModes, probability: float = 0.5) -> Choose:
    """Choose the fastest mode that is within the budget with at least the given probability."""

    def choose(budget_w: float) -> PowerMode | None:
        try:
            return fastest_within_budget(known, budget_w * 1e3, probability).mode
        except InfeasibleBudgetError:
            return None

    return choose
