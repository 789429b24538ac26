"""A device's newest rounds as a drawing: predicted, allowed and observed values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.display.view_values import Values
from coordinator.page.axis import round_values

_WIDTH, _HEIGHT = 720.0, 200.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 20.0, 14.0, 40.0
_WIDEST_STEP = 60.0
_TICKS = 4


@dataclass(frozen=True)
class HistoryPoint:
    """One round, in the drawing's units.

    Attributes:
        round: its number.
        x: its position.
        half: half the width of its marks.
        predicted: height of the predicted value.
        observed: height of the observed value; None if there is none.
        allowed: height of the value that the plan allowed; None if the plan set no limit.
        is_over: whether more was observed than allowed.
        text: the label of the round.
    """

    round: int
    x: float
    half: float
    predicted: float
    observed: float | None
    allowed: float | None
    is_over: bool
    text: str


@dataclass(frozen=True)
class HistoryPlot:
    """The drawing.

    Attributes:
        title: what is drawn.
        unit: of the vertical axis.
        points: the rounds in which the device was selected, the oldest first.
        ticks: heights and values of the vertical axis.
        width: the width of the drawing.
        height: the height of the drawing.
        left: the position of the axis.
    """

    title: str
    unit: str
    points: Sequence[HistoryPoint]
    ticks: Sequence[tuple[float, float]]
    width: float = _WIDTH
    height: float = _HEIGHT
    left: float = _LEFT

    @classmethod
    def seconds(cls, parts: Sequence[tuple[int, Values]]) -> HistoryPlot:
        """Draw seconds of trainings, of at least one round.

        Args:
            parts: the numbers of rounds with the device's part in each, the oldest first.
        """
        return cls._of("Seconds of its trainings", "s", parts, "predicted_s", "observed_s", None)

    @classmethod
    def watts(cls, parts: Sequence[tuple[int, Values]]) -> HistoryPlot:
        """Draw watts in trainings; arguments as for `seconds`."""
        return cls._of("Watts in its trainings", "W", parts, "predicted_w", "observed_w", "planned_w")

    @classmethod
    def _of(
        cls,
        title: str,
        unit: str,
        parts: Sequence[tuple[int, Values]],
        predicted: str,
        observed: str,
        allowed: str | None,
    ) -> HistoryPlot:
        keys = [key for key in (predicted, observed, allowed) if key is not None]
        most = 1.1 * max(max(part[key] or 0.0 for key in keys) for _, part in parts) or 1.0
        step = min(_WIDEST_STEP, (_WIDTH - _LEFT - _RIGHT) / len(parts))

        def y_of(value: float) -> float:
            return _TOP + (1 - value / most) * (_HEIGHT - _TOP - _BOTTOM)

        points = []
        for k, (number, part) in enumerate(parts):
            seen, limit = part[observed], None if allowed is None else part[allowed]
            words = [f"predicted {part[predicted]:,.1f} {unit}"]
            words += [] if limit is None else [f"allowed {limit:,.1f} {unit}"]
            words += ["not observed" if seen is None else f"observed {seen:,.1f} {unit}"]
            points.append(
                HistoryPoint(
                    number,
                    _LEFT + step * (k + 0.5),
                    0.35 * step,
                    y_of(part[predicted]),
                    None if seen is None else y_of(seen),
                    None if limit is None else y_of(limit),
                    seen is not None and limit is not None and seen > limit,
                    f"round {number}: {', '.join(words)}",
                )
            )
        return cls(title, unit, points, [(y_of(value), value) for value in round_values(most, _TICKS)])
