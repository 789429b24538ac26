"""Prints the result as tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.joint.compare import BEST_OF
from benchmarks.joint.summary import GOAL_BEHIND_PCT, GOAL_SOONER, Result

Row = Mapping[str, Any]


def tables(result: Result) -> Iterator[Table]:
    """Yield all tables. Times and powers are simulated."""
    yield _relative_samples(result)
    for kind in dict.fromkeys(row["kind"] for row in result["by_limit"]):
        own = [row for row in result["by_limit"] if row["kind"] == kind]
        yield _by_limit(f"{kind}, simulated: times as soon as baseline 1", own, _sooner)
        yield _by_limit(f"{kind}, simulated: behind the best choice with the target's own samples, %", own, _behind)
        yield _by_limit(f"{kind}, simulated: energy relative to baseline 1", own, _energy)
        yield _tightest(kind, [row for row in result["by_task"] if row["kind"] == kind and row["level"] == 0])
    yield _profiling(result)
    yield _proxies(result)
    yield _goals(result)


def _relative_samples(result: Result) -> Table:
    table = _table("Samples to the target accuracy relative to the largest batch", "task")
    for batch in result["settings"]["batches"]:
        table.add_column(f"batch {batch}", justify="right")
    for name, by_batch in result["relative_samples"].items():
        table.add_row(name, *(f"{value:.2f}" for value in by_batch.values()))
    return table


def _by_limit(title: str, rows: Sequence[Row], cell: Callable[[Row], str]) -> Table:
    table = _table(f"{title} (means over tasks, ± over seeds)", "method")
    limits_w = list(dict.fromkeys(row["limit_w"] for row in rows))
    for limit_w in limits_w:
        table.add_column(f"{limit_w:g} W", justify="right")
    by_case = {(row["method"], row["limit_w"]): cell(row) for row in rows}
    for method in BEST_OF:
        table.add_row(method, *(by_case.get((method, limit_w), "–") for limit_w in limits_w))
    return table


def _sooner(row: Row) -> str:
    return f"{row['sooner']['mean']:.2f} ± {row['sooner']['sd']:.2f}"


def _behind(row: Row) -> str:
    over = f", {row['over_limit']}/{row['cases']} over by ≤ {row['worst_excess_pct']:.1f}" if row["over_limit"] else ""
    return f"{row['behind_pct']['mean']:.1f} ± {row['behind_pct']['sd']:.1f}{over}"


def _energy(row: Row) -> str:
    return f"{row['energy']['mean']:.2f} ± {row['energy']['sd']:.2f}"


def _tightest(kind: str, rows: Sequence[Row]) -> Table:
    limit_w = rows[0]["limit_w"]
    table = _table(f"{kind}, simulated: times as soon as baseline 1 at {limit_w:g} W (chosen batch sizes)", "task")
    methods = [method for method in BEST_OF if not method.startswith("least")]
    for method in methods:
        table.add_column(method, justify="right")
    for task in dict.fromkeys(row["task"] for row in rows):
        own = {row["method"]: row for row in rows if row["task"] == task}
        table.add_row(task, *(_with_batches(own[method]) if method in own else "–" for method in methods))
    return table


def _with_batches(row: Row) -> str:
    return f"{row['sooner']['mean']:.2f} ({', '.join(map(str, row['batches']))})"


def _profiling(result: Result) -> Table:
    table = _table("What the published order measures, simulated", "board")
    for name in ("limit, W", "measured", "of", "slower than with all of them, %"):
        table.add_column(name, justify="right")
    for row in result["profiling"]:
        table.add_row(
            row["kind"], f"{row['limit_w']:g}", f"{row['measured']:.1f}", str(row["of"]), f"{row['loss_pct']:.1f}"
        )
    return table


def _proxies(result: Result) -> Table:
    table = _table("Slower than the fastest GPU clock and batch, %, by proxy (row) and target (column), simulated", "")
    names = list(result["proxies"])
    for name in names:
        table.add_column(name, justify="right")
    for proxy, by_target in result["proxies"].items():
        table.add_row(proxy, *(f"{by_target[name]:.1f}" for name in names))
    return table


def _goals(result: Result) -> Table:
    table = _table(
        f"Goals: {GOAL_SOONER:g} times as soon at the tightest limit, at most {GOAL_BEHIND_PCT:g} % behind", "board"
    )
    table.add_column("method")
    for name in ("times as soon", "met", "behind, %", "met"):
        table.add_column(name, justify="right")
    for goal in result["goals"]:
        table.add_row(
            goal["kind"],
            goal["method"],
            f"{goal['sooner_at_tightest']:.2f}",
            "yes" if goal["sooner_met"] else "no",
            f"{goal['behind_pct']:.1f}",
            "yes" if goal["behind_met"] else "no",
        )
    return table


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    return table
