"""Numbers, watts and times as people read them."""

from __future__ import annotations

from datetime import datetime

MODE_LEGEND = "mode: CPU cores, then CPU/GPU/memory clocks in GHz"


def number(value: float | None, digits: int = 1) -> str:
    """A number in a table; a dash if it is unknown."""
    return "-" if value is None else f"{value:,.{digits}f}"


def watts(value: float) -> str:
    """Watts in a sentence, such as "40 W" or "5.5 W"."""
    return f"{value:,.1f}".removesuffix(".0") + " W"


def moment(when: datetime) -> str:
    """A local time; with the date unless it is today."""
    local, now = when.astimezone(), datetime.now().astimezone()
    if local.date() == now.date():
        return local.strftime("%H:%M:%S")
    return local.strftime("%b %d %H:%M" if abs((local - now).days) < 300 else "%Y-%m-%d")
