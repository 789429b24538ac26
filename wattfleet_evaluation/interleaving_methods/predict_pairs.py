"""The published networks, trained on random measurements: the best predicted mode and batch is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import InterleavingObjective, Proposal, ServiceLimits
from wattfleet_evaluation.interleaving_methods.interleaving_method import Choose, best_known
from wattfleet_evaluation.interleaving_methods.session import InterleavingSession
from wattfleet_evaluation.powertrain.corpus import predicted_corpus
from wattfleet_evaluation.powertrain.networks import Schedule


@dataclass(frozen=True)
class NetworkFromRandom:
    """Measures random modes of training and random modes with batches of inference, half of the limit each.

    Four networks are trained on them: time and power of training by mode, and of inference by mode and batch. As in the
    published work, a choice has no margin for the error of the prediction.
    """

    name: str = "network"

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Measure up to the session's limit, and train."""
        drawn, corpora = np.random.default_rng(seed), session.corpora
        for task in session.rows:
            for row in drawn.permutation(len(corpora.of_task(task)))[: session.limit // 2].tolist():
                session.measure(Proposal(task, row))
        predicted = {
            task: predicted_corpus(corpora.of_task(task), np.array(rows, dtype=np.intp), Schedule(seed=seed))
            for task, rows in session.rows.items()
        }
        return best_known(corpora.known(predicted, session.rows), objective)
