"""Plots of the duties in a report: latencies above and training below, on one time axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wattfleet_io.html_page import INK
from wattfleet_simulation.report_figures import Style, mode_label

Report = Mapping[str, Any]
Figure = dict[str, Any]

PLOTTED = 8
"""The number of boards whose duties are plotted; the table has all of them."""

_LIMIT = "#d1242f"
_GREY = "#8a8f98"
_LATENCY_DOMAIN, _TRAINING_DOMAIN = [0.42, 1.0], [0.0, 0.34]


def duty_figures(report: Report, styles: Mapping[str, Style]) -> dict[str, Figure]:
    """Return a figure for each of the first boards with a duty, by the id of its HTML element."""
    plotted = list(report["duties"].items())[:PLOTTED]
    return {f"duty-{k}": _figure(duty, styles[device]) for k, (device, duty) in enumerate(plotted)}


def _figure(duty: Report, style: Style) -> Figure:
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


def _trainings(duty: Report, style: Style) -> list[Figure]:
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
