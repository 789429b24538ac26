"""A device's front as a drawing: seconds per epoch against watts, with presets and the mode in force."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.display.view_values import Values
from coordinator.page.axis import round_log_values, round_values
from wattfleet.modes import PowerMode

_WIDTH, _HEIGHT = 720.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 20.0, 16.0, 44.0
_TICKS = 4


@dataclass(frozen=True)
class FrontPoint:
    """One mode, in the drawing's units.

    Attributes:
        x: seconds per epoch, on a logarithmic scale.
        y: watts.
        is_in_force: whether the device trains in it now.
        text: the point's label.
    """

    x: float
    y: float
    is_in_force: bool
    text: str


@dataclass(frozen=True)
class PresetMark:
    """One of the board's presets, which need not be on the front.

    Attributes:
        point: its position.
        names: the names of the presets that are this mode.
        is_measured: whether the device has measured it; otherwise it is predicted.
        is_left: whether the names are to the left of the point, because there is no room on the right.
    """

    point: FrontPoint
    names: str
    is_measured: bool
    is_left: bool


@dataclass(frozen=True)
class FrontPlot:
    """The drawing.

    Attributes:
        points: the modes of the front.
        presets: the presets of the board.
        x_ticks: positions and seconds.
        y_ticks: positions and watts.
        width: the width of the drawing.
        height: the height of the drawing.
    """

    points: Sequence[FrontPoint]
    presets: Sequence[PresetMark]
    x_ticks: Sequence[tuple[float, float]]
    y_ticks: Sequence[tuple[float, float]]
    width: float = _WIDTH
    height: float = _HEIGHT

    @classmethod
    def of(cls, front: Sequence[Values], presets: Sequence[Values], in_force: Values | None) -> FrontPlot:
        """Draw a front of at least one mode.

        Args:
            front: its modes.
            presets: the board's presets, with predictions in the form of the front's.
            in_force: the mode in which the device trains; None if it does not.
        """
        drawn = [*front, *presets]
        fastest_s, slowest_s = min(each["epoch_s"] for each in drawn), max(each["epoch_s"] for each in drawn)
        first, span = math.log(fastest_s), math.log(slowest_s / fastest_s) or 1.0
        most_w: float = 1.1 * max(each["power_w"] for each in drawn)

        def x_of(log_s: float) -> float:
            return _LEFT + 8 + (log_s - first) / span * (_WIDTH - _LEFT - _RIGHT - 16)

        def y_of(watts: float) -> float:
            return _TOP + (1 - watts / most_w) * (_HEIGHT - _TOP - _BOTTOM)

        def point_of(each: Values, beside: str = "") -> FrontPoint:
            label = PowerMode(**each["mode"]).label()
            text = f"{label}: {each['epoch_s']:,.1f} s per epoch, {each['power_w']:,.1f} W{beside}"
            return FrontPoint(x_of(math.log(each["epoch_s"])), y_of(each["power_w"]), each["mode"] == in_force, text)

        named: dict[PowerMode, list[Values]] = {}
        for each in presets:
            named.setdefault(PowerMode(**each["mode"]), []).append(each)
        marks = []
        for alike in named.values():
            names, how = (
                ", ".join(each["preset"] for each in alike),
                "measured" if alike[0]["is_measured"] else "predicted",
            )
            point = point_of(alike[0], f", preset {names}, {how}")
            marks.append(PresetMark(point, names, alike[0]["is_measured"], point.x > 0.8 * _WIDTH))
        return cls(
            [point_of(each) for each in front],
            marks,
            [(x_of(math.log(tick)), tick) for tick in round_log_values(fastest_s, slowest_s, _TICKS)],
            [(y_of(watts), watts) for watts in round_values(most_w, _TICKS)],
        )
