"""Binary search over the four knobs and the batch size, as the published search for modes with one more dimension."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import Objective, ServiceLimits
from wattfleet.modes import Measurement
from wattfleet_evaluation.serving_methods.serving_method import Choose, best_measured
from wattfleet_evaluation.serving_methods.serving_session import ServingSession

_BATCH = 4


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
            _search(session, problem, objective)
        return best_measured(session.profile(), objective)


def _search(session: ServingSession, problem: ServiceLimits, objective: Objective) -> None:
    possible = np.flatnonzero(problem.longest_ms(session.batch) > 0)
    if not len(possible):
        return
    settings = np.column_stack([session.modes, session.batch])[possible]
    values: list[list[float]] = [np.unique(column).tolist() for column in settings.T]
    turns = itertools.cycle((_BATCH, 0, 1, 2, 3))
    while session.remaining:
        middle = np.array([column[len(column) // 2] for column in values])
        # A corpus may not hold all combinations of values.
        nearest = int(np.abs(np.log(settings) - np.log(middle)).sum(axis=1).argmin())
        found = session.measure(int(possible[nearest]))
        if all(len(column) == 1 for column in values):
            return
        turn = next(turn for turn in turns if len(values[turn]) > 1)
        half = len(values[turn]) // 2
        upper = _raise_batch(found, problem) if turn == _BATCH else _raise_knob(found, problem, objective)
        values[turn] = values[turn][half:] if upper else values[turn][:half]


def _raise_knob(found: Measurement, problem: ServiceLimits, objective: Objective) -> bool:
    """Whether to continue with the higher values of a knob, which take less time and draw more power."""
    if found.power_mw > problem.budget_mw:
        return False
    return objective is Objective.MOST_SAMPLES or not _in_time(found, problem)


def _raise_batch(found: Measurement, problem: ServiceLimits) -> bool:
    """Whether to continue with the larger batches, which need less time and energy for each sample."""
    collect_ms = 1e3 * (found.batch or 1) / problem.arrival_per_s
    return _in_time(found, problem) or found.minibatch_ms > collect_ms


def _in_time(found: Measurement, problem: ServiceLimits) -> bool:
    return bool(found.minibatch_ms <= problem.longest_ms(np.array([found.batch]))[0])
