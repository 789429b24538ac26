"""The size of a prior's covariance, if it was estimated from few samples.

One factor of the covariance is unknown. Before any measurement it is `samples / chi^2`, with as many degrees of freedom
as there are samples: the posterior of a variance whose prior is inverse gamma. Predictions then have Student's t
distribution instead of the normal one. Measured rows show the factor (Shah, Wilson and Ghahramani, "Student-t Processes
as Alternatives to Gaussian Processes", AISTATS 2014). Only the covariance of the parameters has it, not the rows' own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh
from scipy.optimize import brentq
from scipy.special import chdtri, logsumexp, ndtr, ndtri, softmax

Values = NDArray[np.float64]

# Equally probable factors that stand for their distribution.
_NODES = 64
_INTERVAL = 0.9


@dataclass(frozen=True)
class UnknownScale:
    """What measured rows tell about the factor of a covariance.

    Attributes:
        factor: the factor with which a normal distribution has the same 90 % interval as the distribution over all
            factors.
        log_evidence: log probability density of the rows over all factors, without its constant.
    """

    factor: float
    log_evidence: float


def unknown_scale(target: Values, parametric: Values, rest: Values, samples: float | None) -> UnknownScale:
    """Weigh the possible factors of a covariance by measured rows, or none.

    Args:
        target: `[n]` residuals around the prior's mean.
        parametric: `[n, n]` covariance of the residuals due to uncertain parameters; it has the factor.
        rest: `[n, n]` covariance of the residuals if the parameters were known.
        samples: number of samples from which the covariance of the parameters was estimated; None if it is known.
    """
    if samples is None:
        return UnknownScale(1.0, float(_log_densities(target, parametric, rest, np.ones(1))[0]))
    factors = np.asarray(samples / chdtri(samples, (np.arange(_NODES) + 0.5) / _NODES), dtype=np.float64)
    log_densities = _log_densities(target, parametric, rest, factors)
    weights = softmax(log_densities)
    upper = (1 + _INTERVAL) / 2
    normal = float(ndtri(upper))
    roots = np.sqrt(factors)
    quantile = brentq(
        lambda deviation: float(weights @ ndtr(deviation / roots)) - upper,
        normal * float(roots.min()),
        normal * float(roots.max()),
    )
    return UnknownScale((float(quantile) / normal) ** 2, float(logsumexp(log_densities)) - float(np.log(_NODES)))


def _log_densities(target: Values, parametric: Values, rest: Values, factors: Values) -> Values:
    """Log densities of `[n]` normal values without their constant, `[f]`, if one covariance has `[f]` factors."""
    if not len(target):
        return np.zeros(len(factors))
    sizes, vectors = eigh(parametric, rest)
    variances = 1 + np.maximum(sizes, 0) * factors[:, None]
    squares = (vectors.T @ target) ** 2
    log_determinants = np.log(variances).sum(1) + np.linalg.slogdet(rest)[1]
    return np.asarray(-0.5 * ((squares / variances).sum(1) + log_determinants))
