"""Numbers and times as commands show them to people."""

from __future__ import annotations

from datetime import datetime


def number(value: float | None, digits: int = 1) -> str:
    """A number in a table; a dash where it is not known."""
    return "-" if value is None else f"{value:,.{digits}f}"


def watts(value: float) -> str:
    """Watts in a sentence: whole ones without a decimal."""
    return f"{value:,.1f}".removesuffix(".0") + " W"


def counted(count: int, thing: str) -> str:
    """So many things, by the name of one."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def duration(seconds: float | None) -> str:
    """Seconds in a table, as minutes and hours where they are many."""
    if seconds is None:
        return "-"
    if seconds < 600:
        return f"{seconds:,.1f} s"
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{minutes} min" if minutes < 120 else f"{hours:,.1f} h"


def moment(when: datetime) -> str:
    """A time as the operator's clock shows it; with the date where it is not today."""
    local, now = when.astimezone(), datetime.now().astimezone()
    if local.date() == now.date():
        return local.strftime("%H:%M:%S")
    return local.strftime("%b %d %H:%M" if abs((local - now).days) < 300 else "%Y-%m-%d")
