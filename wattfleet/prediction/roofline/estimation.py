"""Fitting positive parameters to few or many observations: least squares with a Gaussian prior.

Parameters are fitted as logarithms, which keeps them positive. Observations are logarithms, too, so that a residual is
a relative error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.optimize import least_squares

from wattfleet.prediction.tensors import LARGEST_LOG

Values = NDArray[np.float64]
Model = Callable[[Values], Values]
"""Maps `[k]` parameters to the `[n]` logarithms that they predict."""

_STEP = 1e-5
# Standard deviation of further starting points around the first: a factor of about 1.5.
_START_SPREAD = 0.4


@dataclass(frozen=True)
class Prior:
    """The prior distribution of `k` parameters: independent normal distributions.

    Attributes:
        mean: `[k]` means.
        sd: `[k]` standard deviations.
    """

    mean: Values
    sd: Values

    def deviations(self, parameters: Values) -> Values:
        """Deviations of `[k]` parameters from the means, `[k]` in standard deviations."""
        return np.asarray((parameters - self.mean) / self.sd)


def robust_fit(
    model: Model,
    observed: Values,
    prior: Prior,
    scale: float,
    loss: Literal["soft_l1", "cauchy"],
    starts: int,
) -> Values:
    """The most plausible parameters, `[k]`, if single observations may be wrong.

    Args:
        model: the model to fit.
        observed: `[n]` observed logarithms.
        prior: the prior; the first start is its mean.
        scale: standard deviation of an ordinary residual.
        loss: the cost of a large residual: `soft_l1` its size, `cauchy` only its logarithm, which suits many
            observations of which some are wrong.
        starts: number of starting points; those after the first are drawn around it with a fixed seed.
    """

    def residuals(parameters: Values) -> Values:
        inside = np.clip(parameters, -LARGEST_LOG, LARGEST_LOG)
        return np.concatenate([(model(inside) - observed) / scale, prior.deviations(parameters)])

    rng = np.random.default_rng(0)
    further = [prior.mean + rng.normal(0, _START_SPREAD, len(prior.mean)) for _ in range(starts - 1)]
    fits = [least_squares(residuals, start, loss=loss, max_nfev=100) for start in (prior.mean, *further)]
    return np.asarray(min(fits, key=lambda fit: float(fit.cost)).x)


def generalised_fit(model: Model, observed: Values, prior: Prior, covariance: Values, start: Values) -> Values:
    """The most plausible parameters, `[k]`, if residuals are correlated.

    Args:
        model: the model to fit.
        observed: `[n]` observed logarithms.
        prior: the prior.
        covariance: `[n, n]` covariance of the residuals.
        start: `[k]` parameters near the solution.
    """
    root = np.linalg.cholesky(covariance)

    def residuals(parameters: Values) -> Values:
        misfit = model(np.clip(parameters, -LARGEST_LOG, LARGEST_LOG)) - observed
        return np.concatenate([solve_triangular(root, misfit, lower=True), prior.deviations(parameters)])

    return np.asarray(least_squares(residuals, start, max_nfev=50).x)


def jacobian(model: Model, parameters: Values) -> Values:
    """The derivatives of the model's `[n]` values with respect to its `[k]` parameters, `[n, k]`."""
    at = model(parameters)
    columns = [(model(parameters + step) - at) / _STEP for step in _STEP * np.eye(len(parameters))]
    return np.stack(columns, axis=1)


def residual_weights(residuals: Values, width: float) -> Values:
    """Weight of each residual, `[n]` in (0, 1]: near 1 within `width`, and falling with its 4th power beyond.

    Beyond the width, a larger residual has less influence on the fit. If weights fell only with the square, its
    influence would not decrease.
    """
    return np.asarray(1 / (1 + (residuals / width) ** 4))
