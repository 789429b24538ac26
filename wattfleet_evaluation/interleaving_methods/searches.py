"""The published searches over power mode and inference batch, which measure and do not predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import InterleavingObjective, PairedModes, ServiceLimits
from wattfleet.modes import BatchArray
from wattfleet_evaluation.grid_search import BATCH, Grid
from wattfleet_evaluation.interleaving_methods.interleaving_method import Choose, best_measured
from wattfleet_evaluation.interleaving_methods.session import InterleavingSession


@dataclass(frozen=True)
class BinarySearch:
    """Measures the middle of the remaining modes and batches, and drops half of the values of one dimension.

    A knob goes up where the pair keeps the budget. The batch goes up where it keeps the latency, or where the inference
    takes longer than its requests to arrive.
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
            judge = _PairJudge(session.corpora.measured, limits)

            def upper(dimension: int, row: int, judge: _PairJudge = judge) -> bool:
                return judge.wants_larger_batch(row) if dimension == BATCH else judge.keeps_budget(row)

            judge.grid(session).halve(upper)
        return best_measured(session, objective)


@dataclass(frozen=True)
class GradientSearch:
    """Measures the slope of time against power along each knob from the middle, then searches along the steepest."""

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
            judge = _PairJudge(session.corpora.measured, limits)
            judge.grid(session).climb(judge)
        return best_measured(session, objective)


class _PairJudge:
    """Judges the rows that can be collected within a latency, by their measured values."""

    def __init__(self, measured: PairedModes, limits: ServiceLimits) -> None:
        self._limits = limits
        possible = limits.longest_ms(measured.inference.stated_batch()) > 0
        self._possible, self._pair = np.flatnonzero(possible), measured.among(possible)
        self._power_mw = self._pair.power_mw()

    def grid(self, session: InterleavingSession) -> Grid:
        """The rows, each of which is measured together with the training in its mode."""
        inference = self._pair.inference
        settings = np.column_stack([inference.modes, inference.stated_batch()])
        return Grid(settings, lambda row: session.measure_pair(int(self._possible[row])))

    def keeps_budget(self, row: int) -> bool:
        """Whether the pair draws no more than the budget."""
        return bool(self._power_mw[row] <= self._limits.budget_mw)

    def keeps_latency(self, row: int) -> bool:
        """Whether the inference keeps the latency."""
        return bool(self._pair.inference.minibatch_ms[row] <= self._limits.longest_ms(self._batch(row))[0])

    def wants_larger_batch(self, row: int) -> bool:
        """Whether a larger batch may be better: it needs less time for each request, but takes longer to collect."""
        is_behind = self._pair.inference.minibatch_ms[row] > self._limits.collect_ms(self._batch(row))[0]
        return bool(is_behind) or self.keeps_latency(row)

    def slope(self, low: int, high: int) -> float:
        """Milliseconds of a minibatch that each further mW saves; infinite if no more power is needed."""
        minibatch_ms = self._pair.training.minibatch_ms[self._pair.mode_of]
        more_mw = float(self._power_mw[high] - self._power_mw[low])
        return float(minibatch_ms[low] - minibatch_ms[high]) / more_mw if more_mw > 0 else float(np.inf)

    def _batch(self, row: int) -> BatchArray:
        return self._pair.inference.stated_batch()[row : row + 1]
