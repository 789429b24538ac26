"""Renders a page from its template in a thread, so that viewers do not wait for each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from coordinator.display.device_words import (
    POWER_OFF,
    THROTTLED_WITHIN_S,
    TIME_OFF,
    exceeded_allowed_watts,
    granted,
    in_state_for,
    last_training,
    live_line,
    measured_modes,
    prediction_errors,
    profiling_left,
    troubles,
    trust,
)
from coordinator.display.run_words import run_title
from coordinator.display.supply_words import is_exceeded, source_detail, source_word, why_in_force
from coordinator.display.view_values import Values
from coordinator.display.wording import age, date_and_time, moment, number, watts
from coordinator.page.links import device_link, run_link
from wattfleet.modes import PowerMode
from wattfleet_io.console import MODE_LEGEND, count_of, duration_text, energy_text
from wattfleet_proto.hot_boards import HOT_C

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
        troubles=lambda device: troubles(device, time.time()),
        ago=lambda unix_s: f"{age(time.time() - unix_s)} ago",
        left=_left,
        live=live_line,
        last_training=last_training,
        granted=granted,
        trust=trust,
        prediction_errors=prediction_errors,
        source=source_word,
        source_detail=source_detail,
        why_in_force=why_in_force,
        is_exceeded=is_exceeded,
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
