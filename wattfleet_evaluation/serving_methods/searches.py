"""Searches that measure and do not predict, as the published searches for modes with one more dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import Objective, ServiceLimits
from wattfleet.modes import BatchArray
from wattfleet_evaluation.grid_search import BATCH, Grid
from wattfleet_evaluation.serving_methods.serving_method import Choose, best_measured
from wattfleet_evaluation.serving_methods.serving_session import ServingSession


@dataclass(frozen=True)
class SettingSearch:
    """For each problem, measures the middle of the remaining settings and drops half of the values of one dimension.

    Searches share their measurements and continue up to the limit. Batch sizes that cannot be collected within the
    latency are left out from the beginning.
    """

    name: str = "binary-search"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Search for each of the problems. The seed has no effect."""
        for problem in problems:
            judge = _SettingJudge(session, problem)

            def upper(dimension: int, row: int, judge: _SettingJudge = judge) -> bool:
                if dimension == BATCH:
                    return judge.wants_larger_batch(row)
                # Higher values of a knob take less time and draw more power.
                wants_more = objective is Objective.MOST_SAMPLES or not judge.keeps_latency(row)
                return judge.keeps_budget(row) and wants_more

            judge.grid().halve(upper)
        return best_measured(session.profile(), objective)


@dataclass(frozen=True)
class SettingGradient:
    """Measures the slope of time against power along each knob from the middle, then searches along the steepest."""

    name: str = "gradient"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Search for each of the problems. The seed has no effect."""
        for problem in problems:
            judge = _SettingJudge(session, problem)
            judge.grid().climb(judge)
        return best_measured(session.profile(), objective)


class _SettingJudge:
    """Judges the settings whose batch can be collected within a latency, by their measured values."""

    def __init__(self, session: ServingSession, limits: ServiceLimits) -> None:
        self._session, self._limits = session, limits
        self._possible = np.flatnonzero(limits.longest_ms(session.batch) > 0)

    def grid(self) -> Grid:
        """The settings, which are measured up to the session's limit."""
        settings = np.column_stack([self._session.modes, self._session.batch])[self._possible]
        return Grid(settings, lambda row: self._session.has_measured(int(self._possible[row])))

    def keeps_budget(self, row: int) -> bool:
        """Whether the setting draws no more than the budget."""
        return self._values(row)[1] <= self._limits.budget_mw

    def keeps_latency(self, row: int) -> bool:
        """Whether the setting keeps the latency."""
        return bool(self._values(row)[0] <= self._limits.longest_ms(self._batch(row))[0])

    def wants_larger_batch(self, row: int) -> bool:
        """Whether a larger batch may be better: it needs less time and energy for each sample."""
        is_behind = self._values(row)[0] > self._limits.collect_ms(self._batch(row))[0]
        return bool(is_behind) or self.keeps_latency(row)

    def slope(self, low: int, high: int) -> float:
        """Milliseconds of a batch that each further mW saves; infinite if no more power is needed."""
        (low_ms, low_mw), (high_ms, high_mw) = self._values(low), self._values(high)
        return (low_ms - high_ms) / (high_mw - low_mw) if high_mw > low_mw else float(np.inf)

    def _values(self, row: int) -> tuple[float, float]:
        found = self._session.measure(int(self._possible[row]))
        return found.minibatch_ms, found.power_mw

    def _batch(self, row: int) -> BatchArray:
        return self._session.batch[self._possible[row : row + 1]]
