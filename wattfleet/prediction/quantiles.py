"""Quantiles of the normal distribution, without importing scipy in processes that make no predictions."""

from __future__ import annotations

from statistics import NormalDist

_STANDARD_NORMAL = NormalDist()


def normal_quantile(probability: float) -> float:
    """The standard normal quantile of a probability within (0, 1)."""
    return _STANDARD_NORMAL.inv_cdf(probability)
