"""Time spans that repeat every day, by the wall clock of a time zone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

from wattfleet.budgets.budget import require_offset
from wattfleet.errors import InvalidInputError

_DAY_MIN = 24 * 60
_SPAN = re.compile(r"(?P<start>\d\d:\d\d)\s*-\s*(?P<end>\d\d:\d\d)")


@dataclass(frozen=True)
class DaySpan:
    """A time span of every day, in minutes since midnight by the wall clock. It may cross midnight.

    Attributes:
        start_min: first minute, 0 to 1439.
        end_min: the minute after the last, 1 to 1440; below `start_min` if the span crosses midnight.

    Raises:
        InvalidInputError: a minute is out of range, or the span is empty.
    """

    start_min: int
    end_min: int

    def __post_init__(self) -> None:
        if not (0 <= self.start_min < _DAY_MIN and 0 < self.end_min <= _DAY_MIN):
            raise InvalidInputError(f"{self}: a span must start at 00:00 to 23:59 and end at 00:01 to 24:00")
        if self.start_min == self.end_min:
            raise InvalidInputError(f"{self} is an empty span: write 00:00-24:00 for the whole day")

    def __str__(self) -> str:
        return f"{_clock(self.start_min)}-{_clock(self.end_min)}"

    @classmethod
    def minutes_of(cls, text: str) -> tuple[int, int]:
        """The first minute of a span such as `06:00-18:00`, and the minute after its last.

        An end at midnight may be written 00:00 or 24:00.

        Raises:
            InvalidInputError: the text has another form.
        """
        match = _SPAN.fullmatch(text.strip())
        if match is None:
            raise InvalidInputError(f"{text!r} is not a time span: write it as 06:00-18:00")
        return _minute(match["start"]), _minute(match["end"]) or _DAY_MIN

    def holds(self, minute: int) -> bool:
        """Whether the span contains a minute of the day, 0 to 1439."""
        if self.start_min < self.end_min:
            return self.start_min <= minute < self.end_min
        return minute >= self.start_min or minute < self.end_min


def require_whole_day(spans: Sequence[DaySpan], one: str, several: str) -> None:
    """Check that spans cover every minute of the day exactly once.

    Args:
        spans: any, in any order.
        one: what a minute has in its span, for the error's text, such as `budget`.
        several: its plural.

    Raises:
        InvalidInputError: some minutes are in no span or in several; the text names them.
    """
    held = [sum(span.holds(minute) for span in spans) for minute in range(_DAY_MIN)]
    if gaps := _stretches([count == 0 for count in held]):
        raise InvalidInputError(f"the schedule has no {one} for {gaps}: cover the whole day")
    if overlaps := _stretches([count > 1 for count in held]):
        raise InvalidInputError(f"the schedule has several {several} for {overlaps}: remove the overlap")


def minute_of_day(now: datetime, zone: ZoneInfo) -> int:
    """The minute of the day by a time zone's wall clock, 0 to 1439.

    Raises:
        InvalidInputError: the time has no offset.
    """
    require_offset(now)
    local = now.astimezone(zone)
    return local.hour * 60 + local.minute


def _minute(text: str) -> int:
    hour, minute = int(text[:2]), int(text[3:])
    if minute > 59 or hour * 60 + minute > _DAY_MIN:
        raise InvalidInputError(f"{text!r} is not a time of day: write 00:00 to 24:00")
    return hour * 60 + minute


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


def _stretches(marked: Iterable[bool]) -> str:
    """The marked minutes of a day as time spans for an error's text; empty if none is marked."""
    marks = [False, *marked, False]
    edges = [minute for minute, (before, after) in enumerate(pairwise(marks)) if before != after]
    return ", ".join(f"{_clock(start)}-{_clock(end)}" for start, end in zip(edges[::2], edges[1::2], strict=True))
