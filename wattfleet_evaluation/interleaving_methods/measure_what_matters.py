"""Wattfleet's own method: measures what is most likely to improve the choice, and chooses what it has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from wattfleet.choosing import InterleavingObjective, PairedModes, ServiceLimits, next_measurement
from wattfleet.modes import Task
from wattfleet.prediction import Prediction, conditioned
from wattfleet_evaluation.choice_methods.random_then_predict import Fit
from wattfleet_evaluation.interleaving_methods.interleaving_method import Choose, best_measured
from wattfleet_evaluation.interleaving_methods.session import InterleavingSession

# The first measurements of a task tell of its workload: the predictor is fitted again after each of them. After that,
# the last fit is conditioned on what is measured further, which takes a tenth of the time.
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

    fit: dict[Task, Fit]
    name: str = "wattfleet"
    _fitted: dict[tuple[Task, tuple[int, ...]], Prediction] = field(default_factory=dict)

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
        return session.corpora.known({task: self._predicted(session, task) for task in session.rows}, session.rows)

    def _predicted(self, session: InterleavingSession, task: Task) -> Prediction:
        """The prediction of all rows of a task."""
        corpus = session.corpora.of_task(task)
        first, further = session.rows[task][:_FITTED], np.array(session.rows[task][_FITTED:], dtype=np.intp)
        # Problems begin with the same measurements.
        key = task, tuple(sorted(first))
        if key not in self._fitted:
            predictor = self.fit[task](corpus.rows(np.array(key[1], dtype=np.intp)))
            self._fitted[key] = predictor.predict(corpus.modes, corpus.batch)
        return conditioned(self._fitted[key], corpus.modes, corpus.batch, further, corpus.rows(further))
