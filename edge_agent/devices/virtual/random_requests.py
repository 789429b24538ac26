"""Requests that arrive randomly at a simulated board, and wait for their answers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

_DRAWS = 4096


class RandomRequests:
    """A Poisson process of requests from 0 s on, and its unanswered requests.

    Args:
        per_s: mean number of requests per second.
        rng: the random number generator for arrivals.
    """

    def __init__(self, per_s: float, rng: np.random.Generator) -> None:
        self._mean_gap_s = 1 / per_s
        self._rng = rng
        self._at_s = np.zeros(1)
        self._first = 1
        self._draw()

    @property
    def next_s(self) -> float:
        """When the oldest unanswered request arrives or arrived, s."""
        return float(self._at_s[self._first])

    def waiting(self, now_s: float) -> int:
        """Return the number of requests that have arrived and are unanswered."""
        while self._at_s[-1] <= now_s:
            self._draw()
        return int(np.searchsorted(self._at_s, now_s, side="right")) - self._first

    def answered(self, count: int) -> Values:
        """Answer the oldest requests, and return their arrival times, s."""
        answered_s = self._at_s[self._first : self._first + count]
        self._first += count
        return answered_s

    def postpone(self, seconds: float) -> None:
        """Delay the arrival of all unanswered requests."""
        self._at_s = self._at_s[self._first :] + seconds
        self._first = 0

    def _draw(self) -> None:
        further_s = self._at_s[-1] + np.cumsum(self._rng.exponential(self._mean_gap_s, _DRAWS))
        self._at_s = np.concatenate([self._at_s[self._first :], further_s])
        self._first = 0
