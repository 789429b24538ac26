"""Predictions of a whole corpus by the published networks, trained on some of its rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile
from wattfleet.prediction import Prediction
from wattfleet_evaluation.powertrain.networks import Schedule, train
from wattfleet_evaluation.powertrain.predictors import FLOOR


def predicted_corpus(corpus: Profile, rows: NDArray[np.intp], schedule: Schedule) -> Prediction:
    """Train a network for time and one for power, and predict all rows without uncertainty.

    Args:
        corpus: modes, or modes with batches, which are then a fifth input of the networks.
        rows: `[k]` measured rows to train on, 2 or more.
        schedule: the hyperparameters.

    Raises:
        InvalidInputError: there are too few rows, or torch is not installed.
    """
    if len(rows) < 2:
        raise InvalidInputError(f"a network is trained on 2 or more measurements, not {len(rows)}: allow more of them")
    inputs = corpus.modes if corpus.batch is None else np.column_stack([corpus.modes, corpus.batch])
    columns = corpus.minibatch_ms, corpus.power_mw
    trained = train(
        np.stack([inputs[rows]] * 2), np.stack([each[rows] for each in columns]), [None, None], "mse", schedule
    )
    time, power = (
        np.maximum(network(inputs), FLOOR * each[rows].min())
        for (network, _), each in zip(trained, columns, strict=True)
    )
    return Prediction(time, power, np.zeros(len(corpus)), np.zeros(len(corpus)))
