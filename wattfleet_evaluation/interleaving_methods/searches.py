"""The published searches over power mode and inference batch, which measure and do not predict."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattfleet.choosing import InterleavingObjective, ServiceLimits
from wattfleet_evaluation.interleaving_methods.interleaving_method import Choose, best_measured
from wattfleet_evaluation.interleaving_methods.session import InterleavingSession

_KNOBS = (0, 1, 2, 3)
_BATCH = 4


@dataclass(frozen=True)
class BinarySearch:
    """Measures the middle of the remaining modes and batches, and drops half of the values of one dimension.

    The dimensions take turns. A knob goes up where the pair keeps the budget, and the batch goes up where it keeps the
    latency, or where the inference takes longer than its requests to arrive.
    """

    name: str = "binary-search"

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Search for each of the problems. The seed has no effect."""
        for limits in problems:
            _halve(session, limits)
        return best_measured(session, objective)


def _halve(session: InterleavingSession, limits: ServiceLimits) -> None:
    grid = _Grid(session, limits)
    values = grid.values
    if not all(values):
        return
    turns = itertools.cycle((_BATCH, *_KNOBS))
    while (row := grid.measure([column[len(column) // 2] for column in values])) is not None:
        if all(len(column) == 1 for column in values):
            return
        turn = next(turn for turn in turns if len(values[turn]) > 1)
        half = len(values[turn]) // 2
        upper = grid.wants_larger_batch(row) if turn == _BATCH else grid.keeps_budget(row)
        values[turn] = values[turn][half:] if upper else values[turn][:half]


@dataclass(frozen=True)
class GradientSearch:
    """Measures the slope of time against power along each knob from the middle, then searches along the steepest.

    Each knob's slope is measured by the next lower value of the knob. Along the knobs in the order of their slopes, a
    binary search looks for the highest value that keeps the budget, with the largest batch that keeps the latency.
    """

    name: str = "gradient"

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Search for each of the problems. The seed has no effect."""
        for limits in problems:
            _climb(session, limits)
        return best_measured(session, objective)


def _climb(session: InterleavingSession, limits: ServiceLimits) -> None:
    grid = _Grid(session, limits)
    if not all(grid.values):
        return
    at = [len(column) // 2 for column in grid.values]
    at[_BATCH] = len(grid.values[_BATCH]) - 1
    middle = grid.measure_at(at)
    while middle is not None and not grid.keeps_latency(middle) and at[_BATCH] > 0:
        at[_BATCH] -= 1
        middle = grid.measure_at(at)
    if middle is None:
        return
    slopes = {}
    for knob in _KNOBS:
        if at[knob] == 0:
            continue
        lower = list(at)
        lower[knob] -= 1
        row = grid.measure_at(lower)
        if row is None:
            return
        slopes[knob] = grid.slope(row, middle)
    for knob in sorted(slopes, key=lambda knob: -slopes[knob]):
        low, high = (at[knob], len(grid.values[knob]) - 1) if grid.keeps_budget(middle) else (0, at[knob])
        while low < high:
            tried = list(at)
            tried[knob] = (low + high + 1) // 2
            row = grid.measure_at(tried)
            if row is None:
                return
            if grid.keeps_budget(row):
                low, middle = tried[knob], row
            else:
                high = tried[knob] - 1
        at[knob] = low


class _Grid:
    """The modes and batches of a problem, and what was measured of them."""

    def __init__(self, session: InterleavingSession, limits: ServiceLimits) -> None:
        self._session, self._limits = session, limits
        corpora = session.corpora
        self._measured, self._batch = corpora.measured, corpora.batch
        self._possible = np.flatnonzero(limits.longest_ms(self._batch) > 0)
        self._settings = np.column_stack([corpora.inference.modes, self._batch])[self._possible]

    @property
    def values(self) -> list[list[float]]:
        """The values of each knob and of the batch, ascending; without batches that cannot be collected in time."""
        return [np.unique(column).tolist() for column in self._settings.T]

    def measure_at(self, at: Sequence[int]) -> int | None:
        """Measure the values at some indices, one for each dimension."""
        return self.measure([column[index] for column, index in zip(self.values, at, strict=True)])

    def measure(self, setting: Sequence[float]) -> int | None:
        """Measure the nearest row, as a corpus may not hold all combinations; None if the limit is reached."""
        distance = np.abs(np.log(self._settings) - np.log(np.array(setting))).sum(axis=1)
        row = int(self._possible[int(distance.argmin())])
        return row if self._session.measure_pair(row) else None

    def keeps_budget(self, row: int) -> bool:
        """Whether the pair draws no more than the budget."""
        return bool(self._measured.power_mw()[row] <= self._limits.budget_mw)

    def keeps_latency(self, row: int) -> bool:
        """Whether the inference keeps the latency."""
        return bool(self._inference_ms(row) <= self._limits.longest_ms(self._one_batch(row))[0])

    def wants_larger_batch(self, row: int) -> bool:
        """Whether a larger batch may be better: it needs less time for each request, but takes longer to collect."""
        is_behind = self._inference_ms(row) > self._limits.collect_ms(self._one_batch(row))[0]
        return bool(is_behind) or self.keeps_latency(row)

    def slope(self, low: int, high: int) -> float:
        """Milliseconds that each further mW saves between two rows; infinite if no more power is needed."""
        modes = self._measured.mode_of[[low, high]]
        saved_ms = -float(np.diff(self._measured.training.minibatch_ms[modes])[0])
        more_mw = float(np.diff(self._measured.power_mw()[[low, high]])[0])
        return saved_ms / more_mw if more_mw > 0 else float(np.inf)

    def _inference_ms(self, row: int) -> float:
        return float(self._measured.inference.minibatch_ms[row])

    def _one_batch(self, row: int) -> NDArray[np.int64]:
        return self._batch[row : row + 1]
