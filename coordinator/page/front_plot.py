"""A device's front as a drawing: seconds per epoch against watts, with presets and the mode in force."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.display.view_values import Values
from wattfleet.modes import PowerMode

_WIDTH, _HEIGHT = 720.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 20.0, 16.0, 44.0
_TICKS = 4


@dataclass(frozen=True)
class FrontPoint:
    """One mode of the front, in the drawing's units.

    Attributes:
        x: seconds per epoch, on a logarithmic scale.
        y: watts.
        preset: name of the preset that is this mode; empty for none.
        is_in_force: whether the device trains in it now.
        text: what the point says.
    """

    x: float
    y: float
    preset: str
    is_in_force: bool
    text: str


@dataclass(frozen=True)
class FrontPlot:
    """The drawing.

    Attributes:
        points: the modes.
        x_ticks: positions and seconds.
        y_ticks: positions and watts.
        width: of the drawing.
        height: of the drawing.
    """

    points: Sequence[FrontPoint]
    x_ticks: Sequence[tuple[float, float]]
    y_ticks: Sequence[tuple[float, float]]
    width: float = _WIDTH
    height: float = _HEIGHT

    @classmethod
    def of(cls, front: Sequence[Values], presets: Mapping[str, PowerMode], in_force: Values | None) -> FrontPlot:
        """Draw a front of at least one mode."""
        seconds = [math.log(each["epoch_s"]) for each in front]
        first, span = min(seconds), (max(seconds) - min(seconds)) or 1.0
        most_w: float = 1.1 * max(each["power_w"] for each in front)
        names = {tuple(mode): name for name, mode in presets.items()}

        def x_of(log_s: float) -> float:
            return _LEFT + 8 + (log_s - first) / span * (_WIDTH - _LEFT - _RIGHT - 16)

        def y_of(watts: float) -> float:
            return _TOP + (1 - watts / most_w) * (_HEIGHT - _TOP - _BOTTOM)

        points = [
            FrontPoint(
                x_of(math.log(each["epoch_s"])),
                y_of(each["power_w"]),
                names.get(tuple(each["mode"].values()), ""),
                each["mode"] == in_force,
                f"{PowerMode(**each['mode']).label()}: {each['epoch_s']:,.1f} s per epoch, {each['power_w']:,.1f} W",
            )
            for each in front
        ]
        steps = [k / _TICKS for k in range(_TICKS + 1)]
        return cls(
            points,
            [(x_of(first + span * step), math.exp(first + span * step)) for step in steps],
            [(y_of(most_w * step), most_w * step) for step in steps],
        )
