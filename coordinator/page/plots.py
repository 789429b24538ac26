"""Renders the page's templates, and draws its plots."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import takewhile
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from coordinator.display.words import (
    POWER_OFF,
    THROTTLED_WITHIN_S,
    TIME_OFF,
    Values,
    age,
    date_and_time,
    energy_budget,
    exceeded_allowed_watts,
    flags,
    in_state_for,
    is_exceeded,
    measured_modes,
    moment,
    number,
    profiling_left,
    run_title,
    source_detail,
    source_word,
    troubles,
    watts,
    why_in_force,
)
from coordinator.page.queries import device_link, run_link
from wattfleet.common.console import MODE_LEGEND, count_of, duration_text, energy_text
from wattfleet.core.modes import PowerMode
from wattfleet_proto.names import HOT_C

# --- Drawing ----------------------------------------------------------------------------------------------------------
# Renders a page from its template in a thread, so that viewers do not wait for each other.


_TEMPLATES = Path(__file__).parent / "templates"


def _time_of(time: float | str | None, with_date: bool = False) -> str | Markup:
    """Format a time for people, in the coordinator's time zone, and for machines.

    Args:
        time: seconds since 1970, or a text in ISO 8601; None if it is unknown.
        with_date: give the date and the seconds, however long ago the time is.
    """
    if time is None:
        return "-"
    when = datetime.fromisoformat(time) if isinstance(time, str) else datetime.fromtimestamp(time, timezone.utc)
    exact = when.isoformat(timespec="seconds")
    shown = date_and_time(exact) if with_date else moment(when)
    return Markup('<time datetime="{0}" title="{0}">{1}</time>').format(exact, shown)


def _mode_label(mode: Mapping[str, int] | None) -> str:
    return "-" if mode is None else PowerMode(**mode).label()


def _left(device: Values) -> str:
    return profiling_left(device) + (" left" if device["profiling_left_s"] else "")


def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        number=number,
        watts=watts,
        duration=duration_text,
        time=_time_of,
        mode=_mode_label,
        count=count_of,
        energy=energy_text,
        measured=measured_modes,
        device_link=device_link,
        run_link=run_link,
    )
    found.filters.update(
        since=lambda device: in_state_for(device, time.time()),
        flags=lambda device: flags(device, time.time()),
        troubles=lambda device: troubles(device, time.time()),
        ago=lambda unix_s: f"{age(time.time() - unix_s)} ago",
        left=_left,
        source=source_word,
        source_detail=source_detail,
        why_in_force=why_in_force,
        is_exceeded=is_exceeded,
        energy_budget=energy_budget,
        title=run_title,
        noun=lambda count, singular: singular if count == 1 else f"{singular}s",
        exceeded_allowed_watts=exceeded_allowed_watts,
    )
    found.globals.update(
        mode_legend=MODE_LEGEND.replace("mode", "Mode", 1),
        hot_c=HOT_C,
        throttled_within=age(THROTTLED_WITHIN_S),
        time_off=TIME_OFF,
        power_off=POWER_OFF,
    )
    return found


_ENVIRONMENT = _environment()


async def drawn(request: Request, template: str, content: Mapping[str, Any], status: int = 200) -> Response:
    """Render a page.

    Args:
        request: the request to answer.
        template: name of the page's template.
        content: the template's values.
        status: the HTTP status of the answer.
    """
    section = "/" + request.url.path.strip("/").partition("/")[0]
    text = await asyncio.to_thread(_ENVIRONMENT.get_template(template).render, section=section, **content)
    return HTMLResponse(text, status_code=status)


# --- Axis -------------------------------------------------------------------------------------------------------------
# Round values for the axis of a drawing.

_STEPS = (1, 2, 5, 10)
_LOG_STEPS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
"""Values per decade of a logarithmic axis, the fewest first."""
_FEWEST = 3


def round_values(most: float, about: int) -> list[float]:
    """Values for an axis from 0: multiples of 1, 2 or 5 times a power of ten.

    Args:
        most: the end of the axis; above 0.
        about: the approximate upper limit of the number of steps.
    """
    step, decimals = _step(most, about)
    values = (round(k * step, decimals) for k in range(about + 1))
    return list(takewhile(lambda value: value <= most * (1 + 1e-9), values))


def round_log_values(least: float, most: float, about: int) -> list[float]:
    """Values for a logarithmic axis: as few per decade as give three values, or even steps on a short axis.

    Args:
        least: where the axis begins; above 0.
        most: where the axis ends; at least `least`.
        about: the number of steps that is wanted at most on a short axis.

    Returns:
        The values in ascending order; only `least` if the axis has no length.
    """
    if most == least:
        return [least]
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    for mantissas in _LOG_STEPS:
        values = [round(each * 10.0**decade, 1 - decade) for decade in decades for each in mantissas]
        if len(within := [value for value in values if least <= value <= most]) >= _FEWEST:
            return within
    step, decimals = _step(most - least, about)
    return [round(k * step, decimals) for k in range(math.ceil(least / step), math.floor(most / step) + 1)]


def _step(span: float, about: int) -> tuple[float, int]:
    """Return the round step that divides a span into at most `about` parts, and the decimals of its multiples."""
    exponent = math.floor(math.log10(span / about))
    # Three decimals, so that 10.000000001 steps are 10.
    step = next(each for each in _STEPS if round(span / (each * 10.0**exponent), 3) <= about)
    return step * 10.0**exponent, max(0, -exponent)


# --- Front plot -------------------------------------------------------------------------------------------------------
# A device's front as a drawing: seconds per epoch against watts, with presets and the mode in force.

_FRONT_WIDTH, _FRONT_HEIGHT = 720.0, 320.0
_FRONT_LEFT, _FRONT_RIGHT, _FRONT_TOP, _FRONT_BOTTOM = 60.0, 20.0, 16.0, 44.0
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
    width: float = _FRONT_WIDTH
    height: float = _FRONT_HEIGHT

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
            return _FRONT_LEFT + 8 + (log_s - first) / span * (_FRONT_WIDTH - _FRONT_LEFT - _FRONT_RIGHT - 16)

        def y_of(watts: float) -> float:
            return _FRONT_TOP + (1 - watts / most_w) * (_FRONT_HEIGHT - _FRONT_TOP - _FRONT_BOTTOM)

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
            marks.append(PresetMark(point, names, alike[0]["is_measured"], point.x > 0.8 * _FRONT_WIDTH))
        return cls(
            [point_of(each) for each in front],
            marks,
            [(x_of(math.log(tick)), tick) for tick in round_log_values(fastest_s, slowest_s, _TICKS)],
            [(y_of(watts), watts) for watts in round_values(most_w, _TICKS)],
        )


# --- History plot -----------------------------------------------------------------------------------------------------
# A device's newest rounds as a drawing: predicted, allowed and observed values.

_HISTORY_WIDTH, _HISTORY_HEIGHT = 720.0, 200.0
_HISTORY_LEFT, _HISTORY_RIGHT, _HISTORY_TOP, _HISTORY_BOTTOM = 60.0, 20.0, 14.0, 40.0
_WIDEST_STEP = 60.0
_HISTORY_TICKS = 4


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
    width: float = _HISTORY_WIDTH
    height: float = _HISTORY_HEIGHT
    left: float = _HISTORY_LEFT

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
        step = min(_WIDEST_STEP, (_HISTORY_WIDTH - _HISTORY_LEFT - _HISTORY_RIGHT) / len(parts))

        def y_of(value: float) -> float:
            return _HISTORY_TOP + (1 - value / most) * (_HISTORY_HEIGHT - _HISTORY_TOP - _HISTORY_BOTTOM)

        points = []
        for k, (round_number, part) in enumerate(parts):
            seen, limit = part[observed], None if allowed is None else part[allowed]
            words = [f"predicted {part[predicted]:,.1f} {unit}"]
            words += [] if limit is None else [f"allowed {limit:,.1f} {unit}"]
            words += ["not observed" if seen is None else f"observed {seen:,.1f} {unit}"]
            points.append(
                HistoryPoint(
                    round_number,
                    _HISTORY_LEFT + step * (k + 0.5),
                    0.35 * step,
                    y_of(part[predicted]),
                    None if seen is None else y_of(seen),
                    None if limit is None else y_of(limit),
                    seen is not None and limit is not None and seen > limit,
                    f"round {number}: {', '.join(words)}",
                )
            )
        return cls(title, unit, points, [(y_of(value), value) for value in round_values(most, _HISTORY_TICKS)])


# --- Timeline ---------------------------------------------------------------------------------------------------------
# A round's timeline: for each device a bar of predicted and a bar of observed seconds, from the training's start.

_MAX_ROWS = 30
_LEFT, _RIGHT, _ROW, _TOP = 170.0, 20.0, 30.0, 26.0
_WIDTH = 900.0
_TIMELINE_TICKS = 5


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
        ticks = [(_LEFT + k * unit_s * scale, k * unit_s) for k in round_values(longest_s / unit_s, _TIMELINE_TICKS)]
        mark = None if totals["planned_s"] is None else _LEFT + totals["planned_s"] * scale
        height = _TOP + len(shown) * _ROW + 8
        return cls(rows, len(devices) - len(shown), _WIDTH, height, _LEFT, ticks, mark)


def _text_of(device: Values) -> str:
    observed = "not observed" if device["observed_s"] is None else f"observed {device['observed_s']:,.1f} s"
    failure = f", {device['failure']}" if device["failure"] else ", late" if device["outcome"] == "late" else ""
    assumed = " with an assumed length" if device["length_assumed"] else ""
    return f"{device['device_id']}: predicted {device['predicted_s']:,.1f} s{assumed}, {observed}{failure}"
