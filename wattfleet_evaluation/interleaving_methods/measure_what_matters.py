"""Wattfleet's own method: measures what is most likely to improve the choice, and chooses what it has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import InterleavingObjective, PairedModes, ServiceLimits, next_measurement
from wattfleet.modes import Task
from wattfleet_evaluation.corpus_predictions import CorpusPredictions, Fit
from wattfleet_evaluation.interleaving_methods.interleaving_method import Choose, best_measured
from wattfleet_evaluation.interleaving_methods.session import InterleavingSession

# Measurements of a task up to which its predictor is fitted again. Fits to more of them choose no better.
_FITTED = 3
# Problems that share their measurements, of which this many at random tell what to measure next.
_PROBLEMS = 40


@dataclass
class MeasureWhatMattersBesideInference:
    """Measures what `wattfleet.choosing.next_measurement` proposes, then chooses the best measured mode and batch.

    Attributes:
        fit: for each task, fits the predictor; it must predict without any measurement.
        name: name in tables.
    """

    fit: Mapping[Task, Fit]
    name: str = "wattfleet"

    def __post_init__(self) -> None:
        self._predictions = {task: CorpusPredictions(fit, _FITTED) for task, fit in self.fit.items()}

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Measure up to the session's limit, or fewer if no further measurement can improve a choice."""
        drawn = np.random.default_rng(seed)
        while session.remaining:
            some = problems
            if len(problems) > _PROBLEMS:
                some = [problems[at] for at in drawn.choice(len(problems), _PROBLEMS, replace=False)]
            proposal = next_measurement(self._known(session), some, objective)
            if proposal is None:
                break
            session.measure(proposal)
        return best_measured(session, objective)

    def _known(self, session: InterleavingSession) -> PairedModes:
        corpora = session.corpora
        predicted = {task: self._predictions[task].after(corpora.of_task(task), session.rows[task]) for task in Task}
        return corpora.known(predicted, session.rows)
