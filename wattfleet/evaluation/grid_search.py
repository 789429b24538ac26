"""Searches over the four knobs and the batch size, for methods that choose by measurements alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.choosing import ServiceLimits

Settings = NDArray[np.float64]
"""`[n, 5]` modes with their batch sizes."""

KNOBS = (0, 1, 2, 3)
"""The dimensions of the power mode."""

BATCH = 4
"""The dimension of the batch size."""


class Judge(Protocol):
    """Compares measured rows for a search along the slopes."""

    def keeps_budget(self, row: int) -> bool:
        """Whether a measured row draws no more than the budget."""
        ...

    def keeps_latency(self, row: int) -> bool:
        """Whether the inference of a measured row keeps the latency."""
        ...

    def slope(self, low: int, high: int) -> float:
        """Milliseconds saved per additional mW between two rows; infinite if no additional power is needed."""
        ...


@dataclass(frozen=True)
class Measured:
    """The measurements of a row.

    Attributes:
        inference_ms: time of the inference of a batch, ms.
        power_mw: power, mW; the larger one of training and inference if the board also trains.
        step_ms: the time that the slope is computed of, ms: of a training minibatch, or of the batch without training.
        batch: samples in the batch.
    """

    inference_ms: float
    power_mw: float
    step_ms: float
    batch: int


@dataclass(frozen=True)
class LimitsJudge:
    """Judges measured rows by the limits of a problem.

    Attributes:
        limits: latency, arrival rate and budget.
        measured: returns the measurements of a row.
    """

    limits: ServiceLimits
    measured: Callable[[int], Measured]

    def keeps_budget(self, row: int) -> bool:
        """Whether a measured row draws no more than the budget."""
        return self.measured(row).power_mw <= self.limits.budget_mw

    def keeps_latency(self, row: int) -> bool:
        """Whether the inference of a measured row keeps the latency."""
        found = self.measured(row)
        return bool(found.inference_ms <= self.limits.longest_ms(np.array([found.batch]))[0])

    def wants_larger_batch(self, row: int) -> bool:
        """Whether a larger batch may be better: it takes less time per sample, but is collected for longer."""
        found = self.measured(row)
        is_behind = found.inference_ms > self.limits.collect_ms(np.array([found.batch]))[0]
        return bool(is_behind) or self.keeps_latency(row)

    def slope(self, low: int, high: int) -> float:
        """Milliseconds of a step that each further mW saves between two rows; infinite if no more power is needed."""
        lower, higher = self.measured(low), self.measured(high)
        more_mw = higher.power_mw - lower.power_mw
        return (lower.step_ms - higher.step_ms) / more_mw if more_mw > 0 else math.inf


class Grid:
    """Rows that can be measured, each a combination of values of the five dimensions.

    Args:
        settings: `[n, 5]` modes with their batch sizes; may be none.
        measure: measures the row at an index; returns False if no further measurement is allowed.

    Attributes:
        values: the values of each dimension, ascending.
    """

    def __init__(self, settings: Settings, measure: Callable[[int], bool]) -> None:
        self.values: list[list[float]] = [np.unique(column).tolist() for column in settings.T]
        self._settings, self._measure = settings, measure

    def measured_at(self, at: list[int]) -> int | None:
        """Measure the row at an index of each dimension's values; None if no further measurement is allowed."""
        return self._measured([column[index] for column, index in zip(self.values, at, strict=True)])

    def halve(self, upper: Callable[[int, int], bool]) -> None:
        """Measure the middle of the remaining rows and drop half of the values of one dimension, until one is left.

        The dimensions take turns, and the batch is the first.

        Args:
            upper: whether to continue with the upper values of a dimension, after a row was measured.
        """
        values = [list(column) for column in self.values]
        if not len(self._settings):
            return
        turns = itertools.cycle((BATCH, *KNOBS))
        while (row := self._measured([column[len(column) // 2] for column in values])) is not None:
            if all(len(column) == 1 for column in values):
                return
            turn = next(turn for turn in turns if len(values[turn]) > 1)
            half = len(values[turn]) // 2
            values[turn] = values[turn][half:] if upper(turn, row) else values[turn][:half]

    def climb(self, judge: Judge) -> None:
        """Measure the slope of time against power along each knob from the middle, then search along the steepest.

        Each slope is measured with the next lower value of the knob. Along the knobs in the order of their slopes, a
        binary search finds the highest value that keeps the budget. The batch is the largest that keeps the latency in
        the middle.

        Args:
            judge: compares measured rows.
        """
        if not len(self._settings):
            return
        at = [len(column) // 2 for column in self.values]
        at[BATCH] = len(self.values[BATCH]) - 1
        best = self.measured_at(at)
        while best is not None and not judge.keeps_latency(best) and at[BATCH] > 0:
            at[BATCH] -= 1
            best = self.measured_at(at)
        slopes: dict[int, float] = {}
        for knob in KNOBS:
            lower = None if best is None or at[knob] == 0 else self.measured_at(_moved(at, knob, at[knob] - 1))
            if best is not None and lower is not None:
                slopes[knob] = judge.slope(lower, best)
        for knob in sorted(slopes, key=lambda knob: -slopes[knob]):
            keeps = best is not None and judge.keeps_budget(best)
            low, high = (at[knob], len(self.values[knob]) - 1) if keeps else (0, at[knob])
            while low < high:
                middle = (low + high + 1) // 2
                row = self.measured_at(_moved(at, knob, middle))
                if row is None:
                    return
                if judge.keeps_budget(row):
                    low, best = middle, row
                else:
                    high = middle - 1
            at[knob] = low
            if low == 0 and self.measured_at(at) is None:
                return

    def _measured(self, setting: list[float]) -> int | None:
        # A corpus can lack some combinations of values.
        distance = np.abs(np.log(self._settings) - np.log(np.array(setting))).sum(axis=1)
        row = int(distance.argmin())
        return row if self._measure(row) else None


def _moved(at: list[int], knob: int, index: int) -> list[int]:
    return [index if dimension == knob else own for dimension, own in enumerate(at)]
