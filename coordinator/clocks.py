"""Two clocks side by side: the date and time, which may jump, and the time since the machine started, which does not.

A date jumps when an operator, a time server or a dead battery changes it. Such a jump must not make overrides end or
old runs be deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_TOLERANCE_S = 10.0
"""Smaller differences in seconds do not count as jumps, because the two clocks are not read at the same instant."""


@dataclass(frozen=True)
class BootClock:
    """The time since the machine started, including time in which it was suspended.

    Attributes:
        boot_id: changes with each start of the machine; empty if unknown.
        since_boot_s: reads the seconds since the machine started.
    """

    boot_id: str
    since_boot_s: Callable[[], float]

    @classmethod
    def of_system(cls, boot_id_file: Path = Path("/proc/sys/kernel/random/boot_id")) -> BootClock:
        """The clock of this machine."""
        try:
            boot_id = boot_id_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            boot_id = ""
        return cls(boot_id, lambda: time.clock_gettime(time.CLOCK_BOOTTIME))


@dataclass(frozen=True)
class Moment:
    """Both clocks at one moment.

    Attributes:
        noted_at: the date and time, with a UTC offset.
        boot_id: the id of the machine's current start.
        since_boot_s: seconds since that start.
    """

    noted_at: datetime
    boot_id: str
    since_boot_s: float


def jump_s(earlier: Moment, later: Moment, max_absence_s: float) -> float:
    """The seconds by which the date jumped forward, or backward if negative; 0 for no jump.

    If the machine was started between the moments, the time that passed is unknown. A date that is up to
    `max_absence_s` later is then accepted. Otherwise no time is assumed to have passed.
    """
    moved_s = (later.noted_at - earlier.noted_at).total_seconds()
    if earlier.boot_id and earlier.boot_id == later.boot_id:
        jumped_s = moved_s - (later.since_boot_s - earlier.since_boot_s)
        return jumped_s if abs(jumped_s) > _TOLERANCE_S else 0.0
    return 0.0 if -_TOLERANCE_S <= moved_s <= max_absence_s else moved_s


def jump_text(jumped_s: float) -> str:
    """Describe a jump for messages, such as "put forward by 3 days"."""
    way = "forward" if jumped_s > 0 else "back"
    for name, length_s in (("day", 86_400.0), ("hour", 3_600.0), ("minute", 60.0)):
        count = round(abs(jumped_s) / length_s)
        if count:
            return f"put {way} by {count:,} {name}{'' if count == 1 else 's'}"
    return f"put {way} by {abs(jumped_s):.0f} s"
