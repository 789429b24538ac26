"""Formats numbers, watts and times for people."""

from __future__ import annotations

from datetime import datetime, timezone

from wattfleet_io.console import duration_text


def number(value: float | None, digits: int = 1) -> str:
    """Format a number for a table; a dash if it is unknown."""
    return "-" if value is None else f"{value:,.{digits}f}"


ASSUMED_NOTE = "~: with an assumed number of minibatches in an epoch, as no app has reported the device's own"
"""Explains the mark of `expected_time` below a table."""


def expected_time(seconds: float | None, is_length_assumed: bool) -> str:
    """Format a predicted time, marked if it assumes the length of an epoch."""
    return f"{'~' if is_length_assumed and seconds is not None else ''}{duration_text(seconds)}"


def watts(value: float) -> str:
    """Format watts for a sentence, such as "40 W" or "5.5 W"."""
    return f"{value:,.1f}".removesuffix(".0") + " W"


def moment(when: datetime) -> str:
    """Format a local time, with the date unless it is today."""
    local, now = when.astimezone(), datetime.now().astimezone()
    if local.date() == now.date():
        return local.strftime("%H:%M:%S")
    return local.strftime("%b %d %H:%M" if abs((local - now).days) < 300 else "%Y-%m-%d")


def moment_of(unix_s: float | None) -> str:
    """Format seconds since 1970 as `moment` does; a dash if they are unknown."""
    return "-" if unix_s is None else moment(datetime.fromtimestamp(unix_s, timezone.utc))


def date_and_time(time: str) -> str:
    """Format a time, given in ISO 8601, with its date and its seconds in the local time zone."""
    return datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age(seconds: float) -> str:
    """Format a rough duration: "45 s", "12 min", "3 h" or "2 days"."""
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.0f} days"
