"""A front as a PNG image, drawn with Matplotlib, since Plotly needs a browser, which a Jetson may lack."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from edge_agent.cli.front_plots.view import FRONT_COLOUR, INTERVAL_LOG_SDS, MEASURED_COLOUR, TIME_LABEL, FrontView


def write_front_image(view: FrontView, path: Path) -> None:
    """Draw the front and the measured modes into a PNG file.

    Raises:
        OSError: the file cannot be written.
    """
    factor = np.exp(INTERVAL_LOG_SDS * view.power_log_sd)
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(
        view.one_epoch_s,
        view.power_w / factor,
        view.power_w * factor,
        color=FRONT_COLOUR,
        alpha=0.15,
        label="90 % interval of predictions",
    )
    axes.plot(view.one_epoch_s, view.power_w, ".-", color=FRONT_COLOUR, label="front")
    axes.plot(view.measured_one_epoch_s, view.measured_w, "x", color=MEASURED_COLOUR, label="measured")
    axes.set_xscale("log")
    axes.set_xticks(view.time_ticks(), [f"{seconds:g}" for seconds in view.time_ticks()])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(TIME_LABEL)
    axes.set_ylabel("watts while training")
    axes.set_title(view.title, fontsize=10)
    axes.grid(color="#e6e9ed")
    axes.legend(frameon=False)
    figure.savefig(path, format="png")
