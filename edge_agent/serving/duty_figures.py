"""Figures of how a duty is kept: rate, latencies, misses, and the share of time that training has the device."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from wattfleet.duties import LATENCY_LIMITS_MS, Duty, KeptDuty

_WINDOW_S = 30.0
_LATEST = 1000


class DutyFigures:
    """Counts what inference servers report; another duty resets the counters."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[float, int]] = deque()
        self._trained: deque[tuple[float, float]] = deque()
        self._since_s: float | None = None
        self.restart()

    def restart(self) -> None:
        """Reset the counters for another duty."""
        self._counts = [0] * (len(LATENCY_LIMITS_MS) + 1)
        self._sum_ms = 0.0
        self._latest_ms: deque[float] = deque(maxlen=_LATEST)
        self._requests = self._missed = self._batch = 0

    def arrived(self, count: int, now_s: float) -> None:
        """Count arrived requests."""
        if self._since_s is None:
            self._since_s = now_s
        self._arrived.append((now_s, count))

    def answered(self, latencies_ms: Sequence[float], failed: int, limit_ms: float | None) -> None:
        """Count a batch of answered requests.

        Args:
            latencies_ms: latencies of the requests with an answer, ms.
            failed: number of requests with an error.
            limit_ms: the duty's latency limit; None without a duty.
        """
        self._batch = len(latencies_ms) + failed
        self._requests += len(latencies_ms) + failed
        self._missed += failed
        for latency_ms in latencies_ms:
            self._counts[bisect_left(LATENCY_LIMITS_MS, latency_ms)] += 1
            self._sum_ms += latency_ms
            self._missed += limit_ms is not None and latency_ms > limit_ms
        self._latest_ms.extend(latencies_ms)

    def trained(self, seconds: float, now_s: float) -> None:
        """Note that a minibatch used the device for some seconds until now."""
        self._trained.append((now_s, seconds))

    def arrivals_per_s(self, now_s: float) -> float | None:
        """Return the request rate of the last half minute, requests per second; None until one second was observed."""
        _forget(self._arrived, now_s)
        if self._since_s is None or now_s - self._since_s < 1.0:
            return None
        return sum(count for _, count in self._arrived) / min(_WINDOW_S, now_s - self._since_s)

    def training_share(self, now_s: float) -> float:
        """Return the share of the last half minute in which minibatches used the device, 0 to 1."""
        _forget(self._trained, now_s)
        return min(1.0, sum(seconds for _, seconds in self._trained) / _WINDOW_S)

    def latency_at(self, quantile: float) -> float | None:
        """Return a quantile of the latest 1,000 latencies, ms; None before the first."""
        ordered = sorted(self._latest_ms)
        return ordered[math.ceil(quantile * len(ordered)) - 1] if ordered else None

    def kept(self, duty: Duty, now_s: float, servers: int, waits: str | None) -> KeptDuty:
        """Return all figures.

        Args:
            duty: the duty in force.
            now_s: the time.
            servers: number of connected inference servers.
            waits: why a training waits; None if none is waiting.
        """
        return KeptDuty(
            workload=duty.workload,
            latency_ms=duty.latency_ms,
            quantile=duty.quantile,
            arrivals_per_s=self.arrivals_per_s(now_s) or 0.0,
            requests=self._requests,
            missed=self._missed,
            latency_counts=tuple(self._counts),
            latency_sum_ms=self._sum_ms,
            latency_at_quantile_ms=self.latency_at(duty.quantile),
            batch=self._batch,
            training_share=self.training_share(now_s),
            servers=servers,
            waits=waits or "",
        )


def _forget(events: deque[tuple[float, int]] | deque[tuple[float, float]], now_s: float) -> None:
    while events and events[0][0] < now_s - _WINDOW_S:
        events.popleft()
