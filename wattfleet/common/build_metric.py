"""The versions of a process, as a Prometheus metric."""

from __future__ import annotations

import platform
from importlib.metadata import version

from prometheus_client.core import GaugeMetricFamily

from wattfleet_proto.names import MAJOR, MINOR


def build_family() -> GaugeMetricFamily:
    """Return the metric family `wattfleet_build_info`."""
    build = GaugeMetricFamily(
        "wattfleet_build_info", "Always 1; the labels are versions", labels=["version", "protocol", "python"]
    )
    build.add_metric([version("wattfleet"), f"{MAJOR}.{MINOR}", platform.python_version()], 1.0)
    return build
