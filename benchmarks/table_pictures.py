"""Draw the main tables of a document, so that its picture always matches its tables.

python -m benchmarks.table_pictures errors docs/comparison.md docs/images/comparison.png
python -m benchmarks.table_pictures choices docs/choosing.md docs/images/choosing.png
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

_QUANTITIES = 2
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Style(NamedTuple):
    """A label in a legend, and how its points are drawn."""

    label: str
    colour: str
    marker: str
    line: str = "-"


_PREDICTORS = {
    "`roofline`, the default": Style("Wattfleet's predictor", "#009e73", "D"),
    "`powertrain` as run here": Style("PowerTrain as run here", "#d55e00", "s"),
    "`powertrain` as published": Style("PowerTrain as published", "#d55e00", "s", ""),
    "`scratch` as run here": Style("its network without transfer, as run here", "#cc79a7", "^"),
    "`scratch` as published": Style("its network without transfer, as published", "#cc79a7", "^", ""),
    "`boosting`": Style("gradient-boosted trees", "#7a5c3e", "x", "-."),
}
"""Styles by the beginning of a row's first cell. Markers without a line are hollow."""

_WORKLOADS = {
    "MobileNetV3 on the AGX Orin": Style("MobileNetV3, AGX Orin", "#0072b2", "o"),
    "ResNet-18 on the AGX Orin": Style("ResNet-18, AGX Orin", "#e69f00", "s"),
    "YOLOv8n on the AGX Orin": Style("YOLOv8n, AGX Orin", "#009e73", "^"),
    "ResNet-18 on the Orin Nano": Style("ResNet-18, Orin Nano", "#d55e00", "D"),
}
"""Styles by the beginning of a heading."""

_CHOICES = {
    ("`wattfleet`", "50"): "Wattfleet, 50 modes",
    ("`wattfleet`", "10"): "Wattfleet, 10 modes",
    ("`roofline`", "50"): "roofline alone, 50 modes",
    ("`powertrain`", "50"): "PowerTrain, 50 modes",
    ("`binary-search`, each budget alone", ""): "binary search, each budget",
    ("`random`", "50"): "best of 50 random modes",
    ("`presets`", "0"): "NVIDIA's presets",
    ("`maxn`", "0"): "highest mode",
}
"""Styles by the first two cells of a row: the method and the number of modes. An empty number matches any."""

_METHODS = {
    "`transfer`": Style("transfer", "#0072b2", "o"),
    "`scratch`": Style("scratch", "#cc79a7", "^"),
    "`binary-search`": Style("binary search for one budget", "#e69f00", "v", ""),
}
"""Styles by the first cell of a row in the table of profiling methods."""


@dataclass(frozen=True)
class Table:
    """A table of a Markdown document.

    Attributes:
        heading: the heading above it.
        header: the cells of its first row.
        rows: the cells of its other rows.
    """

    heading: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables_of(text: str) -> Iterator[Table]:
    """Return all tables of a Markdown document, in their order."""
    heading = ""
    for is_table, group in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        lines = list(group)
        if is_table:
            header, _, *rows = (
                [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")] for line in lines
            )
            yield Table(heading, header, rows)
        else:
            heading = next((line.lstrip("# ") for line in reversed(lines) if line.startswith("#")), heading)


def numbers(cell: str) -> list[float | None]:
    """Return the numbers of a cell, separated by `/`; None for other cells, such as a dash. Drops text in brackets."""
    parts = cell.partition("(")[0].split("/") if cell else []
    return [float(part.replace(",", "")) if _NUMBER.fullmatch(part.strip()) else None for part in parts]


def draw_errors(tables: Iterable[Table]) -> Figure:
    """Draw errors against the number of fitted modes, for every table whose first cell is `to <target>`."""
    wanted = [table for table in tables if table.header[0].startswith("to ")]
    figure = Figure(figsize=(3.4 * len(wanted), 6.2), layout="constrained")
    grid = figure.subplots(2, len(wanted), squeeze=False, sharey="row")
    for quantity, (name, row) in enumerate(zip(("time", "power"), grid, strict=True)):
        for table, each in zip(wanted, row, strict=True):
            _draw_errors(each, table, quantity)
            each.set_title(table.header[0].removeprefix("to "), fontsize=10)
        row[0].set_ylabel(f"error of the {name} (MAPE), %")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_PREDICTORS) // 2, fontsize=9, frameon=False)
    return figure


def _draw_errors(axes: Axes, table: Table, quantity: int) -> None:
    sizes = [int(cell.removeprefix("n = ")) for cell in table.header[1:]]
    for start, style in _PREDICTORS.items():
        points = [
            (size, error)
            for row in table.rows
            if row[0].startswith(start)
            for size, cell in zip(sizes, row[1:], strict=True)
            if len(pair := numbers(cell)) == _QUANTITIES and (error := pair[quantity]) is not None
        ]
        _plot(axes, points, style)
    axes.set(xscale="log", yscale="log", xlabel="fitted modes")
    _label(axes.xaxis, sizes)
    _label(axes.yaxis, (1, 2, 3, 5, 10, 20, 50))
    axes.grid(alpha=0.3)


def draw_choices(tables: Iterable[Table]) -> Figure:
    """Draw penalties and exceeded budgets of the choices for each workload, and the losses of the profiling methods."""
    found = list(tables)
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    penalty, broken, losses = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    places = {choice: -place for place, choice in enumerate(_CHOICES)}
    for start, style in _WORKLOADS.items():
        rows = [row for table in found if table.heading.startswith(start) for row in table.rows]
        found_places = [places.get((row[0], row[1]), places.get((row[0], ""))) for row in rows]
        scored = [(row, place) for row, place in zip(rows, found_places, strict=True) if place is not None]
        for axes, column in ((penalty, 3), (broken, 5)):
            _plot(axes, [(float(row[column]), place) for row, place in scored], style._replace(line=""))
    for axes, title in ((penalty, "Mean time penalty, %"), (broken, "Over the budget by > 1 W, % of cases")):
        axes.set_xscale("symlog", linthresh=1)
        axes.set_title(title, fontsize=10)
        axes.set_yticks(list(places.values()), labels=list(_CHOICES.values()), fontsize=8.5)
        _label(axes.xaxis, (0, 1, 3, 10, 30, 100))
        axes.grid(alpha=0.3)
    broken.tick_params(labelleft=False)
    handles, labels = penalty.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, fontsize=8, frameon=False)
    _draw_losses(losses, next(table for table in found if table.heading == "Which method when"))
    return figure


def _draw_losses(axes: Axes, table: Table) -> None:
    """Draw the time penalty against the number of measured modes; the choice without measurements lies outside."""
    for method, style in _METHODS.items():
        counts = [(numbers(row[1].partition(";")[0]), float(row[2])) for row in table.rows if row[0] == method]
        _plot(axes, [(count, slower) for [count], slower in counts if count], style)
    axes.set_title("Profiling methods: mean time penalty, %", fontsize=10)
    axes.set(xscale="log", xlabel="measured modes", ylim=(0, None))
    _label(axes.xaxis, (5, 10, 20, 50))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)


def _plot(axes: Axes, points: Sequence[tuple[float, float]], style: Style) -> None:
    """Draw points in their order. Markers without a line are hollow, so that markers behind them stay visible."""
    x, y = [point[0] for point in points], [point[1] for point in points]
    fill, line = (style.colour, style.line) if style.line else ("none", "none")
    axes.plot(x, y, ls=line, color=style.colour, marker=style.marker, mfc=fill, ms=5.5, label=style.label)


def _label(axis: Axis, values: Iterable[int]) -> None:
    """Label these values of an axis as plain numbers."""
    ticks = list(values)
    axis.set_ticks(ticks, labels=[str(value) for value in ticks])
    axis.set_ticks([], minor=True)


_PICTURES: Mapping[str, Callable[[Iterable[Table]], Figure]] = {"errors": draw_errors, "choices": draw_choices}


def main() -> None:
    """Draw the picture of the document on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.table_pictures", description="Draw the main tables of a document."
    )
    parser.add_argument("picture", choices=_PICTURES, help="what to draw")
    parser.add_argument("document", type=Path, help="read the tables from this Markdown file")
    parser.add_argument("path", type=Path, help="write the picture to this file")
    arguments = parser.parse_args()
    tables = tables_of(arguments.document.read_text(encoding="utf-8"))
    _PICTURES[arguments.picture](tables).savefig(arguments.path, dpi=130)


if __name__ == "__main__":
    main()
