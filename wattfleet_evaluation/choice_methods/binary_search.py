"""Multi-dimensional binary search: halves the range of one knob after the other, depending on the measured power.

From a 2024 research report of the group behind PowerTrain.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.modes import PowerMode
from wattfleet_evaluation.choice_methods.choice_method import Choose
from wattfleet_evaluation.choice_methods.fastest_mode import fastest_measured
from wattfleet_evaluation.choice_methods.measurement_session import MeasurementSession
from wattfleet_evaluation.choice_methods.presets import nearest_mode


@dataclass(frozen=True)
class BinarySearch:
    """For each budget, measures the middle of the remaining modes and drops half of one knob's values.

    A search takes about log2 of the number of modes. Searches share their measurements and continue up to the limit.
    Budgets in the middle of the range are searched first.
    """

    name: str = "binary-search"

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        """Search for each of the budgets. The seed has no effect."""
        for budget_w in _middle_first(sorted(budgets_w)):
            _search(session, budget_w * 1e3)
        return fastest_measured(session.profile())


def _search(session: MeasurementSession, budget_mw: float) -> None:
    knobs: list[list[float]] = [np.unique(column).tolist() for column in session.modes.T]
    turns = itertools.cycle(range(len(knobs)))
    while session.remaining:
        middle = PowerMode(*(round(values[len(values) // 2]) for values in knobs))
        # A corpus may not hold all combinations of its knobs' values.
        within = session.measure(nearest_mode(session.modes, middle)).power_mw <= budget_mw
        if all(len(values) == 1 for values in knobs):
            return
        turn = next(turn for turn in turns if len(knobs[turn]) > 1)
        half = len(knobs[turn]) // 2
        knobs[turn] = knobs[turn][half:] if within else knobs[turn][:half]


def _middle_first(values: Sequence[float]) -> Iterable[float]:
    """Yield the middle value, then the middles of both halves, and so on."""
    parts = [list(values)]
    while parts:
        part = parts.pop(0)
        if part:
            middle = len(part) // 2
            yield part[middle]
            parts += [part[:middle], part[middle + 1 :]]
