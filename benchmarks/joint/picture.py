"""Draws the result: time relative to baseline 1 by power limit, for each board and task."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.joint.compare import BASELINE, MEASURED_MORE, OURS, OURS_ALL_MODES
from benchmarks.joint.summary import Result


class Style(NamedTuple):
    """The label, colour and marker of a method."""

    colour: str
    line: str
    marker: str


_STYLES = {
    BASELINE: Style("#8a8f98", "--", ""),
    "baseline 2": Style("#e69f00", "--", "P"),
    "fastest batch": Style("#d55e00", "--", "X"),
    OURS: Style("#0072b2", "-", "o"),
    OURS_ALL_MODES: Style("#009e73", "-", "s"),
    MEASURED_MORE: Style("#cc79a7", "-", "D"),
}


def write_picture(result: Result, path: Path) -> None:
    """Draw a panel for each board and task into a PNG file."""
    kinds = list(dict.fromkeys(row["kind"] for row in result["by_task"]))
    tasks = list(dict.fromkeys(row["task"] for row in result["by_task"]))
    figure = Figure(figsize=(13, 5.6), dpi=90, layout="constrained")
    panels = figure.subplots(len(kinds), len(tasks), sharey=True, sharex="row", squeeze=False)
    for kind, row in zip(kinds, panels, strict=True):
        for task, axes in zip(tasks, row, strict=True):
            _panel(axes, result, kind, task)
        row[0].set_ylabel(f"{kind}\ntime / baseline 1 (simulated)")
    for axes, task in zip(panels[0], tasks, strict=True):
        axes.set_title(task, fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("power limit, W")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_STYLES), frameon=False)
    figure.savefig(path, format="png")


def _panel(axes: Axes, result: Result, kind: str, task: str) -> None:
    for method, style in _STYLES.items():
        rows = [r for r in result["by_task"] if (r["kind"], r["task"], r["method"]) == (kind, task, method)]
        axes.plot(
            [r["limit_w"] for r in rows],
            [1 / r["sooner"]["mean"] for r in rows],
            color=style.colour,
            linestyle=style.line,
            marker=style.marker,
            markersize=4,
            label=method,
        )
    axes.set_ylim(0, 1.15)
    axes.grid(color="#e6e9ed")
