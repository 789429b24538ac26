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
"""Maps `p` sets of parameters, `[k, p]`, to the logarithms that they predict, `[p, n]`."""

_STEP = 1e-5
# Standard deviation of further starting points around the first: a factor of about 1.5.
_START_SPREAD = 0.4
# Keeps a covariance invertible if a parameter is known exactly.
_JITTER = 1e-10


@dataclass(frozen=True)
class Prior:
    """The prior distribution of `k` parameters: a normal distribution.

    Attributes:
        mean: `[k]` means.
        root: `[k, k]` lower Cholesky factor of the covariance.
    """

    mean: Values
    root: Values

    @classmethod
    def independent(cls, mean: Values, sd: Values) -> Prior:
        """Independent parameters with `[k]` means and standard deviations."""
        return cls(mean, np.asarray(np.diag(sd)))

    @classmethod
    def correlated(cls, mean: Values, covariance: Values) -> Prior:
        """Parameters with `[k]` means and a `[k, k]` covariance."""
        return cls(mean, np.asarray(np.linalg.cholesky(covariance + _JITTER * np.eye(len(mean)))))

    def extended(self, mean: float, sd: float) -> Prior:
        """The prior with one more, independent parameter."""
        k = len(self.mean)
        root = np.zeros((k + 1, k + 1))
        root[:k, :k], root[k, k] = self.root, sd
        return Prior(np.append(self.mean, mean), root)

    def parameters(self, deviations: Values) -> Values:
        """The parameters at independent standard deviations from the mean; both `[k]`, or both `[k, p]`."""
        offset = self.root @ deviations
        return np.asarray(self.mean + offset if offset.ndim == 1 else self.mean[:, None] + offset)

    def deviations(self, parameters: Values) -> Values:
        """Independent standard deviations of `[k]` parameters from the mean, `[k]`."""
        return np.asarray(solve_triangular(self.root, parameters - self.mean, lower=True))


def robust_fit(
    model: Model,
    observed: Values,
    prior: Prior,
    scale: float,
    loss: Literal["soft_l1", "cauchy"],
    starts: int,
) -> Values:
    """The parameters with the largest posterior density, `[k]`, by a fit that is robust to single wrong observations.

    Args:
        model: the model to fit.
        observed: `[n]` observed logarithms.
        prior: the prior; the first start is its mean.
        scale: standard deviation of an ordinary residual.
        loss: how the cost grows with a large residual: `soft_l1` linearly, `cauchy` only logarithmically, which suits
            many observations of which some are wrong.
        starts: number of starting points; those after the first are drawn around it with a fixed seed.
    """
    whitened = _whitened(model, prior)

    def residuals(deviations: Values) -> Values:
        return np.concatenate([(value_at(whitened, deviations) - observed) / scale, deviations])

    def gradient(deviations: Values) -> Values:
        return np.vstack([jacobian(whitened, deviations) / scale, np.eye(len(deviations))])

    rng = np.random.default_rng(0)
    k = len(prior.mean)
    further = [prior.deviations(prior.mean + rng.normal(0, _START_SPREAD, k)) for _ in range(starts - 1)]
    fits = [least_squares(residuals, start, jac=gradient, loss=loss, max_nfev=100) for start in (np.zeros(k), *further)]
    return prior.parameters(np.asarray(min(fits, key=lambda fit: float(fit.cost)).x))


def generalised_fit(model: Model, observed: Values, prior: Prior, covariance: Values, start: Values) -> Values:
    """The parameters with the largest posterior density, `[k]`, for correlated residuals (generalised least squares).

    Args:
        model: the model to fit.
        observed: `[n]` observed logarithms.
        prior: the prior.
        covariance: `[n, n]` covariance of the residuals.
        start: `[k]` parameters near the solution.
    """
    whitened, root = _whitened(model, prior), np.linalg.cholesky(covariance)

    def residuals(deviations: Values) -> Values:
        misfit = value_at(whitened, deviations) - observed
        return np.concatenate([solve_triangular(root, misfit, lower=True), deviations])

    def gradient(deviations: Values) -> Values:
        whitened_gradient = solve_triangular(root, jacobian(whitened, deviations), lower=True)
        return np.vstack([whitened_gradient, np.eye(len(deviations))])

    found = least_squares(residuals, prior.deviations(start), jac=gradient, max_nfev=50)
    return prior.parameters(np.asarray(found.x))


def _whitened(model: Model, prior: Prior) -> Model:
    """A model as a function of independent deviations from a prior's mean, instead of the parameters."""
    return lambda deviations: model(np.clip(prior.parameters(deviations), -LARGEST_LOG, LARGEST_LOG))


def value_at(model: Model, parameters: Values) -> Values:
    """The model's `[n]` values with one set of `[k]` parameters."""
    return np.asarray(model(parameters[:, None])[0])


def jacobian(model: Model, parameters: Values) -> Values:
    """The derivatives of the model's `[n]` values with respect to its `[k]` parameters, `[n, k]`."""
    k = len(parameters)
    values = model(parameters[:, None] + _STEP * np.eye(k, k + 1, 1))
    return np.asarray((values[1:] - values[0]).T / _STEP)


def residual_weights(residuals: Values, width: float) -> Values:
    """Weight of each residual, `[n]` in (0, 1]: near 1 within `width`, and falling with its 4th power beyond.

    Beyond the width, a larger residual has less influence on the fit. If weights fell only with the square, its
    influence would not decrease.
    """
    return np.asarray(1 / (1 + (residuals / width) ** 4))
