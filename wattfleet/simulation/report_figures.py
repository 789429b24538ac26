"""Figures of a report, as plain Plotly dictionaries."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from wattfleet.common.console import rounds_text
from wattfleet.common.html_page import INK
from wattfleet.core.modes import PowerMode
from wattfleet.simulation.comparison import comparison_figures

# --- Report figures ---------------------------------------------------------------------------------------------------
# Plots of a report, as plain Plotly dictionaries.


Report = Mapping[str, Any]
Figure = dict[str, Any]
Points = Sequence[Report] | Mapping[str, Sequence[float]]  # row by row, or column by column

_GREY = "#8a8f98"
_BUDGET = "#d1242f"
SD_OF_90_PCT = 1.645
_FEW_ROUNDS = 6
_WATT_TICKS = [1, 2, 5, 10, 20, 50, 100, 200, 500]
_LABEL_CHARS = 18
# Room above the highest mode for the label of its rounds, in decades of the logarithmic axis.
_LABEL_DECADES = 0.22
_LABEL_WIDTH_DECADES, _LABEL_HEIGHT_DECADES = 0.6, 0.15
_LETTER_SHARE = 0.009
"""The width of a letter, as a share of a timeline's width."""
_FEW_SUMS = 4
"""The largest number of rounds at which the labels above the two bars of a round fit side by side."""


class DeviceStyle(NamedTuple):
    """A device's colour and symbol in all figures. Symbols differ, too, for readers who cannot tell colours apart."""

    colour: str
    symbol: str
    glyph: str


# Okabe and Ito's colours without the two that vanish on a white or a black page, and two more.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8f7ae5", "#999933")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon", "star", "cross")
_GLYPHS = "●■◆▲▼⬟★✚"


def device_styles(devices: Iterable[str]) -> dict[str, DeviceStyle]:
    """Return the style of every device, by id. There are 64 styles, the first 8 in 8 colours."""
    return {
        device: DeviceStyle(_COLOURS[k % 8], _SYMBOLS[(k + k // 8) % 8], _GLYPHS[(k + k // 8) % 8])
        for k, device in enumerate(devices)
    }


def figures(report: Report) -> dict[str, Figure]:
    """Return all figures of the page, by the id of the HTML element that each is drawn in."""
    site_budget_w = report["settings"]["site_budget_w"]
    return {
        f"run-{run['run']}-{name}": figure
        for run in report["runs"]
        for name, figure in {**comparison_figures(run, site_budget_w), **_figures_of(run)}.items()
    }


def _figures_of(run: Report) -> dict[str, Figure]:
    """Return the figures of one run."""
    styles = device_styles(run["devices"])
    return {
        **{f"front-{k}": _front(run, device, style) for k, (device, style) in enumerate(styles.items())},
        "seconds": _agreement(run, styles, "epoch_s", "seconds per epoch"),
        "watts": _agreement(run, styles, "power_w", "watts while training"),
        "timeline": _timeline(run, styles),
        "site": _site(run, styles),
        "accuracy": _accuracy(run),
    }


def _front(run: Report, device: str, style: DeviceStyle) -> Figure:
    """Plot one device's mode space, its front and the modes that rounds selected."""
    cloud, front = run["devices"][device]["space_sample"], run["devices"][device]["front"]
    rounds: dict[tuple[str, float, float], list[int]] = defaultdict(list)
    for one, part in _parts(run, device):
        seconds = part["predicted_warmup_s"] + part["predicted_epoch_s"]
        rounds[mode_label(part["mode"]), seconds, part["predicted_power_w"]].append(one["round"])
    data = [
        _points(
            *(_one_epoch_s(cloud), cloud["power_w"]),
            marker={"size": 3, "color": _GREY, "opacity": 0.4},
            hoverinfo="skip",
        ),
        _points(
            *(_one_epoch_s(front), _column(front, "power_w")),
            mode="lines+markers",
            line={"color": style.colour, "width": 1.5},
            marker={"size": 3, "color": style.colour},
            error_x=_interval(_column(front, "epoch_s"), _column(front, "epoch_log_sd"), style.colour),
            error_y=_interval(_column(front, "power_w"), _column(front, "power_log_sd"), style.colour),
            customdata=[mode_label(point["mode"]) for point in front],
            hovertemplate="%{customdata}<br>%{x:.1f} s, %{y:.1f} W<extra></extra>",
        ),
        _points(
            *([seconds for _, seconds, _ in rounds], [watts for _, _, watts in rounds]),
            mode="markers+text",
            marker={"size": 12, "color": style.colour, "symbol": style.symbol, "line": {"color": INK, "width": 1.5}},
            text=point_labels(rounds),
            textposition="top right",
            customdata=[f"{rounds_text(chosen)}<br>{label}" for (label, _, _), chosen in rounds.items()],
            hovertemplate="selected in %{customdata}<br>%{x:.1f} s, %{y:.1f} W<extra></extra>",
        ),
    ]
    # All devices share the axes, so that they can be compared. They are logarithmic, since seconds span three decades.
    shown = [each[kind] for each in run["devices"].values() for kind in ("space_sample", "front")]
    reach_s = [seconds for points in shown for seconds in _one_epoch_s(points)]
    reach_w = [watts for points in shown for watts in _column(points, "power_w")]
    title = "seconds for one epoch, warm-up included"
    time_axis = _axis(title, type="log", range=_log_range(reach_s), dtick=1, tickformat=",d")
    watts_axis = _axis("watts", type="log", range=_log_range(reach_w, above=_LABEL_DECADES), tickvals=_WATT_TICKS)
    return {"data": data, "layout": {"xaxis": time_axis, "yaxis": watts_axis, "height": 270}}


def point_labels(rounds: Mapping[tuple[str, float, float], Sequence[int]]) -> list[str]:
    """Return labels with the rounds of each point of a front; close points share one, so that labels do not overlap.

    Args:
        rounds: the rounds by mode, seconds and watts of the point.
    """
    groups: list[list[int]] = []
    points = [(math.log10(seconds), math.log10(watts)) for _, seconds, watts in rounds]
    for k in sorted(range(len(points)), key=lambda k: points[k]):
        for group in groups:
            if any(
                abs(points[k][0] - points[j][0]) < _LABEL_WIDTH_DECADES
                and abs(points[k][1] - points[j][1]) < _LABEL_HEIGHT_DECADES
                for j in group
            ):
                group.append(k)
                break
        else:
            groups.append([k])
    chosen = list(rounds.values())
    labels = [""] * len(points)
    for group in groups:
        together = sorted(number for k in group for number in chosen[k])
        labels[max(group, key=lambda k: points[k])] = f"<b>{rounds_text(together)}</b>"
    return labels


def _agreement(run: Report, styles: Mapping[str, DeviceStyle], quantity: str, title: str) -> Figure:
    """Plot predicted against observed values. A bar meets the diagonal if the observation is in the 90 % interval."""
    data = []
    for device, style in styles.items():
        parts = [
            (one, part)
            for one, part in _parts(run, device)
            if part[f"observed_{quantity}"] is not None and is_predicted(part, quantity)
        ]
        predicted = [part[f"predicted_{quantity}"] for _, part in parts]
        spread = [log_sd(part, quantity) for _, part in parts]
        data.append(
            _points(
                *(predicted, [part[f"observed_{quantity}"] for _, part in parts]),
                marker={"size": 10, "color": style.colour, "symbol": style.symbol, "opacity": 0.85},
                error_x=_interval(predicted, spread, style.colour),
                customdata=[f"{_label(device)}, round {one['round']}" for one, _ in parts],
                hovertemplate="%{customdata}<br>predicted %{x:.1f}, observed %{y:.1f}<extra></extra>",
            )
        )
    values = [value for trace in data for value in _reach(trace)] or [1.0]
    low, high = 0.97 * min(values), 1.03 * max(values)
    shapes = [
        _line((low, high), (low * ratio, high * ratio), INK, dash) | {"layer": "below"}
        for ratio, dash in ((0.9, "dot"), (1.0, "solid"), (1.1, "dot"))
    ]
    layout = {
        "xaxis": _axis(f"predicted {title}", range=[low, high], nticks=7),
        "yaxis": _axis(f"observed {title}", range=[low, high], nticks=7),
        "shapes": shapes,
        "height": 400,
    }
    return {"data": data, "layout": layout}


def _timeline(run: Report, styles: Mapping[str, DeviceStyle]) -> Figure:
    """Plot the rounds end to end, each as long as its slowest device. A device idles while it does not train."""
    rounds = run["rounds"]
    trained, unseen, idle, expected = (_Spans([], [], [], []) for _ in range(4))
    shapes, notes, start_s = [], [], 0.0
    for one in rounds:
        length_s = one["observed_duration_s"] or one["predicted_duration_s"]
        parts = {part["device"]: part for part in one["assignments"]}
        for row, (device, style) in enumerate(styles.items()):
            busy_s = 0.0
            if part := parts.get(device):
                begin_s, observed_s, epochs = part["predicted_warmup_s"], part["observed_epoch_s"], part["epochs"]
                predicted_s = begin_s + epochs * part["predicted_epoch_s"]
                # Starts are not observed.
                busy_s = predicted_s if observed_s is None else begin_s + epochs * observed_s
                (unseen if observed_s is None else trained).add(row, start_s, busy_s, style.colour)
                expected.add(row, start_s + predicted_s, predicted_s, INK)
            if busy_s < length_s:
                idle.add(row, start_s + busy_s, length_s - busy_s, _GREY)
        words = f"round {one['round']}" if len(rounds) <= _FEW_ROUNDS else str(one["round"])
        notes.append({"x": start_s + length_s / 2, "y": 1, "yref": "paper", "yanchor": "bottom", "text": words})
        start_s += length_s
        shapes.append(_line((start_s, start_s), (0, 1), INK, "dot") | {"yref": "paper"})
    data = [
        idle.bars("%{x:.1f} s idle", opacity=0.25),
        unseen.bars("%{x:.1f} s planned, no report", pattern="/", opacity=0.5),
        trained.bars("%{x:.1f} s observed", texttemplate="%{x:.0f} s", insidetextanchor="middle"),
        _points(
            *(expected.start_s, expected.row),
            marker={"symbol": "line-ns", "size": 20, "line": {"color": INK, "width": 2.5}},
            customdata=expected.length_s,
            hovertemplate="%{customdata:.1f} s predicted<extra></extra>",
        ),
    ]
    names = {"tickvals": list(range(len(styles))), "ticktext": [_label(device) for device in styles]}
    layout = {
        "barmode": "overlay",
        "xaxis": _axis("seconds since the first round began", rangemode="tozero"),
        "yaxis": {**names, "range": [len(styles) - 0.5, -0.5], "showgrid": False},
        "shapes": shapes,
        "annotations": _apart(notes, start_s),
        "height": 110 + 36 * len(styles),
    }
    return {"data": data, "layout": layout}


def _apart(notes: Sequence[Figure], length_s: float) -> list[Figure]:
    """Return the notes above a timeline, without those that would overlap the one before."""
    kept: list[Figure] = []
    for note in notes:
        room_s = length_s * _LETTER_SHARE * (len(note["text"]) + 1)
        if not kept or note["x"] - kept[-1]["x"] >= room_s:
            kept.append(note)
    return kept


class _Spans(NamedTuple):
    """Collects horizontal bars, column by column."""

    row: list[Any]
    start_s: list[Any]
    length_s: list[Any]
    colour: list[Any]

    def add(self, *values: Any) -> None:
        for column, value in zip(self, values, strict=True):
            column.append(value)

    def bars(self, words: str, pattern: str = "", **more: Any) -> Figure:
        shape = {"type": "bar", "orientation": "h", "y": self.row, "base": self.start_s, "x": self.length_s}
        marker = {"color": self.colour, "pattern": {"shape": pattern}}
        return {**shape, "marker": marker, "hovertemplate": f"{words}<extra></extra>", **more}


def _site(run: Report, styles: Mapping[str, DeviceStyle]) -> Figure:
    """Plot two stacked bars per round, planned and observed watts. Devices that are not selected idle."""
    data: list[Figure] = []
    budgets = [(one["round"], one["site_budget_w"]) for one in run["rounds"]]
    top_w = max(watts for _, watts in budgets)
    for word, offset, part_w, opacity in (
        ("planned", -0.21, "power_limit_w", 0.5),
        ("observed", 0.21, "observed_power_w", 1.0),
    ):
        known = [one for one in run["rounds"] if one[f"{word}_site_w"] is not None]
        at, total_w = [one["round"] + offset for one in known], [one[f"{word}_site_w"] for one in known]
        drawn = [{part["device"]: part[part_w] for part in one["assignments"]} for one in known]
        idle_w = [total - sum(watts.values()) for total, watts in zip(total_w, drawn, strict=True)]
        stacks = [("idling devices", _GREY, idle_w)]
        stacks += [(_label(each), style.colour, [w.get(each, 0.0) for w in drawn]) for each, style in styles.items()]
        data += [
            {"type": "bar", "x": at, "y": watts, "width": 0.38, "marker": {"color": colour}, "opacity": opacity}
            | {"hovertemplate": f"{name}, {word}: %{{y:.1f}} W<extra></extra>"}
            for name, colour, watts in stacks
        ]
        sums = [f"{watts:.1f}" if len(budgets) <= _FEW_SUMS else "" for watts in total_w]
        # Above both the bar and the budget's line, since the line would cross the numbers out.
        above_w = [max(one["site_budget_w"], watts) for one, watts in zip(known, total_w, strict=True)]
        data.append(_points(at, above_w, mode="text", text=sums, textposition="top center", hoverinfo="skip"))
        top_w = max(top_w, *above_w, 0.0)
    layout = {
        "barmode": "stack",
        "xaxis": _round_axis(run),
        "yaxis": _axis("watts of the site", range=[0, 1.15 * top_w]),
        "shapes": [_line((at - 0.5, at + 0.5), (watts, watts), _BUDGET, "solid") for at, watts in budgets],
        "height": 340,
    }
    return {"data": data, "layout": layout}


def _accuracy(run: Report) -> Figure:
    accuracy = [run["initial_accuracy"], *_column(run["rounds"], "accuracy")]
    few = len(accuracy) <= _FEW_ROUNDS + 1
    line = _points(
        *([0, *_column(run["rounds"], "round")], accuracy),
        mode="lines+markers+text",
        line={"color": INK, "width": 2},
        marker={"size": 8, "color": INK},
        text=[percent(value) if few else "" for value in accuracy],
        textposition="top left",
        cliponaxis=False,
        hovertemplate="round %{x}: %{y:.1%}<extra></extra>",
    )
    axis = _axis("accuracy on held-out digits", tickformat=".0%", range=[0, 1.12], dtick=0.2)
    return {"data": [line], "layout": {"xaxis": _round_axis(run, start=-0.9), "yaxis": axis, "height": 340}}


def _points(x: Sequence[float], y: Sequence[float], **more: Any) -> Figure:
    return {"type": "scatter", "mode": "markers", "x": x, "y": y, **more}


def _axis(title: str, **more: Any) -> Figure:
    return {"title": {"text": title}, **more}


def _interval(centre: Sequence[float], log_sd: Sequence[float], colour: str) -> Figure:
    """Return error bars of a 90 % interval, lognormal like the predictors."""
    up = [at * math.expm1(SD_OF_90_PCT * sd) for at, sd in zip(centre, log_sd, strict=True)]
    down = [-at * math.expm1(-SD_OF_90_PCT * sd) for at, sd in zip(centre, log_sd, strict=True)]
    return {"type": "data", "array": up, "arrayminus": down, "color": colour, "thickness": 1, "width": 0}


def _reach(trace: Figure) -> Iterator[float]:
    """Yield every value that a trace's points and horizontal error bars reach, on both axes."""
    yield from trace["y"]
    for at, up, down in zip(trace["x"], trace["error_x"]["array"], trace["error_x"]["arrayminus"], strict=True):
        yield from (at - down, at + up)


def _line(x: tuple[float, float], y: tuple[float, float], colour: str, dash: str) -> Figure:
    ends = {"x0": x[0], "x1": x[1], "y0": y[0], "y1": y[1]}
    return {"type": "line", **ends, "line": {"color": colour, "width": 2 if dash == "solid" else 1, "dash": dash}}


def _round_axis(run: Report, start: float = 0.4) -> Figure:
    last = len(run["rounds"])
    ticks = {"dtick": 1} if last <= 2 * _FEW_ROUNDS else {"nticks": 10}
    return _axis("round", range=[start, last + 0.6], showgrid=False, **ticks)


def _one_epoch_s(points: Points) -> list[float]:
    """Return the seconds of trainings of one epoch."""
    both = zip(_column(points, "warmup_s"), _column(points, "epoch_s"), strict=True)
    return [warmup_s + epoch_s for warmup_s, epoch_s in both]


def _log_range(values: Sequence[float], above: float = 0.08) -> list[float]:
    """Return the ends of a logarithmic axis that covers all values."""
    return [math.log10(min(values)) - 0.08, math.log10(max(values)) + above]


def _parts(run: Report, device: str) -> Iterator[tuple[Report, Report]]:
    """Yield every round that selected a device, and the device's assignment."""
    for one in run["rounds"]:
        for part in one["assignments"]:
            if part["device"] == device:
                yield one, part


def _column(points: Points, name: str) -> list[Any]:
    return list(points[name]) if isinstance(points, Mapping) else [point[name] for point in points]


def log_sd(part: Report, quantity: str) -> float:
    """Return the standard deviation of the logarithm of an assignment's prediction."""
    return float(part[quantity.rpartition("_")[0] + "_log_sd"])


def is_predicted(part: Report, quantity: str) -> bool:
    """Return whether a quantity of an assignment was predicted; seconds are not if the epoch's length was assumed."""
    return quantity == "power_w" or not part["length_assumed"]


def _label(device: str) -> str:
    """Return a device's name for a figure: without markup, which Plotly would interpret, and shortened if long."""
    half = _LABEL_CHARS // 2
    return escape(device if len(device) <= _LABEL_CHARS else f"{device[:half]}…{device[-half:]}", quote=False)


def mode_label(mode: Mapping[str, int]) -> str:
    """Return the short form of a mode in the report."""
    return PowerMode(**mode).label()


def percent(value: float | None) -> str:
    """Return a share in percent, or a dash if it is missing."""
    return "–" if value is None else f"{value:.1%}"


# --- Report duty figures ----------------------------------------------------------------------------------------------
# Plots of the duties in a report: latencies above and training below, on one time axis.

PLOTTED = 8
"""The number of boards whose duties are plotted; the table has all of them."""

_LIMIT = "#d1242f"
_LATENCY_DOMAIN, _TRAINING_DOMAIN = [0.42, 1.0], [0.0, 0.34]


def duty_figures(report: Report, styles: Mapping[str, DeviceStyle]) -> dict[str, Figure]:
    """Return a figure for each of the first boards with a duty, by the id of its HTML element."""
    plotted = list(report["duties"].items())[:PLOTTED]
    return {f"duty-{k}": _figure(duty, styles[device]) for k, (device, duty) in enumerate(plotted)}


def _figure(duty: Report, style: DeviceStyle) -> Figure:
    series, late = duty["series"], duty["late"]
    above = {"type": "scatter", "yaxis": "y2"}
    data: list[Figure] = [
        above
        | {"mode": "lines", "x": series["at_s"], "y": series[name], "line": {"color": colour, "width": width}}
        | {"hovertemplate": f"%{{x:.0f}} s: {words} of the requests within %{{y:.0f}} ms<extra></extra>"}
        for name, words, colour, width in (("p50_ms", "50%", _GREY, 1), ("p95_ms", "95%", INK, 1.5))
    ]
    data += [
        above
        | {"mode": "markers", "x": late["at_s"], "y": late["latency_ms"]}
        | {"marker": {"color": _LIMIT, "symbol": "x", "size": 6}}
        | {"hovertemplate": "%{x:.1f} s: late, after %{y:.0f} ms<extra></extra>"},
        {"type": "bar", "x": series["at_s"], "y": series["minibatches_per_s"], "width": series["width_s"]}
        | {"marker": {"color": style.colour, "line": {"width": 0}}}
        | {"hovertemplate": "%{x:.0f} s: %{y:.1f} minibatches a second<extra></extra>"},
    ]
    limit_ms = duty["latency_ms"]
    highest_ms = max([limit_ms, *late["latency_ms"], *(value for value in series["p95_ms"] if value is not None)])
    layout = {
        "xaxis": {"title": {"text": "seconds of the board's own clock"}, "anchor": "y"},
        "yaxis": {"title": {"text": "minibatches a second"}, "domain": _TRAINING_DOMAIN, "rangemode": "tozero"},
        "yaxis2": {"title": {"text": "latency, ms"}, "domain": _LATENCY_DOMAIN, "range": [0, 1.12 * highest_ms]},
        "shapes": [_limit_line(limit_ms), *_trainings(duty, style)],
        "annotations": _numbers(duty),
        "bargap": 0,
        "height": 380,
    }
    return {"data": data, "layout": layout}


def _limit_line(limit_ms: float) -> Figure:
    ends = {"xref": "paper", "x0": 0, "x1": 1, "yref": "y2", "y0": limit_ms, "y1": limit_ms}
    return {"type": "line", **ends, "line": {"color": _LIMIT, "width": 1.5, "dash": "dash"}}


def _trainings(duty: Report, style: DeviceStyle) -> list[Figure]:
    """Return a pale band for each training, across both plots."""
    return [
        {"type": "rect", "x0": span["begin_s"], "x1": span["end_s"], "yref": "paper", "y0": 0, "y1": 1}
        | {"fillcolor": style.colour, "opacity": 0.1, "line": {"width": 0}, "layer": "below"}
        for span in duty["spans"]
        if span["is_training"]
    ]


def _numbers(duty: Report) -> list[Figure]:
    trainings = [span for span in duty["spans"] if span["is_training"]]
    return [
        {"x": (span["begin_s"] + span["end_s"]) / 2, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
        | {"text": str(number), "hovertext": f"training {number}: {mode_label(span['mode'])}"}
        for number, span in enumerate(trainings, start=1)
    ]
