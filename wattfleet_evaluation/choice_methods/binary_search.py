"""Multi-dimensional binary search: halving the knobs in turn by the power that is observed.

From a 2024 research report of the group behind PowerTrain.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.modes import PowerMode
from wattfleet_evaluation.choice_methods.bench import Bench
from wattfleet_evaluation.choice_methods.choice_method import Choose
from wattfleet_evaluation.choice_methods.measured import fastest_measured
from wattfleet_evaluation.choice_methods.presets import nearest_mode


@dataclass(frozen=True)
class BinarySearch:
    """For one budget after the other, measures the middle of what is left and drops half of a knob's values.

    A search takes about log2 of the number of modes. Searches share what they measure, and go on while the limit
    allows; the budgets in the middle of the range are searched first.
    """

    name: str = "binary-search"

    def profile(self, bench: Bench, budgets_w: Sequence[float], seed: int) -> Choose:
        """Search for each of the budgets; nothing is left to chance."""
        for budget_w in _middle_first(sorted(budgets_w)):
            _search(bench, budget_w * 1e3)
        return fastest_measured(bench.profile())


def _search(bench: Bench, budget_mw: float) -> None:
    knobs: list[list[float]] = [np.unique(column).tolist() for column in bench.modes.T]
    turns = itertools.cycle(range(len(knobs)))
    while bench.left:
        middle = PowerMode(*(round(values[len(values) // 2]) for values in knobs))
        # A corpus may lack some combinations of its knobs' values.
        within = bench.measure(nearest_mode(bench.modes, middle)).power_mw <= budget_mw
        if all(len(values) == 1 for values in knobs):
            return
        turn = next(turn for turn in turns if len(knobs[turn]) > 1)
        half = len(knobs[turn]) // 2
        knobs[turn] = knobs[turn][half:] if within else knobs[turn][:half]


def _middle_first(values: Sequence[float]) -> Iterable[float]:
    """The middle value, then the middles of both halves, and so on."""
    parts = [list(values)]
    while parts:
        part = parts.pop(0)
        if part:
            middle = len(part) // 2
            yield part[middle]
            parts += [part[:middle], part[middle + 1 :]]
