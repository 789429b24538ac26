"""Prints the result as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.federated.result import Result

_RATIOS = {
    "times_sooner_than_presets": "times faster than presets",
    "times_sooner_than_presets_equal": "times faster than presets-equal",
    "times_less_energy_than_presets": "presets' energy / own",
    "time_over_oracle": "time / oracle's",
}
"""Column titles of the ratios, by their names in the result."""


def tables(result: Result) -> Iterator[Table]:
    """Yield a table for each budget. Methods that could not be run are listed below it with the reason."""
    settings = result["settings"]
    targets = [f"{target:g}" for target in settings["targets"]]
    for budget in (f"{watts:g}" for watts in settings["budgets_w"]):
        table = Table(title=f"{budget} W, {result['provenance']}, medians of {settings['seeds']} seeds, excess of all")
        table.add_column("method")
        for name in (
            "round, s",
            "devices",
            *(f"min to {float(target):.0%}" for target in targets),
            *(f"rounds to {float(target):.0%}" for target in targets),
            f"MJ to {float(targets[0]):.0%}",
            "accuracy at the end",
            "took part",
            "fairness",
            "watts used",
            "worst excess",
            "rounds > 1 % over",
        ):
            table.add_column(name, justify="right")
        reasons = set[str]()
        for name, by_budget in result["runs"].items():
            run = by_budget[budget]
            if "infeasible" in run:
                reasons.add(f"{name}: {run['infeasible']}")
                continue
            table.add_row(name, *_cells(run["median"], run["seeds"], targets))
        if reasons:
            table.caption = "; ".join(sorted(reasons))
        yield table
    yield _goals(result, targets)


def _cells(median: Mapping[str, Any], seeds: Sequence[Mapping[str, Any]], targets: list[str]) -> Iterator[str]:
    yield f"{median['training_s']:.1f}"
    yield f"{median['devices']:.1f}"
    for target in targets:
        yield _number(median["time_s"][target], 60, 1)
    for target in targets:
        yield _number(median["rounds"][target], 1, 0)
    yield _number(median["energy_kj"][targets[0]], 1e3, 2)
    yield f"{median['final_accuracy']:.1%}"
    yield f"{median['participation']:.0%}"
    yield f"{median['fairness']:.2f}"
    yield f"{median['used_share']:.1%}"
    yield f"{max(seed['worst_excess'] for seed in seeds):+.1%}"
    yield f"{sum(seed['rounds_over_1pct'] for seed in seeds):g}"


def _goals(result: Result, targets: list[str]) -> Table:
    table = Table(title="Wattfleet's policies compared with presets, and with the oracle of the same policy")
    for name in ("budget", "policy"):
        table.add_column(name)
    for words in _RATIOS.values():
        for target in targets:
            table.add_column(f"{words}, {float(target):.0%}", justify="right")
    for budget, policies in result["compared"].items():
        for name, found in policies.items():
            if not any(found.values()):
                continue
            cells = [_number(found[ratio].get(target), 1, 2) for ratio in _RATIOS for target in targets]
            table.add_row(f"{budget} W", name, *cells)
    return table


def _number(value: float | None, unit: float, digits: int) -> str:
    return "–" if value is None else f"{value / unit:.{digits}f}"
