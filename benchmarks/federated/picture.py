"""Draws the result: time to accuracy by watts, accuracy over time, and the watts of every round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.federated.result import Result


class Style(NamedTuple):
    """The label, colour and marker of a method in all panels."""

    colour: str
    line: str
    marker: str


_STYLES = {
    "progress": Style("#0072b2", "-", "o"),
    "progress-batch": Style("#56b4e9", "-", "<"),
    "progress-epochs": Style("#cc79a7", "-", ">"),
    "progress-work": Style("#e69f00", "-", "D"),
    "progress-all": Style("#009e73", "-", "d"),
    "fedbuff": Style("#8f7ae5", "-", "h"),
    "quorum": Style("#117733", "-", "8"),
    "fastest-k": Style("#cc79a7", "-", "D"),
    "fair": Style("#009e73", "-", "s"),
    "oort": Style("#56b4e9", "-", "v"),
    "fedcs": Style("#8f7ae5", "-", "^"),
    "presets": Style("#d55e00", "--", "X"),
    "uniform": Style("#e69f00", "--", "P"),
    "maxn": Style("#8a8f98", "--", "*"),
    "presets-4": Style("#e69f00", "--", "p"),
    "oracle-progress": Style("#0072b2", ":", ""),
    "oracle-progress-all": Style("#009e73", ":", ""),
    "oracle-fair": Style("#009e73", ":", ""),
}
"""The methods that are drawn. More lines could not be told apart."""


def write_picture(result: Result, path: Path) -> None:
    """Draw all panels into a PNG file."""
    figure = Figure(figsize=(13, 8), dpi=110, layout="constrained")
    axes = figure.subplot_mosaic([["time", "accuracy"], ["watts", "watts"]])
    names = [name for name in _STYLES if name in result["runs"]]
    _time_by_watts(axes["time"], result, names)
    budgets = [f"{watts:g}" for watts in result["settings"]["budgets_w"]]
    feasible = [b for b in budgets if any("seeds" in result["runs"][name][b] for name in names)]
    _accuracy_over_time(axes["accuracy"], result, names, feasible[len(feasible) // 2])
    _watts(axes["watts"], result, names, feasible)
    handles, labels = axes["time"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.savefig(path, format="png")


def _time_by_watts(axes: Axes, result: Result, names: Sequence[str]) -> None:
    target = f"{result['settings']['targets'][0]:g}"
    for name in names:
        style = _STYLES[name]
        known = [
            (watts, run["median"]["time_s"][target] / 60)
            for watts, run in ((w, result["runs"][name][f"{w:g}"]) for w in result["settings"]["budgets_w"])
            if "median" in run and run["median"]["time_s"][target] is not None
        ]
        watts, minutes = zip(*known, strict=True) if known else ((), ())
        axes.plot(watts, minutes, color=style.colour, linestyle=style.line, marker=style.marker, label=name)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("site budget, W")
    axes.set_ylabel(f"minutes to {float(target):.0%} accuracy (simulated)")
    axes.grid(color="#e6e9ed", which="both")


def _accuracy_over_time(axes: Axes, result: Result, names: Sequence[str], budget: str) -> None:
    ends = []
    for name in names:
        seeds = result["runs"][name][budget].get("seeds")
        if seeds is None:
            continue
        runs = [seed["series"] for seed in seeds]
        end_s = min(run["at_s"][-1] for run in runs)
        at_s = np.linspace(0, end_s, 200)
        curves = [np.interp(at_s, [0.0, *run["at_s"]], [0.1, *run["accuracy"]]) for run in runs]
        style = _STYLES[name]
        axes.plot(at_s / 60, np.median(curves, axis=0), color=style.colour, linestyle=style.line, linewidth=1.3)
        ends.append(end_s / 60)
    for target in result["settings"]["targets"]:
        axes.axhline(target, color="#8a8f98", linewidth=0.8)
    axes.set_xlim(0, float(np.median(ends)))
    axes.set_ylim(result["settings"]["targets"][0] - 0.4, min(1.0, result["settings"]["targets"][1] + 0.07))
    axes.set_xlabel(f"minutes since the first round began, at {budget} W (simulated)")
    axes.set_ylabel("accuracy, median of seeds")
    axes.grid(color="#e6e9ed")


def _watts(axes: Axes, result: Result, names: Sequence[str], budgets: Sequence[str]) -> None:
    width = 0.8 / max(1, len(names))
    for k, name in enumerate(names):
        for place, budget in enumerate(budgets):
            seeds = result["runs"][name][budget].get("seeds")
            if seeds is None:
                continue
            share = [100 * watts / float(budget) for seed in seeds for watts in seed["series"]["observed_w"]]
            box = axes.boxplot(
                [share],
                positions=[place - 0.4 + width * (k + 0.5)],
                widths=0.8 * width,
                whis=(0, 100),
                patch_artist=True,
            )
            for part in box["boxes"]:
                part.set(
                    facecolor=_STYLES[name].colour, alpha=0.35 if _STYLES[name].line == ":" else 0.9, linewidth=0.5
                )
            for part in (*box["whiskers"], *box["caps"], *box["medians"]):
                part.set(color="#24292f", linewidth=0.8)
    axes.axhline(100, color="#d1242f", linewidth=1)
    axes.set_xticks(range(len(budgets)), [f"{budget} W" for budget in budgets])
    axes.set_ylabel("observed watts of a round, % of the budget")
    axes.set_title("all rounds of all seeds: least, quartiles, most", fontsize=9)
    axes.grid(color="#e6e9ed", axis="y")
