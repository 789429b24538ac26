"""A front as one HTML page that opens anywhere, offline, and asks nothing of any network."""

from __future__ import annotations

import json
from html import escape
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs

from edge_agent.cli.front_plots.view import FRONT_COLOUR, INTERVAL_LOG_SDS, MEASURED_COLOUR, FrontView
from edge_agent.devices.mode_names import mode_argument
from wattfleet.choosing.front import Values
from wattfleet.modes import array_to_modes

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Front of {title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1b1f24; }}
h1 {{ font-size: 1.4rem; margin-bottom: 0; }}
p {{ color: #57606a; margin-top: .3rem; }}
#plot {{ height: 32rem; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .2rem .6rem; border-bottom: 1px solid #d8dee4; }}
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) {{ text-align: left; }}
code {{ font-size: .85em; }}
</style>
<script>{plotly}</script>
</head>
<body>
<h1>{title}</h1>
<p>No mode is predicted to be both slower and hungrier than one of these. Bars are 90 % intervals.</p>
<div id="plot"></div>
<table>
<thead>
<tr><th>mode</th><th>to apply it</th><th>s to start</th><th>s per epoch</th><th>W</th><th>W planned</th></tr>
</thead>
<tbody>
{rows}
</tbody>
</table>
<script>Plotly.newPlot("plot", {data}, {layout}, {{"responsive": true, "displaylogo": false}});</script>
</body>
</html>
"""


def front_page(view: FrontView) -> str:
    """The page: the plot, and every mode of the front with what applies it."""
    front = view.front
    columns = zip(
        array_to_modes(front.modes), front.warmup_s, front.epoch_s, front.power_w, front.planned_w, strict=True
    )
    rows = [
        f"<tr><td>{mode.label()}</td><td><code>{mode_argument(mode)}</code></td>"
        f"<td>{warmup_s:.1f}</td><td>{epoch_s:.1f}</td><td>{power_w:.1f}</td><td>{planned_w:.1f}</td></tr>"
        for mode, warmup_s, epoch_s, power_w, planned_w in columns
    ]
    return _PAGE.format(
        title=escape(view.title),
        plotly=get_plotlyjs(),
        rows="\n".join(rows),
        data=_script(_traces(view)),
        layout=_script(_layout(view)),
    )


def _layout(view: FrontView) -> dict[str, Any]:
    title = {"text": "seconds of an epoch, its start included"}
    time_axis = {"title": title, "type": "log", "tickvals": view.time_ticks()}
    return {"xaxis": {**time_axis, "tickformat": "~r", "gridcolor": "#e6e9ed"}, **_LOOK}


_LOOK = {
    "yaxis": {"title": {"text": "watts while training"}, "rangemode": "tozero", "gridcolor": "#e6e9ed"},
    "legend": {"x": 1, "xanchor": "right", "y": 1},
    "margin": {"l": 60, "r": 20, "t": 20, "b": 60},
    "plot_bgcolor": "#ffffff",
    "hovermode": "closest",
}


def _traces(view: FrontView) -> list[dict[str, Any]]:
    front, hover = view.front, "%{text}<br>%{x:.1f} s, %{y:.1f} W"
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
            "name": "predicted front",
            "mode": "lines+markers",
            "x": front.one_epoch_s.tolist(),
            "y": front.power_w.tolist(),
            "text": view.labels(),
            "line": {"color": FRONT_COLOUR, "width": 1.5},
            "marker": {"size": 5, "color": FRONT_COLOUR},
            "error_x": _bars(front.epoch_s, front.epoch_log_sd),
            "error_y": _bars(front.power_w, front.power_log_sd),
            "hovertemplate": f"{hover}<extra>predicted</extra>",
        },
    ]


def _bars(median: Values, log_sd: Values) -> dict[str, Any]:
    factor = np.exp(INTERVAL_LOG_SDS * log_sd)
    return {
        "type": "data",
        "array": (median * (factor - 1)).tolist(),
        "arrayminus": (median * (1 - 1 / factor)).tolist(),
        "color": FRONT_COLOUR,
        "thickness": 0.5,
        "width": 0,
    }


def _script(content: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(content).replace("</", "<\\/")
