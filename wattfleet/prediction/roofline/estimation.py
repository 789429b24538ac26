"""Fitting positive parameters to few or many observations: least squares with a Gaussian prior.

Everything is in logarithms: of the parameters, so that they stay positive, and of the observations, so that a
residual is a relative error.
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
"""From `[k]` parameters to the `[n]` logarithms that they predict."""

_STEP = 1e-5
# Further starts are drawn this far around the first: work is then 1.5 times more or less.
_START_SPREAD = 0.4


@dataclass(frozen=True)
class Prior:
    """What is held about `k` parameters before fitting: independent normal distributions.

    Attributes:
        mean: `[k]` means.
        sd: `[k]` standard deviations.
    """

    mean: Values
    sd: Values

    def misfit(self, parameters: Values) -> Values:
        """How far `[k]` parameters lie from the means, `[k]` in standard deviations."""
        return np.asarray((parameters - self.mean) / self.sd)


def robust_fit(
    model: Model,
    observed: Values,
    belief: Prior,
    scale: float,
    loss: Literal["soft_l1", "cauchy"],
    starts: int,
) -> Values:
    """The most plausible parameters, `[k]`, where single observations may be false.

    Args:
        model: what parameters predict.
        observed: `[n]` observed logarithms.
        belief: the prior; the first start is its mean.
        scale: standard deviation of an ordinary residual.
        loss: what a large residual costs: `soft_l1` its size, `cauchy` only its logarithm, which suits many
            observations of which some are false.
        starts: starting points, the further ones drawn around the first from a fixed seed.
    """

    def residuals(parameters: Values) -> Values:
        inside = np.clip(parameters, -LARGEST_LOG, LARGEST_LOG)
        return np.concatenate([(model(inside) - observed) / scale, belief.misfit(parameters)])

    rng = np.random.default_rng(0)
    further = [belief.mean + rng.normal(0, _START_SPREAD, len(belief.mean)) for _ in range(starts - 1)]
    fits = [least_squares(residuals, start, loss=loss, max_nfev=100) for start in (belief.mean, *further)]
    return np.asarray(min(fits, key=lambda fit: float(fit.cost)).x)


def generalised_fit(model: Model, observed: Values, belief: Prior, covariance: Values, start: Values) -> Values:
    """The most plausible parameters, `[k]`, where residuals go together.

    Args:
        model: what parameters predict.
        observed: `[n]` observed logarithms.
        belief: the prior.
        covariance: `[n, n]` covariance of the residuals.
        start: `[k]` parameters near the answer.
    """
    root = np.linalg.cholesky(covariance)

    def residuals(parameters: Values) -> Values:
        misfit = model(np.clip(parameters, -LARGEST_LOG, LARGEST_LOG)) - observed
        return np.concatenate([solve_triangular(root, misfit, lower=True), belief.misfit(parameters)])

    return np.asarray(least_squares(residuals, start, max_nfev=50).x)


def jacobian(model: Model, parameters: Values) -> Values:
    """The derivatives of the model's `[n]` values by its `[k]` parameters, `[n, k]`."""
    at = model(parameters)
    columns = [(model(parameters + step) - at) / _STEP for step in _STEP * np.eye(len(parameters))]
    return np.stack(columns, axis=1)


def trust(residuals: Values, width: float) -> Values:
    """How far each residual is believed, `[n]` in (0, 1]: near 1 within `width`, falling with its 4th power beyond.

    The larger a residual beyond the width, the less it pulls: falling with the square, it would pull on for ever.
    """
    return np.asarray(1 / (1 + (residuals / width) ** 4))
