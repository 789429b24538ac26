"""How many of a coordinator's addresses are exposed, as a metric family."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ExposureCollector(Collector):
    """Exports how many of a coordinator's own addresses other machines reach in plaintext."""

    def __init__(self, exposed: int) -> None:
        """Note their number."""
        self._exposed = exposed

    def collect(self) -> Iterator[Metric]:
        """One family."""
        yield GaugeMetricFamily(
            "wattfleet_exposed_plaintext_addresses",
            "Addresses of the coordinator that other machines reach without TLS",
            self._exposed,
        )
