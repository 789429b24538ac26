"""The result as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from benchmarks.fleet.result import GOALS, Result, figure

_ROWS = {
    "ramp, s": ("ramp_s", 1, 1),
    "leases a second": ("leases_per_s", 1, 0),
    "lease p50, ms": ("lease_ms.p50", 1, 1),
    "lease p99, ms": ("lease_ms.p99", 1, 1),
    "lease max, ms": ("lease_ms.max", 1, 0),
    "  p99 of a bare server, ms": ("bare.lease_ms.p99", 1, 1),
    "RSS, MB": ("rss_mb", 1, 0),
    "RSS at the most, MB": ("peak_rss_mb", 1, 0),
    "  of a bare server, MB": ("bare.peak_rss_mb", 1, 0),
    "coordinator, cores": ("cores", 1, 2),
    "  generator, cores": ("generator_cores", 1, 2),
    "  generator wakes late, p99 ms": ("generator_late_ms.p99", 1, 1),
    "reconnect storm, s": ("storm_s", 1, 1),
    "  of a bare server, s": ("bare.storm_s", 1, 1),
    "killed and started again, s": ("restart_s", 1, 1),
    "lease p99 while it plans and is scraped, ms": ("in_use.lease_ms.p99", 1, 1),
    "  lease p50, ms": ("in_use.lease_ms.p50", 1, 1),
    "  a plan, ms": ("in_use.plan_ms.p50", 1, 0),
    "  a scrape, ms": ("in_use.scrape_ms.p50", 1, 0),
    "  RSS at the most, MB": ("in_use.peak_rss_mb", 1, 0),
    "reports a second": ("reports_per_s.rate", 1, 0),
    "  bare echo": ("reports_per_s.bare_rate", 1, 0),
    "reference, MB/s": ("reference_bytes_per_s.rate", 1e6, 0),
    "  bare stream, MB/s": ("reference_bytes_per_s.bare_rate", 1e6, 0),
}
"""The figure of every row, the unit to divide it by, and the number of decimals."""


def tables(result: Result) -> Iterator[Table]:
    """The figures of every size, and the goals."""
    fleets = result["fleets"]
    for title, rows in (("A fleet on one coordinator", _figures(result)), ("Goals", _goals(result))):
        table = Table(title=f"{title}, {result['provenance']}, {result['settings']['cores']} cores")
        table.add_column("agents")
        for fleet in fleets:
            table.add_column(f"{fleet['agents']:,}", justify="right")
        for row in rows:
            table.add_row(*row)
        yield table


def _figures(result: Result) -> Iterator[list[str]]:
    for title, (path, unit, digits) in _ROWS.items():
        values = [figure(fleet, path) for fleet in result["fleets"]]
        yield [title, *("–" if value is None else f"{value / unit:,.{digits}f}" for value in values)]


def _goals(result: Result) -> Iterator[list[str]]:
    for name, (bound, limit, _) in GOALS.items():
        goals = [fleet["goals"][name] for fleet in result["fleets"]]
        yield [f"{name}: {bound} {limit:g}", *(_verdict(goal["value"], goal["met"]) for goal in goals)]


def _verdict(value: float | None, met: bool) -> str:
    text = "never" if value is None else f"{value:.3g}"
    return f"[green]{text} met[/green]" if met else f"[red]{text} NOT met[/red]"
