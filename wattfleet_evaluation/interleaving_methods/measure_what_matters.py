"""Wattfleet's own method: measures what is most likely to improve the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import InterleavingObjective, PairedModes, ServiceLimits, next_measurement
from wattfleet.modes import Task
from wattfleet_evaluation.corpus_predictions import CorpusPredictions, Fit
from wattfleet_evaluation.interleaving_methods.interleaving_method import Choose, best_known, best_measured
from wattfleet_evaluation.interleaving_methods.session import InterleavingSession

# Measurements of a task up to which its predictor is fitted again, for one problem and for many that share their
# measurements. Fits to more of them choose no better.
_FITTED = 3
_FITTED_SHARED = 12
# If problems share their measurements, this many of them, drawn at random, determine what to measure next.
_PROBLEMS = 150
# Probability with which each unmeasured time and power must keep its limit.
_PROBABILITY = 0.99


@dataclass
class MeasureWhatMattersBesideInference:
    """Measures what `wattfleet.choosing.next_measurement` proposes, then chooses the best mode and batch.

    For a single problem, only a measured mode and batch is chosen, which cannot break a limit. Problems that
    share their measurements also choose by predictions, with `_PROBABILITY`.

    Attributes:
        fit: for each task, fits the predictor; it must predict without any measurement.
        name: name in tables.
    """

    fit: Mapping[Task, Fit]
    name: str = "wattfleet"

    def __post_init__(self) -> None:
        self._predictions = {task: CorpusPredictions(fit) for task, fit in self.fit.items()}

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Measure up to the session's limit, or fewer if no further measurement can improve a choice."""
        drawn, shared = np.random.default_rng(seed), len(problems) > 1
        while session.remaining:
            some = problems
            if len(problems) > _PROBLEMS:
                some = [problems[at] for at in drawn.choice(len(problems), _PROBLEMS, replace=False)]
            known = self._known(session, _FITTED_SHARED if shared else _FITTED)
            proposal = next_measurement(known, some, objective)
            if proposal is None:
                break
            session.measure(proposal)
        return (
            best_known(self._known(session), objective, _PROBABILITY) if shared else best_measured(session, objective)
        )

    def _known(self, session: InterleavingSession, fitted: int | None = None) -> PairedModes:
        corpora = session.corpora
        predicted = {
            task: self._predictions[task].after(corpora.of_task(task), session.rows[task], fitted) for task in Task
        }
        return corpora.known(predicted, session.rows)
