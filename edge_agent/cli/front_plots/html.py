"""A front as one HTML page that works offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_agent.cli.front_plots.view import FRONT_COLOUR, INTERVAL_LOG_SDS, MEASURED_COLOUR, TIME_LABEL, FrontView
from edge_agent.learning.transfer import assumed_length
from wattfleet.common.html_page import write_page
from wattfleet.core.modes import array_to_modes

_HEIGHT_PX = 512


def write_front_page(view: FrontView, path: Path) -> None:
    """Write a page with the plot, and a table of every mode on the front.

    Raises:
        OSError: the file cannot be written.
    """
    figure = {"data": _traces(view), "layout": _layout(view)}
    write_page(
        path,
        "edge_agent.cli.front_plots",
        "front.html.j2",
        {"front": figure},
        {},
        view=view,
        assumed=assumed_length(view.minibatches_per_epoch),
    )


def _layout(view: FrontView) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": TIME_LABEL}, "type": "log", "tickvals": view.time_ticks(), "tickformat": "~r"},
        "yaxis": {"title": {"text": "watts while training"}, "rangemode": "tozero"},
        "showlegend": True,
        "legend": {"x": 1, "xanchor": "right", "y": 1},
        "hovermode": "closest",
        "height": _HEIGHT_PX,
    }


def _traces(view: FrontView) -> list[dict[str, Any]]:
    hover = "%{text}<br>%{x:.1f} s, %{y:.1f} W"
    return [
        {
            "name": "measured",
            "mode": "markers",
            "x": view.measured_one_epoch_s.tolist(),
            "y": view.measured_w.tolist(),
            "text": [mode.label() for mode in array_to_modes(view.measured_modes)],
            "marker": {"symbol": "x-thin-open", "size": 8, "color": MEASURED_COLOUR},
            "hovertemplate": f"{hover}<extra>measured</extra>",
        },
        {
            "name": "front",
            "mode": "lines+markers",
            "x": view.one_epoch_s.tolist(),
            "y": view.power_w.tolist(),
            "text": view.labels(),
            "customdata": view.sources(),
            "line": {"color": FRONT_COLOUR, "width": 1.5},
            "marker": {"size": 5, "color": FRONT_COLOUR},
            "error_x": _bars(view.epoch_s, view.epoch_log_sd),
            "error_y": _bars(view.power_w, view.power_log_sd),
            "hovertemplate": f"{hover}<extra>%{{customdata}}</extra>",
        },
    ]


def _bars(median: NDArray[np.float64], log_sd: NDArray[np.float64]) -> dict[str, Any]:
    factor = np.exp(INTERVAL_LOG_SDS * log_sd)
    return {
        "type": "data",
        "array": (median * (factor - 1)).tolist(),
        "arrayminus": (median * (1 - 1 / factor)).tolist(),
        "color": FRONT_COLOUR,
        "thickness": 0.5,
        "width": 0,
    }
