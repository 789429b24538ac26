"""The published searches over power mode and inference batch, which choose by measurements alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import InterleavingObjective, ServiceLimits
from wattfleet_evaluation.grid_search import BATCH, Grid, LimitsJudge, Measured
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
            possible = _CollectableRows(session, limits)

            def upper(dimension: int, row: int, judge: LimitsJudge = possible.judge) -> bool:
                return judge.wants_larger_batch(row) if dimension == BATCH else judge.keeps_budget(row)

            possible.grid.halve(upper)
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
            possible = _CollectableRows(session, limits)
            possible.grid.climb(possible.judge)
        return best_measured(session, objective)


class _CollectableRows:
    """The rows whose batch can be collected within a latency."""

    def __init__(self, session: InterleavingSession, limits: ServiceLimits) -> None:
        self._session = session
        corpora = session.corpora
        self._rows = np.flatnonzero(limits.longest_ms(corpora.batch) > 0)
        settings = np.column_stack([corpora.inference.modes, corpora.batch])[self._rows]
        self.grid = Grid(settings, lambda row: session.measure_pair(int(self._rows[row])))
        self.judge = LimitsJudge(limits, self._measured)

    def _measured(self, row: int) -> Measured:
        pair, at = self._session.corpora.measured, int(self._rows[row])
        mode = pair.mode_of[at]
        return Measured(
            float(pair.inference.minibatch_ms[at]),
            float(max(pair.inference.power_mw[at], pair.training.power_mw[mode])),
            float(pair.training.minibatch_ms[mode]),
            int(self._session.corpora.batch[at]),
        )
