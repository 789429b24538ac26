"""The published network: trained on random measurements, it predicts everything, and its best prediction is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattfleet.choosing import InterleavingObjective, Proposal, ServiceLimits
from wattfleet.modes import Profile
from wattfleet.prediction import Prediction
from wattfleet_evaluation.interleaving_methods.interleaving_method import Choose, best_known
from wattfleet_evaluation.interleaving_methods.session import InterleavingSession
from wattfleet_evaluation.powertrain.networks import Schedule, train

Values = NDArray[np.float64]


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
            task: _predicted(corpora.of_task(task), np.array(rows, dtype=np.intp), Schedule(seed=seed))
            for task, rows in session.rows.items()
        }
        return best_known(corpora.known(predicted, session.rows), objective)


def _predicted(corpus: Profile, rows: NDArray[np.intp], schedule: Schedule) -> Prediction:
    """The networks' prediction of a whole corpus, from some of its rows."""
    inputs = corpus.modes if corpus.batch is None else np.column_stack([corpus.modes, corpus.batch])
    columns = corpus.minibatch_ms, corpus.power_mw
    trained = train(
        np.stack([inputs[rows]] * 2), np.stack([each[rows] for each in columns]), [None, None], "mse", schedule
    )
    # The networks may predict a negative value.
    time, power = (
        np.maximum(network(inputs), 0.1 * each[rows].min()) for (network, _), each in zip(trained, columns, strict=True)
    )
    return Prediction(time, power, np.zeros(len(corpus)), np.zeros(len(corpus)))
