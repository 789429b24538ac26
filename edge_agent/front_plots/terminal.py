"""A front in a terminal."""

from __future__ import annotations

import plotext

from edge_agent.front_plots.view import FrontView

_HEIGHT_LINES = 18


def front_text(view: FrontView, width: int, colours: bool) -> str:
    """The plot of a front, line by line.

    Args:
        view: what to show.
        width: columns of the terminal.
        colours: whether the terminal shows them.
    """
    figure = plotext.figure.clear()
    figure.plot_size(width, _HEIGHT_LINES)
    figure.canvas("default")
    figure.draw(figure.signal(view.measured_epoch_s.tolist(), view.measured_w.tolist(), marker="x").label("measured"))
    predicted = figure.signal(view.front.epoch_s.tolist(), view.front.power_w.tolist(), marker="braille")
    figure.draw(predicted.lines().label("predicted front"))
    figure.label("seconds per epoch", "x")
    figure.label("watts", "y")
    text: str = figure.build().string(colorless=not colours)
    return text
