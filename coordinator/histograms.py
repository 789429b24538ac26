"""Histograms: counts of values by upper limit, from which Prometheus computes rates, shares and quantiles."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

LATENCY_LIMITS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bucket limits for the duration of a request, a transaction or the computation of a plan, in seconds."""


class Histogram:
    """The number of values up to each limit.

    Attributes:
        sum: the sum of all values.
    """

    def __init__(self, limits: Sequence[float]) -> None:
        """Start without any value.

        Args:
            limits: ascending upper limits; a value may be above all of them.
        """
        self._limits = tuple(limits)
        self._counts = [0] * (len(self._limits) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self._counts)

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Each limit as text, with the number of values up to it; the last limit is `+Inf`."""
        limits = [*map(str, self._limits), "+Inf"]
        return list(zip(limits, accumulate(map(float, list(self._counts))), strict=True))

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._limits, value)] += 1
        self.sum += value
