"""The metric family with the number of a coordinator's exposed addresses."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ExposureCollector(Collector):
    """Exports how many of a coordinator's addresses other machines can reach in plaintext."""

    def __init__(self, exposed: int) -> None:
        """Export the given number of addresses."""
        self._exposed = exposed

    def collect(self) -> Iterator[Metric]:
        """The family."""
        yield GaugeMetricFamily(
            "wattfleet_exposed_plaintext_addresses",
            "Addresses of the coordinator that other machines reach without TLS",
            self._exposed,
        )
