"""The benchmark's result and whether its goals are met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from benchmarks.fleet.experiment import Settings

Result = dict[str, Any]

GOALS: dict[str, tuple[str, float, str]] = {
    "lease p99, ms": ("at most", 50.0, "lease_ms.p99"),
    "RSS of the coordinator, MB": ("at most", 600.0, "peak_rss_mb"),
    "reconnect storm over, s": ("at most", 60.0, "storm_s"),
    "all back after a restart, s": ("at most", 90.0, "restart_s"),
    "reports, of a bare echo": ("at least", 0.6, "reports_per_s.ratio"),
    "reference download, of a bare stream": ("at least", 0.7, "reference_bytes_per_s.ratio"),
}
"""The goals for a fleet of any size: a maximum or minimum for each figure."""

_RSS_WITH_TLS_MB = 1000.0


def result_of(fleets: Sequence[dict[str, Any]], settings: Settings, cores: int) -> Result:
    """Return the JSON document of the result.

    Args:
        fleets: the figures of each fleet size.
        settings: duration and load of the phases.
        cores: processor cores that all processes shared.
    """
    return {
        "provenance": "simulated",
        "wattfleet_version": version("wattfleet"),
        "settings": {**asdict(settings), "cores": cores},
        "fleets": [{**fleet, "goals": _goals(fleet)} for fleet in fleets],
    }


def _goals(fleet: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, (bound, limit, path) in GOALS.items():
        if fleet["tls"] and path == "peak_rss_mb":
            limit = _RSS_WITH_TLS_MB
        value = figure(fleet, path)
        found[name] = {"value": value, "wanted": f"{bound} {limit:g}", "met": _met(value, bound, limit)}
    return found


def _met(value: float | None, bound: str, limit: float) -> bool:
    """Whether a goal is met; a missing figure does not meet it."""
    return value is not None and (value <= limit if bound == "at most" else value >= limit)


def figure(fleet: dict[str, Any], path: str) -> float | None:
    """Return a figure by its path of names; None if it was not measured."""
    found: Any = fleet
    for name in path.split("."):
        found = found.get(name)
        if found is None:
            return None
    return float(found)
