"""Measurements of the coordinator itself: latencies of RPCs, store and plans, and whether storing fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.histograms import LATENCY_LIMITS_S, Histogram


class ServiceFigures:
    """Measurements of one coordinator since its start, for its metrics.

    Attributes:
        rpc_s: seconds of each answered RPC, by method name.
        store_s: seconds of the transactions that write.
        plan_s: seconds of the computation of plans.
        store_failures: transactions that failed.
        is_store_failing: whether the last transaction failed, so that records wait for the next one.
    """

    def __init__(self) -> None:
        """Start without any measurement."""
        self.rpc_s: dict[str, Histogram] = {}
        self.store_s = Histogram(LATENCY_LIMITS_S)
        self.plan_s = Histogram(LATENCY_LIMITS_S)
        self.store_failures = 0
        self.is_store_failing = False

    def stored(self, failed: bool) -> None:
        """Record the outcome of a transaction."""
        self.is_store_failing = failed
        self.store_failures += failed

    def rpc(self, method: str) -> Histogram:
        """The histogram of one method; it must exist in a service, because each name is a time series in Prometheus."""
        return self.rpc_s.setdefault(method, Histogram(LATENCY_LIMITS_S))


@contextmanager
def timed(histogram: Histogram) -> Iterator[None]:
    """Measure the seconds that the block takes, even if it fails."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        histogram.add(time.monotonic() - began_s)
