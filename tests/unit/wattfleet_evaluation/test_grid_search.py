"""Grid searches over knobs and batch sizes by measuring, on full and thinned grids."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wattfleet_evaluation.grid_search import BATCH, KNOBS, Grid

VALUES = [(2, 4, 8), (1.0, 1.5, 2.0), (0.3, 0.6, 0.9, 1.2, 1.5), (0.2, 2.1, 3.2), (1, 4, 16, 32)]
FULL = np.array(list(itertools.product(*VALUES)), dtype=np.float64)
INDEX = {tuple(setting): row for row, setting in enumerate(FULL.tolist())}


class Measurer:
    """A function that measures at most `limit` rows and records them."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.rows: list[int] = []
        self.last = -1

    def __call__(self, row: int) -> bool:
        self.last = row
        if row not in self.rows:
            if len(self.rows) == self.limit:
                return False
            self.rows.append(row)
        return True


class Additive:
    """Each step of a knob adds power and reduces time; batch sizes above `largest` are late."""

    def __init__(self, grid: Grid, gains: tuple[float, ...], budget: float, largest: float) -> None:
        self.values, self.gains, self.budget, self.largest = grid.values, gains, budget, largest

    def steps(self, row: int) -> list[int]:
        return [self.values[knob].index(FULL[row, knob]) for knob in KNOBS]

    def keeps_budget(self, row: int) -> bool:
        return sum(self.steps(row)) <= self.budget

    def keeps_latency(self, row: int) -> bool:
        return bool(FULL[row, BATCH] <= self.largest)

    def slope(self, low: int, high: int) -> float:
        pairs = zip(self.gains, self.steps(high), self.steps(low), strict=True)
        return sum(gain * (more - less) for gain, more, less in pairs)


@settings(max_examples=100)
@given(*(st.integers(0, len(values) - 1) for values in VALUES))
def test_halving_ends_at_the_wanted_value_of_each_dimension(a: int, b: int, c: int, d: int, e: int) -> None:
    wanted, measure = (a, b, c, d, e), Measurer()

    def upper(dimension: int, row: int) -> bool:
        return bool(FULL[row, dimension] <= VALUES[dimension][wanted[dimension]])

    Grid(FULL, measure).halve(upper)
    assert FULL[measure.last].tolist() == [column[at] for column, at in zip(VALUES, wanted, strict=True)]
    assert len(measure.rows) <= 1 + sum(int(np.ceil(np.log2(len(values)))) for values in VALUES)


def test_halving_asks_for_the_batch_first_and_then_takes_turns() -> None:
    asked = []

    def upper(dimension: int, row: int) -> bool:
        asked.append(dimension)
        return False

    Grid(FULL, Measurer()).halve(upper)
    assert asked[:6] == [BATCH, 0, 1, 2, 3, BATCH]


@pytest.mark.parametrize("search", ["halve", "climb"])
@pytest.mark.parametrize("limit", [0, 1, 3, 6])
def test_a_search_stops_at_the_limit(search: str, limit: int) -> None:
    measure = Measurer(limit)
    grid = Grid(FULL, measure)
    if search == "halve":
        grid.halve(lambda dimension, row: True)
    else:
        grid.climb(Additive(grid, (1, 2, 3, 4), 100, 16))
    assert len(measure.rows) == limit


def test_a_search_over_nothing_measures_nothing() -> None:
    grid = Grid(np.empty((0, 5)), pytest.fail)
    grid.halve(pytest.fail)
    grid.climb(Additive(grid, (1, 1, 1, 1), 1, 1))


def test_a_missing_combination_is_replaced_by_the_nearest() -> None:
    thin = FULL[FULL[:, 2] != 0.9]
    thin = np.vstack([thin, [[2, 1.0, 0.9, 0.2, 1]]])
    measure = Measurer()
    row = Grid(thin, measure).measured_at([0, 0, 2, 0, 3])
    assert row is not None and measure.rows == [row]
    distances = [sum(abs(np.log(a / b)) for a, b in zip(each, (2, 1, 0.9, 0.2, 32), strict=True)) for each in thin]
    assert distances[row] == min(distances) > 0


@settings(max_examples=100)
@given(st.permutations([1.0, 2.0, 3.0, 4.0]), st.integers(0, 12), st.sampled_from([1, 4, 16, 32]))
def test_climbing_follows_the_steepest_knob_first(gains: list[float], budget: int, largest: int) -> None:
    """One step of any knob adds one step of power, so a loop over the knobs gives the end of the climb."""
    at = [len(column) // 2 for column in VALUES[:4]]
    # The budget must be reachable by lowering the steepest knob alone.
    assume(sum(at) - at[gains.index(4.0)] + 1 <= budget)
    measure = Measurer()
    grid = Grid(FULL, measure)
    grid.climb(Additive(grid, tuple(gains), budget, largest))
    for knob in sorted(KNOBS, key=lambda knob: -gains[knob]):
        others = sum(at) - at[knob]
        fits = [index for index in range(len(VALUES[knob])) if others + index <= budget]
        at[knob] = max(fits, default=0)
    expected = INDEX[(*(column[index] for column, index in zip(VALUES[:4], at, strict=True)), float(largest))]
    assert expected in measure.rows
    batches = [FULL[row, BATCH] for row in measure.rows]
    assert batches == sorted(batches, reverse=True), "from the largest batch down to the one that keeps the latency"
    assert min(batches) == largest


def test_the_slopes_are_measured_by_the_next_lower_value_of_each_knob() -> None:
    measure = Measurer(5)
    grid = Grid(FULL, measure)
    grid.climb(Additive(grid, (1, 2, 3, 4), 100, 32))
    middle = FULL[measure.rows[0]].tolist()
    assert middle == [4, 1.5, 0.9, 2.1, 32]
    lower = {0: 2, 1: 1.0, 2: 0.6, 3: 0.2}
    for knob, row in zip(KNOBS, measure.rows[1:], strict=True):
        assert FULL[row].tolist() == [lower[each] if each == knob else value for each, value in enumerate(middle)]
