"""The evaluation report as a single HTML page that works offline and makes no network requests.

Figures are plain Plotly dictionaries. The page's script adds fonts and the colours of the light or dark theme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from wattfleet.common.html_page import INK, write_page
from wattfleet.evaluation.reports.cases import (
    CHOICE_MODES,
    PUBLISHED,
    PUBLISHED_CHOICES,
    PUBLISHED_REFERENCE,
    Published,
)

# --- Overview ---------------------------------------------------------------------------------------------------------
# The tables at the top of the page: every method on every file, at one number of modes.


Report = Mapping[str, Any]
T = TypeVar("T")


class Overview(NamedTuple):
    """The evaluations of the methods, one column for each target.

    Attributes:
        columns: each target with the reference that is transferred from, the published one where there is a choice.
        errors: for each predictor, its evaluation on every target; None where there is none.
        published: for each published predictor, the paper's errors from equally many modes, likewise.
        choices: for each choice method, its evaluation on every target, likewise.
    """

    columns: list[tuple[str, str]]
    errors: dict[str, list[Report | None]]
    published: dict[str, list[Published | None]]
    choices: dict[str, list[Report | None]]


def overview_of(pairs: Sequence[Report]) -> Overview:
    """The overview of all targets.

    Args:
        pairs: the evaluations of each reference and target, as the page shows them; of the pairs with the same target,
            the first is used.
    """
    first: dict[str, Report] = {}
    for pair in pairs:
        first.setdefault(pair["target"], pair)
    shown = list(enumerate(first.values()))
    return Overview(
        [(pair["target"], pair["reference"]) for _, pair in shown],
        _by_method(len(shown), ((row["name"], k, row) for k, pair in shown for row in pair["intervals"])),
        _by_method(
            len(shown),
            ((one.method, k, one) for k, pair in shown for one in pair["published"] if one.modes == CHOICE_MODES),
        ),
        _by_method(len(shown), ((row["name"], k, row) for k, pair in shown for row in pair["choices"])),
    )


def _by_method(columns: int, cells: Iterable[tuple[str, int, T]]) -> dict[str, list[T | None]]:
    """Arrange the cells in one row for each method; None where a column has no cell."""
    found: dict[str, list[T | None]] = {}
    for method, column, cell in cells:
        row = found.setdefault(method, [None] * columns)
        row[column] = cell
    return found


# --- Page -------------------------------------------------------------------------------------------------------------

Figure = dict[str, Any]

_GREY = "#8a8f98"


class MethodStyle(NamedTuple):
    """A method's legend text and its look in plots. Shapes differ as well as colours, for colour-blind readers."""

    label: str
    colour: str
    symbol: str
    glyph: str
    dash: str = "solid"


STYLES = {
    "wattfleet": MethodStyle("Wattfleet's default, measures the modes it would choose", "#0072b2", "circle", "●"),
    "roofline": MethodStyle("Wattfleet's predictor, fitted to random modes", "#009e73", "diamond", "◆"),
    "powertrain": MethodStyle("PowerTrain's transfer", "#d55e00", "square", "■"),
    "scratch": MethodStyle("PowerTrain's network without transfer", "#cc79a7", "triangle-up", "▲"),
    "linear": MethodStyle("ridge regression on logarithms", "#7a5c3e", "x", "✖", "dashdot"),
    "tree": MethodStyle("a decision tree", "#a6761d", "hexagon", "⬢", "dashdot"),
    "forest": MethodStyle("a random forest", "#1b7837", "diamond-open", "◇", "dashdot"),
    "boosting": MethodStyle("gradient-boosted trees", "#762a83", "star-diamond", "✦", "dashdot"),
    "random": MethodStyle("the best of random measured modes", "#8f7ae5", "pentagon", "⬟", "dot"),
    "binary-search": MethodStyle("halves the knobs by measured power", "#e69f00", "triangle-down", "▼", "dot"),
    "presets": MethodStyle("NVIDIA's presets, chosen by the watts in their names", "#56b4e9", "star", "★", "dash"),
    "maxn": MethodStyle("the highest mode", _GREY, "cross", "✚", "dash"),
}

# Their intervals and choices vary so much that the plots could not be read.
_ONLY_IN_TABLES = ("linear", "tree", "forest", "boosting")


def write_html(report: Report, path: Path) -> None:
    """Write a report as a self-contained page.

    Args:
        report: as `wattfleet.evaluation.reports.cases.build_report` makes it.
        path: the file to write.
    """
    pairs = _pairs(report)
    names = {row["name"] for row in (*report["transfers"], *report["choices"])}
    write_page(
        path,
        "wattfleet.evaluation",
        "evaluate.html.j2",
        figures(report),
        {},
        report=report,
        overview=overview_of(pairs),
        pairs=pairs,
        styles={name: style for name, style in STYLES.items() if name in names},
        corpus_sizes=_grid(report["corpus_sizes"], "corpus_modes"),
        minibatches=_grid(report["minibatches"], "minibatches"),
    )


def figures(report: Report) -> dict[str, Figure]:
    """All figures of the page, by the id of their HTML element."""
    found: dict[str, Figure] = {}
    for k, pair in enumerate(_pairs(report)):
        found[f"time-{k}"] = _errors(pair, "time")
        found[f"power-{k}"] = _errors(pair, "power")
        found[f"coverage-{k}"] = _coverage(pair)
        found[f"penalty-{k}"] = _by_budget(pair, "median_penalty_pct", "median time penalty, %", 40)
        found[f"excess-{k}"] = _by_budget(pair, "mean_excess_w", "mean W over the budget", 4)
        found[f"front-{k}"] = _front(pair["front"])
    return found


def _pairs(report: Report) -> list[dict[str, Any]]:
    """For every reference and target, the evaluations on this target with this reference or without any."""
    pairs = []
    for front in report["fronts"]:
        target, reference = front["target"], front["reference"]

        def here(rows: Iterable[Report], target: str = target, reference: str = reference) -> list[Report]:
            return [row for row in rows if row["target"] == target and row["reference"] in (None, reference)]

        transfers, choices = here(report["transfers"]), here(report["choices"])
        published = [one for one in PUBLISHED if one.target == target and one.reference in (None, reference)]
        pairs.append(
            {
                "target": target,
                "reference": reference,
                "front": front,
                "transfers": transfers,
                "errors": _grid(transfers, "modes", (one.modes for one in published)),
                # The intervals and the fit of each predictor, at the size that the choices are made with.
                "intervals": [row for row in transfers if row["modes"] == _size_of_choice(transfers)],
                "choices": choices,
                "published": published,
                "published_choices": [
                    one for one in PUBLISHED_CHOICES if one.target == target and reference == PUBLISHED_REFERENCE
                ],
            }
        )
    return pairs


def _size_of_choice(transfers: Sequence[Report]) -> int:
    sizes = sorted({row["modes"] for row in transfers if row["modes"] <= CHOICE_MODES})
    return sizes[-1] if sizes else 0


class EvaluationTable(NamedTuple):
    """Evaluations as a table.

    Attributes:
        columns: the numbers that head the columns, in ascending order.
        rows: for each target, reference and name, the evaluation in each column; None where there is none.
    """

    columns: list[int]
    rows: dict[tuple[str, str | None, str], list[Report | None]]


def _grid(rows: Sequence[Report], column: str, also: Iterable[int] = ()) -> EvaluationTable:
    """The evaluations as a table, with a column for each of their numbers and of `also`."""
    columns = sorted({*(row[column] for row in rows), *also})
    found: dict[tuple[str, str | None, str], list[Report | None]] = {}
    for row in rows:
        cells = found.setdefault((row["target"], row["reference"], row["name"]), [None] * len(columns))
        cells[columns.index(row[column])] = row
    return EvaluationTable(columns, found)


def _errors(pair: Report, quantity: str) -> Figure:
    """Plot the median error over the number of modes, with bars from the first to the third quartile."""
    data = []
    for name, rows in _by_name(pair["transfers"]).items():
        errors = [row[f"{quantity}_mape"] for row in rows]
        middle = [error["median"] for error in errors]
        spread = {
            "array": [error["q3"] - error["median"] for error in errors],
            "arrayminus": [error["median"] - error["q1"] for error in errors],
        }
        words = f"{name}, %{{x}} modes: %{{y:.2f}} %<extra></extra>"
        bars = {"type": "data", **spread, "color": STYLES[name].colour, "thickness": 1, "width": 3}
        data.append(_line(name, _column(rows, "modes"), middle, hovertemplate=words, error_y=bars))
    for method in ("powertrain", "scratch"):
        known = [
            (one.modes, error) for one in pair["published"] if one.method == method and (error := _of(one, quantity))
        ]
        data.append(
            _points(
                *([modes for modes, _ in known], [error for _, error in known]),
                marker={"symbol": f"{STYLES[method].symbol}-open", "size": 12, "color": INK, "line": {"width": 2}},
                hovertemplate=f"{method} as published, %{{x}} modes: %{{y}} %<extra></extra>",
            )
        )
    return {
        "data": data,
        "layout": {"xaxis": _size_axis(), "yaxis": _percent_axis(f"{quantity}, MAPE %"), "height": 290},
    }


def _coverage(pair: Report) -> Figure:
    """Plot the share of unseen modes inside the 90 % interval; the grey band marks 85 to 95 %."""
    data = []
    plotted = (row for row in pair["transfers"] if row["name"] not in _ONLY_IN_TABLES)
    for name, rows in _by_name(plotted).items():
        for quantity, dash in (("time", "solid"), ("power", "dot")):
            held = [row["coverage_90"][quantity] for row in rows]
            line = _line(name, _column(rows, "modes"), held)
            line["line"] = {**line["line"], "dash": dash}
            data.append(line | {"hovertemplate": f"{name}, {quantity}, %{{x}} modes: %{{y:.1f}} %<extra></extra>"})
    band = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": 85, "y1": 95, "line": {"width": 0}}
    shapes = [{**band, "fillcolor": _GREY, "opacity": 0.25, "layer": "below"}]
    lowest = min((value for trace in data for value in trace["y"]), default=80)
    axis = _axis("inside the 90 % interval, %", range=[max(0, min(lowest - 3, 77)), 102])
    return {"data": data, "layout": {"xaxis": _size_axis(), "yaxis": axis, "shapes": shapes, "height": 290}}


def _by_budget(pair: Report, quantity: str, title: str, most: float) -> Figure:
    """Plot a figure of the choice methods over the budget. Values beyond the axis are in the table."""
    rows = [row for row in pair["choices"] if row["name"] in STYLES and row["name"] not in _ONLY_IN_TABLES]
    data = [
        _line(
            row["name"],
            *(row["by_budget"]["budget_w"], row["by_budget"][quantity]),
            hovertemplate=f"{row['name']}, %{{x:.0f}} W: %{{y:.2f}}<extra></extra>",
        )
        for row in sorted(rows, key=lambda row: list(STYLES).index(row["name"]), reverse=True)
    ]
    top = max((value for trace in data for value in trace["y"]), default=1.0) or 1.0
    axis = _axis(title, range=[-0.03 * min(top, most), 1.05 * min(top, most)])
    return {"data": data, "layout": {"xaxis": _axis("budget, W"), "yaxis": axis, "height": 290}}


def _front(front: Report) -> Figure:
    """Plot the predicted front over the measured modes, as the paper does, and its modes' measured values."""
    hover = "%{x:,.1f} ms, %{y:.1f} W<extra></extra>"
    blue = STYLES["wattfleet"].colour
    data = [
        _points(*_xy(front["measured"]), marker={"size": 3, "color": _GREY, "opacity": 0.45}, hoverinfo="skip"),
        _points(
            *_xy(front["measured_front"]),
            mode="lines",
            line={"color": INK, "width": 2},
            hovertemplate=f"best: {hover}",
        ),
        _points(
            *_xy(front["predicted_front_measured"]),
            marker={"size": 6, "color": "#d55e00", "symbol": "x-thin", "line": {"color": "#d55e00", "width": 1.5}},
            hovertemplate=f"predicted front's mode, measured: {hover}",
        ),
        _points(
            *_xy(front["predicted_front"]),
            mode="lines+markers",
            line={"color": blue, "width": 1.5},
            marker={"size": 4, "color": blue},
            hovertemplate=f"predicted: {hover}",
        ),
    ]
    axis = _axis("ms per minibatch", type="log", dtick="D2", tickformat=",")
    return {"data": data, "layout": {"xaxis": axis, "yaxis": _axis("watts"), "height": 290}}


def _of(one: Published, quantity: str) -> float | None:
    return one.time_mape if quantity == "time" else one.power_mape


def _xy(points: Report) -> tuple[list[float], list[float]]:
    return points["minibatch_ms"], points["power_w"]


def _by_name(rows: Iterable[Report]) -> dict[str, list[Report]]:
    found: dict[str, list[Report]] = {}
    for row in rows:
        found.setdefault(row["name"], []).append(row)
    return found


def _line(name: str, x: Sequence[float], y: Sequence[float], **more: Any) -> Figure:
    style = STYLES[name]
    return _points(
        *(x, y),
        mode="lines+markers",
        line={"color": style.colour, "width": 1.8, "dash": style.dash},
        marker={"size": 6, "color": style.colour, "symbol": style.symbol},
        **more,
    )


def _points(x: Sequence[float], y: Sequence[float], **more: Any) -> Figure:
    return {"type": "scatter", "mode": "markers", "x": x, "y": y, **more}


def _axis(title: str, **more: Any) -> Figure:
    return {"title": {"text": escape(title, quote=False)}, **more}


def _size_axis() -> Figure:
    return _axis("measured modes", type="log", tickvals=[5, 10, 20, 50, 100], range=[0.62, 2.08])


def _percent_axis(title: str) -> Figure:
    return _axis(title, type="log", tickvals=[1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100])


def _column(rows: Iterable[Report], name: str) -> list[Any]:
    return [row[name] for row in rows]
