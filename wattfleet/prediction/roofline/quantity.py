"""Fitting one quantity, time or power, of one workload: parameters of the physics, and what they leave unexplained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.prediction.roofline.estimation import (
    Model,
    Prior,
    generalised_fit,
    jacobian,
    residual_weights,
    robust_fit,
    value_at,
)
from wattfleet.prediction.roofline.physics import Settings
from wattfleet.prediction.roofline.residual import (
    MAX_INDUCING,
    Correction,
    Points,
    Remainder,
    Surface,
    expected_process,
    log_evidence,
)
from wattfleet.prediction.tensors import LARGEST_LOG

Values = NDArray[np.float64]
GpuShare = Callable[[Values], Values]
"""Finds by how much a quantity grows with the GPU's work, `[n]`, from its `[n, k]` derivatives."""

SHARE = (0.4, 0.25)
"""Prior of the share of the population's residual that another workload shows: mean and standard deviation."""

# Measured rows at which their own scatter counts as much as the model's, when intervals are widened.
_SCALE_ROWS = 10.0
_LARGEST_SCALE = 3.0
# Fewest measured rows whose scatter says something about intervals.
_FEWEST_SCATTERED = 5


@dataclass(frozen=True)
class FittedQuantity:
    """One quantity, fitted to measured rows.

    Attributes:
        log_parameters: `[k]` log parameters of the physics.
        remainder: what is added to the physics.
        log_evidence: log probability density of the measurements under the prior.
    """

    log_parameters: Values
    remainder: Remainder
    log_evidence: float


def fit_rows(
    physics: Model, settings: Settings, observed: Values, prior: Prior, surface: Surface, width: float, gpu: GpuShare
) -> FittedQuantity:
    """Fit one quantity to few rows, or none.

    Args:
        physics: the model from log parameters to log values at the rows.
        settings: `[n, 5]` measured rows.
        observed: `[n]` measured logarithms.
        prior: the prior of the parameters.
        surface: what the physics left unexplained of other workloads.
        width: log residual beyond which a row is rather wrong than typical of the workload.
        gpu: finds the rows' shares of GPU work.

    Raises:
        InvalidInputError: no plausible parameters explain the rows.
    """
    prior = prior.extended(*SHARE)
    model = with_surface(physics, surface.at(settings))
    parameters = prior.mean
    _require_plausible(parameters, value_at(model, parameters))
    if len(observed):
        parameters = robust_fit(model, observed, prior, width / 5, "soft_l1", starts=1)
    residuals, gradient = observed - value_at(model, parameters), jacobian(model, parameters)
    row_weights = residual_weights(residuals, width)
    # The model is nearly linear around these parameters, so residuals around the prior's mean are nearly normal.
    target, spread = residuals + gradient @ (parameters - prior.mean), gradient @ prior.root
    points = Points(settings, gpu(gradient))
    process = expected_process(points, target, row_weights, spread @ spread.T)
    measurement_var = process.measurement_var(row_weights)
    if len(observed):
        covariance = process.covariance(points, points) + np.diag(measurement_var)
        parameters = generalised_fit(model, observed, prior, covariance, parameters)
    residuals, gradient = observed - value_at(model, parameters), jacobian(model, parameters)
    _require_plausible(parameters, residuals)
    points = Points(settings, gpu(gradient))
    covariance = process.covariance(points, points) + np.diag(measurement_var)
    spread = gradient @ prior.root
    correction = Correction(
        process, points, gradient, prior.root, measurement_var, np.asarray(np.linalg.solve(covariance, residuals))
    )
    target = residuals + gradient @ (parameters - prior.mean)
    evidence = log_evidence(covariance + spread @ spread.T, target) if len(observed) else 0.0
    remainder = Remainder(float(parameters[-1]), surface, _scaled(correction))
    return FittedQuantity(parameters[:-1], remainder, evidence)


def _require_plausible(parameters: Values, values: Values) -> None:
    """Check log parameters, and values that follow from them.

    Raises:
        InvalidInputError: a parameter is beyond any plausible model, or a value is not finite.
    """
    if not ((np.abs(parameters) <= LARGEST_LOG).all() and np.isfinite(values).all()):
        raise InvalidInputError(
            "the prior does not fit the measured rows: check the units of the rows, or choose another reference"
        )


def fit_corpus(physics: Model, settings: Settings, observed: Values, prior: Prior, width: float) -> FittedQuantity:
    """Fit one quantity to a whole corpus with some wrong rows; the order of the rows does not matter.

    The residual is condensed into a surface instead of a correction.
    """
    parameters = robust_fit(physics, observed, prior, 0.02, "cauchy", starts=3)
    residuals = observed - value_at(physics, parameters)
    surface = Surface.fit(settings, residuals, residual_weights(residuals, width), inducing_rows(settings))
    remaining = np.abs(residuals - surface.at(settings))
    # The standard deviation whose 90 % interval holds 90 % of the plausible rows; wrong rows do not widen it.
    sd = float(np.quantile(remaining[remaining <= width], 0.9)) / 1.645
    correction = Correction.none(len(parameters) + 1, sd, np.unique(settings[:, 4]))
    return FittedQuantity(parameters, Remainder(1.0, surface, correction), 0.0)


def inducing_rows(settings: Settings) -> NDArray[np.intp]:
    """Indices of the rows that carry a corpus's surface; the same rows whatever their order."""
    order = np.lexsort(settings.T)
    return np.asarray(order[np.random.default_rng(0).permutation(len(settings))[:MAX_INDUCING]])


def with_surface(physics: Model, surface: Values) -> Model:
    """Extend a model with one more parameter: the share of a surface with these `[n]` values."""
    return lambda parameters: physics(parameters[:-1]) + parameters[-1][:, None] * surface


def predict_rows(
    values: Values,
    gradient: Values,
    remainder: Remainder,
    settings: Settings,
    surface: Values,
    gpu: GpuShare,
) -> tuple[Values, Values]:
    """Predict the mean and standard deviation of one quantity's logarithm, `[n]` each.

    Args:
        values: `[n]` logarithms by the physics.
        gradient: `[n, k]` their derivatives with respect to the log parameters.
        remainder: what is added.
        settings: `[n, 5]` rows.
        surface: `[n]` what the physics leaves unexplained of other workloads.
        gpu: finds the rows' shares of GPU work.
    """
    gradient = np.column_stack([gradient, surface])
    correction, sd = remainder.correction.at(Points(settings, gpu(gradient)), gradient)
    return values + remainder.share * surface + correction, sd


def _scaled(correction: Correction) -> Correction:
    """Widen the intervals if the measured rows scatter more than expected around predictions from the others.

    Rows that are wrong count here, since further ones are to be expected among those that were not measured.
    """
    rows = len(correction.weights)
    if rows < _FEWEST_SCATTERED:
        return correction
    residuals, expected = correction.left_out()
    wider = np.clip(np.quantile(np.abs(residuals) / expected, 0.9) / 1.645, 1.0, _LARGEST_SCALE)
    return replace(correction, interval_scale=float(wider ** (rows / (rows + _SCALE_ROWS))))
