"""A round's timeline: for each device a bar of predicted and a bar of observed seconds, from the training's start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.display.view_values import Values
from coordinator.page.axis import round_values

_MAX_ROWS = 30
_LEFT, _RIGHT, _ROW, _TOP = 170.0, 20.0, 30.0, 26.0
_WIDTH = 900.0
_TICKS = 5


@dataclass(frozen=True)
class TimelineRow:
    """One device's bars, in the drawing's units.

    Attributes:
        device_id: the device.
        y: the top of its row.
        predicted: width of the predicted bar.
        actual: width of the observed bar; None if there is no observation.
        is_failed: whether the device failed or was late.
        text: the label of both bars.
    """

    device_id: str
    y: float
    predicted: float
    actual: float | None
    is_failed: bool
    text: str


@dataclass(frozen=True)
class Timeline:
    """The drawing.

    Attributes:
        rows: the slowest devices, slowest first.
        hidden: number of devices without a row.
        width: the width of the drawing.
        height: the height of the drawing.
        left: where bars begin.
        ticks: positions and seconds of the time axis.
        mark: position of the predicted end of the round.
    """

    rows: Sequence[TimelineRow]
    hidden: int
    width: float
    height: float
    left: float
    ticks: Sequence[tuple[float, float]]
    mark: float | None

    @classmethod
    def of(cls, devices: Sequence[Values], totals: Values) -> Timeline:
        """Draw a round.

        Args:
            devices: the values of its devices, the slowest first.
            totals: the values of the round.
        """
        shown = devices[:_MAX_ROWS]
        longest_s = max(
            [each[key] or 0.0 for each in shown for key in ("predicted_s", "observed_s")]
            + [totals["planned_s"] or 0.0, 1e-9]
        )
        scale = (_WIDTH - _LEFT - _RIGHT) / longest_s
        rows = [
            TimelineRow(
                each["device_id"],
                _TOP + k * _ROW,
                each["predicted_s"] * scale,
                None if each["observed_s"] is None else each["observed_s"] * scale,
                each["outcome"] in ("failed", "late"),
                _text_of(each),
            )
            for k, each in enumerate(shown)
        ]
        # Round values in the unit that the labels have.
        unit_s = 1.0 if longest_s < 120 else 60.0 if longest_s < 7_200 else 3_600.0
        ticks = [(_LEFT + k * unit_s * scale, k * unit_s) for k in round_values(longest_s / unit_s, _TICKS)]
        mark = None if totals["planned_s"] is None else _LEFT + totals["planned_s"] * scale
        height = _TOP + len(shown) * _ROW + 8
        return cls(rows, len(devices) - len(shown), _WIDTH, height, _LEFT, ticks, mark)


def _text_of(device: Values) -> str:
    observed = "not observed" if device["observed_s"] is None else f"observed {device['observed_s']:,.1f} s"
    failure = f", {device['failure']}" if device["failure"] else ", late" if device["outcome"] == "late" else ""
    assumed = " with an assumed length" if device["length_assumed"] else ""
    return f"{device['device_id']}: predicted {device['predicted_s']:,.1f} s{assumed}, {observed}{failure}"
