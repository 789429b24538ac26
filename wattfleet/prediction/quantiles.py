"""Quantiles of the normal distribution without scipy, which a process that holds but makes no predictions can spare."""

from __future__ import annotations

from statistics import NormalDist

_STANDARD = NormalDist()


def normal_quantile(probability: float) -> float:
    """How many standard deviations above its mean a normal variable stays below with a probability within (0, 1)."""
    return _STANDARD.inv_cdf(probability)
