"""Metric families of the coordinator itself: version, latencies, store and certificates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.service_figures import ServiceFigures
from wattfleet_io.build_metric import build_family


class ServiceCollector(Collector):
    """Exports measurements of the coordinator itself."""

    def __init__(self, figures: ServiceFigures, expiries: Callable[[], Mapping[str, datetime]] = dict) -> None:
        """Read from one coordinator.

        Args:
            figures: its measurements.
            expiries: when the certificate of each role expires first.
        """
        self._figures = figures
        self._expiries = expiries

    def collect(self) -> Iterator[Metric]:
        """All families, from the current figures."""
        figures = self._figures
        yield build_family()
        rpcs = HistogramMetricFamily(
            "wattfleet_rpc_seconds", "Seconds until an RPC was answered; streams are left out", labels=["method"]
        )
        for method, seconds in sorted(figures.rpc_s.copy().items()):
            rpcs.add_metric([method], seconds.buckets, seconds.sum)
        yield rpcs
        for name, text, seconds in (
            ("store_write", "Seconds of the transactions that write to the store", figures.store_s),
            ("plan", "Seconds of the computation of plans", figures.plan_s),
        ):
            family = HistogramMetricFamily(f"wattfleet_{name}_seconds", text)
            family.add_metric([], seconds.buckets, seconds.sum)
            yield family
        yield CounterMetricFamily(
            "wattfleet_store_failures",
            "Transactions that failed and were to be tried again",
            figures.store_failures,
        )
        yield GaugeMetricFamily(
            "wattfleet_store_failing", "1 while nothing can be stored, else 0", float(figures.is_store_failing)
        )
        expiry = GaugeMetricFamily(
            "wattfleet_certificate_expiry_timestamp_seconds",
            "When the first certificate of the role expires, in seconds since 1970",
            labels=["role"],
        )
        for role, expires_at in self._expiries().items():
            expiry.add_metric([role], expires_at.timestamp())
        yield expiry
