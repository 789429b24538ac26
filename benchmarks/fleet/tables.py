"""Prints the result as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from benchmarks.fleet.result import GOALS, Result, figure

_ROWS = {
    "ramp, s": ("ramp_s", 1, 1),
    "leases a second": ("leases_per_s", 1, 0),
    "lease p50, ms": ("lease_ms.p50", 1, 1),
    "lease p99, ms": ("lease_ms.p99", 1, 1),
    "lease max, ms": ("lease_ms.max", 1, 0),
    "  p99 of a bare server, ms": ("bare.lease_ms.p99", 1, 1),
    "  coordinator, us of CPU a lease": ("lease_cpu_us", 1, 0),
    "  generator, us of CPU a lease": ("generator_lease_cpu_us", 1, 0),
    "RSS, MB": ("rss_mb", 1, 0),
    "RSS at the most, MB": ("peak_rss_mb", 1, 0),
    "  of a bare server, MB": ("bare.peak_rss_mb", 1, 0),
    "coordinator, cores": ("cores", 1, 2),
    "  generator, cores": ("generator_cores", 1, 2),
    "  generator wakes late, p99 ms": ("generator_late_ms.p99", 1, 1),
    "reconnect storm, s": ("storm_s", 1, 1),
    "  of a bare server, s": ("bare.storm_s", 1, 1),
    "  coordinator, ms of CPU an agent": ("storm_cpu_ms", 1, 2),
    "  generator, ms of CPU an agent": ("generator_storm_cpu_ms", 1, 2),
    "  bare server, ms of CPU an agent": ("bare.storm_cpu_ms", 1, 2),
    "killed and started again, s": ("restart_s", 1, 1),
    "  coordinator, ms of CPU an agent ": ("restart_cpu_ms", 1, 2),
    "lease p99 while it plans and is scraped, ms": ("in_use.lease_ms.p99", 1, 1),
    "  lease p50, ms": ("in_use.lease_ms.p50", 1, 1),
    "  a plan, ms": ("in_use.plan_ms.p50", 1, 0),
    "  a scrape, ms": ("in_use.scrape_ms.p50", 1, 0),
    "  RSS at the most, MB": ("in_use.peak_rss_mb", 1, 0),
    "sessions begun a second": ("sessions_per_s.rate", 1, 0),
    "  coordinator, cores ": ("sessions_per_s.cores", 1, 2),
    "  generator, cores ": ("sessions_per_s.generator_cores", 1, 2),
    "  bare server": ("sessions_per_s.bare_rate", 1, 0),
    "reports a second": ("reports_per_s.rate", 1, 0),
    "  bare echo": ("reports_per_s.bare_rate", 1, 0),
    "reference, MB/s": ("reference_bytes_per_s.rate", 1e6, 0),
    "  bare stream, MB/s": ("reference_bytes_per_s.bare_rate", 1e6, 0),
}
"""The figure of every row, the unit to divide it by, and the number of decimals."""


def tables(result: Result) -> Iterator[Table]:
    """Yield the figures of every fleet size, and the goals."""
    fleets = result["fleets"]
    for title, rows in (("A fleet on one coordinator", _figures(result)), ("Goals", _goals(result))):
        table = Table(title=f"{title}, {result['provenance']}, {result['settings']['cores']} cores")
        table.add_column("agents")
        for fleet in fleets:
            table.add_column(f"{fleet['agents']:,}{', TLS' if fleet['tls'] else ''}", justify="right")
        for row in rows:
            table.add_row(*row)
        yield table


def _figures(result: Result) -> Iterator[list[str]]:
    for title, (path, unit, digits) in _ROWS.items():
        values = [figure(fleet, path) for fleet in result["fleets"]]
        yield [title, *("–" if value is None else f"{value / unit:,.{digits}f}" for value in values)]


def _goals(result: Result) -> Iterator[list[str]]:
    for name in GOALS:
        goals = [fleet["goals"].get(name) for fleet in result["fleets"]]
        yield [name, *("–" if goal is None else _verdict(goal) for goal in goals)]


def _verdict(goal: dict[str, Any]) -> str:
    value, wanted = goal["value"], goal["wanted"]
    text = "never" if value is None else f"{value:.3g}"
    return f"[green]{text} ({wanted}) met[/green]" if goal["met"] else f"[red]{text} ({wanted}) NOT met[/red]"
