"""Updates a prediction with further measurements without a new fit, for searches that alternate between both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BatchArray, ModeArray, Profile
from wattfleet.core.prediction.predictor import Prediction
from wattfleet.core.prediction.roofline import MEASUREMENT_SD, correlation, settings_of

Values = NDArray[np.float64]
Rows = NDArray[np.intp]


def conditioned(
    prediction: Prediction, modes: ModeArray, batch: BatchArray | None, rows: Rows, measured: Profile
) -> Prediction:
    """The posterior prediction of `n` rows after some of them have been measured.

    The errors of the prediction are modelled as a Gaussian process: its standard deviations are those of the
    prediction, and its correlations fall with the distance of modes and batches as in the predictor's own residual. A
    new fit also learns the workload's parameters, so it is better while there are few measurements.

    Args:
        prediction: the prediction of the `n` rows.
        modes: `[n, 4]` their modes.
        batch: `[n]` samples in their batches; None if all are of one batch size.
        rows: `[k]` indices of the measured rows; may be none.
        measured: their measured times and powers, in the order of `rows`.

    Raises:
        InvalidInputError: the lengths differ.
    """
    n = len(modes)
    if len(prediction.minibatch_ms) != n or len(measured) != len(rows):
        raise InvalidInputError(
            f"{len(prediction.minibatch_ms)} predictions for {n} rows, and {len(measured)} measurements for {len(rows)}"
        )
    if not len(rows):
        return prediction
    settings = settings_of(modes, batch)
    related = correlation(settings, settings[rows])
    time, time_sd = _posterior(
        np.log(prediction.minibatch_ms), prediction.time_log_sd, related, rows, measured.minibatch_ms
    )
    power, power_sd = _posterior(np.log(prediction.power_mw), prediction.power_log_sd, related, rows, measured.power_mw)
    return replace(
        prediction, minibatch_ms=np.exp(time), power_mw=np.exp(power), time_log_sd=time_sd, power_log_sd=power_sd
    )


def _posterior(
    log_mean: Values, log_sd: Values, related: Values, rows: Rows, observed: Values
) -> tuple[Values, Values]:
    """Posterior means and standard deviations, `[n]` each, given `k` observed rows with `[n, k]` correlations."""
    # The standard deviations are those of a measurement; the errors of the prediction itself are a little smaller.
    error_sd = np.sqrt(np.maximum(log_sd**2 - MEASUREMENT_SD**2, 0.0))
    across = related * np.outer(error_sd, error_sd[rows])
    factor = cho_factor(across[rows] + MEASUREMENT_SD**2 * np.eye(len(rows)), lower=True)
    weights = cho_solve(factor, across.T)
    mean = log_mean + (np.log(observed) - log_mean[rows]) @ weights
    variance = np.maximum(error_sd**2 - (across.T * weights).sum(axis=0), 0.0)
    return np.asarray(mean), np.asarray(np.sqrt(variance + MEASUREMENT_SD**2))
