"""Searches that choose by measurements alone: the published searches for modes, extended by the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import Objective, ServiceLimits
from wattfleet_evaluation.grid_search import BATCH, Grid, LimitsJudge, Measured
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
            possible = _CollectableSettings(session, problem)

            def upper(dimension: int, row: int, judge: LimitsJudge = possible.judge) -> bool:
                if dimension == BATCH:
                    return judge.wants_larger_batch(row)
                # Higher values of a knob take less time and draw more power.
                wants_more = objective is Objective.MOST_SAMPLES or not judge.keeps_latency(row)
                return judge.keeps_budget(row) and wants_more

            possible.grid.halve(upper)
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
            possible = _CollectableSettings(session, problem)
            possible.grid.climb(possible.judge)
        return best_measured(session.profile(), objective)


class _CollectableSettings:
    """The settings whose batch can be collected within a latency."""

    def __init__(self, session: ServingSession, limits: ServiceLimits) -> None:
        self._session = session
        self._rows = np.flatnonzero(limits.longest_ms(session.batch) > 0)
        settings = np.column_stack([session.modes, session.batch])[self._rows]
        self.grid = Grid(settings, lambda row: session.measure_if_allowed(int(self._rows[row])))
        self.judge = LimitsJudge(limits, self._measured)

    def _measured(self, row: int) -> Measured:
        at = int(self._rows[row])
        found = self._session.measure(at)
        return Measured(found.minibatch_ms, found.power_mw, found.minibatch_ms, int(self._session.batch[at]))
