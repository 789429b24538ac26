"""A front as a terminal plot."""

from __future__ import annotations

import math

import numpy as np
import plotext

from edge_agent.cli.front_plots.view import TIME_LABEL, FrontView

_HEIGHT_LINES = 18
_LEGEND_FROM_RIGHT = 30


def front_text(view: FrontView, width: int, colours: bool) -> str:
    """Draw a front as text.

    Args:
        view: the front and the measured modes.
        width: columns of the terminal.
        colours: whether the terminal supports colours.
    """
    figure = plotext.figure.clear()
    figure.plot_size(width, _HEIGHT_LINES)
    # Use the terminal's own colours and background.
    figure.theme("simple")
    figure.canvas("default")
    # Log scale, since the slowest mode takes many times longer than most.
    front_at, measured_at = np.log10(view.one_epoch_s), np.log10(view.measured_one_epoch_s)
    front = figure.signal(front_at.tolist(), view.power_w.tolist(), marker="braille")
    figure.draw(front.lines().label("front"))
    if len(measured_at):
        figure.draw(figure.signal(measured_at.tolist(), view.measured_w.tolist(), marker="x").label("measured"))
    figure.legend(x=width - _LEGEND_FROM_RIGHT)
    ticks = view.time_ticks()
    figure.ruler("x").ticks([math.log10(seconds) for seconds in ticks], [f"{seconds:g}" for seconds in ticks])
    figure.label(TIME_LABEL, "x")
    figure.label("watts", "y")
    text: str = figure.build().string(colorless=not colours)
    return text
