"""Binary search for the fastest mode within a budget: halves the values of one knob after the other.

Multi-dimensional binary search, from a 2024 research report of the group behind PowerTrain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeArray, PowerMode, nearest_mode

PowerOf = Callable[[PowerMode], float | None]
"""Returns a mode's power, measured or looked up, mW; infinite if the board cannot sustain it. None ends the search."""


def search_within_budgets(modes: ModeArray, budgets_mw: Sequence[float], power_of: PowerOf) -> None:
    """Search for the fastest mode within each budget; each search measures about log2(n) of `n` modes.

    A search measures the middle of the remaining values. If its power is within the budget, the lower half
    of one knob's values is dropped, otherwise the upper half. Budgets in the middle of the range are searched first.
    The same powers give the same search, so an interrupted search can continue from its measurements alone.

    Args:
        modes: `[n, 4]` modes that can be chosen. They need not be all combinations of their knobs' values.
        budgets_mw: the budgets, mW.
        power_of: called for every mode that a search needs; several searches may need the same mode.

    Raises:
        InvalidInputError: there are no modes, or a budget is not finite and above 0.
    """
    if not len(modes):
        raise InvalidInputError("there are no modes to search: give at least one")
    if not all(0 < budget < float("inf") for budget in budgets_mw):
        raise InvalidInputError("budgets must be finite and above zero")
    for budget_mw in _middle_first(sorted(budgets_mw)):
        _search(modes, budget_mw, power_of)


def _search(modes: ModeArray, budget_mw: float, power_of: PowerOf) -> None:
    knobs: list[list[float]] = [np.unique(column).tolist() for column in modes.T]
    turns = itertools.cycle(range(len(knobs)))
    while True:
        # A corpus can lack some combinations of its knobs' values.
        power_mw = power_of(nearest_mode(modes, PowerMode(*(round(values[len(values) // 2]) for values in knobs))))
        if power_mw is None or all(len(values) == 1 for values in knobs):
            return
        turn = next(turn for turn in turns if len(knobs[turn]) > 1)
        half = len(knobs[turn]) // 2
        knobs[turn] = knobs[turn][half:] if power_mw <= budget_mw else knobs[turn][:half]


def _middle_first(values: Sequence[float]) -> Iterable[float]:
    """Yield the middle value, then the middles of both halves, and so on."""
    parts = [list(values)]
    while parts:
        part = parts.pop(0)
        if part:
            middle = len(part) // 2
            yield part[middle]
            parts += [part[:middle], part[middle + 1 :]]
