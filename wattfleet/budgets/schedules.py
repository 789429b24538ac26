"""Schedules: budgets that repeat daily, or that follow a table of dated rows."""

from __future__ import annotations

import csv
import io
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

from wattfleet.budgets.budget import InForce, require_offset, require_watts
from wattfleet.errors import InvalidInputError

_DAY_MIN = 24 * 60
_SPAN = re.compile(r"(?P<start>\d\d:\d\d)\s*-\s*(?P<end>\d\d:\d\d)")
_MAX_SHOWN = 80
"""Characters of a field in an error."""


@dataclass(frozen=True)
class Span:
    """A time span of every day, in minutes since midnight by the wall clock. It may cross midnight.

    Attributes:
        start_min: first minute, 0 to 1439.
        end_min: the minute after the last, 1 to 1440; below `start_min` if the span crosses midnight.
        watts: budget in the span.

    Raises:
        InvalidInputError: a minute is out of range, the span is empty, or the watts are not finite and above 0.
    """

    start_min: int
    end_min: int
    watts: float

    def __post_init__(self) -> None:
        if not (0 <= self.start_min < _DAY_MIN and 0 < self.end_min <= _DAY_MIN):
            raise InvalidInputError(f"{self}: a span must start at 00:00 to 23:59 and end at 00:01 to 24:00")
        if self.start_min == self.end_min:
            raise InvalidInputError(f"{self} is an empty span: write 00:00-24:00 for the whole day")
        require_watts(str(self), self.watts)

    def __str__(self) -> str:
        return f"{_clock(self.start_min)}-{_clock(self.end_min)}"

    def holds(self, minute: int) -> bool:
        """Whether the span contains a minute of the day, 0 to 1439."""
        if self.start_min < self.end_min:
            return self.start_min <= minute < self.end_min
        return minute >= self.start_min or minute < self.end_min


@dataclass(frozen=True)
class DailySchedule:
    """The same spans every day, by the wall clock of a time zone.

    When clocks change, the skipped hour is never in force and the repeated hour is in force twice.

    Attributes:
        zone: time zone of the wall clock.
        spans: spans that together cover every minute of the day exactly once.

    Raises:
        InvalidInputError: some minutes have no watts or several; the text names them.
    """

    zone: ZoneInfo
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        held = [sum(span.holds(minute) for span in self.spans) for minute in range(_DAY_MIN)]
        if gaps := _stretches([count == 0 for count in held]):
            raise InvalidInputError(f"the schedule has no budget for {gaps}: cover the whole day")
        if overlaps := _stretches([count > 1 for count in held]):
            raise InvalidInputError(f"the schedule has several budgets for {overlaps}: remove the overlap")

    @classmethod
    def of(cls, zone: ZoneInfo, spans: Mapping[str, float]) -> DailySchedule:
        """Parse a schedule of spans such as `{"06:00-18:00": 200, "18:00-06:00": 80}`.

        An end at midnight may be written 00:00 or 24:00.

        Raises:
            InvalidInputError: a span has another form, its watts are not finite and above 0, or the day has gaps or
                overlaps.
        """
        return cls(zone, tuple(_span(text, watts) for text, watts in spans.items()))

    def in_force(self, now: datetime) -> InForce:
        """The budget of the current span.

        Raises:
            InvalidInputError: the time has no offset.
        """
        require_offset(now)
        local = now.astimezone(self.zone)
        minute = local.hour * 60 + local.minute
        span = next(span for span in self.spans if span.holds(minute))
        return InForce(span.watts, "schedule", False, f"{span} {self.zone.key}")


@dataclass(frozen=True)
class TimedRow:
    """A budget from a given time on.

    Attributes:
        start: start time, with a UTC offset.
        watts: budget from then on.
        until: end time, with a UTC offset; None until the next row, or without end in the last row.

    Raises:
        InvalidInputError: a time has no offset, the end is not after the start, or the watts are not finite and above
            0.
    """

    start: datetime
    watts: float
    until: datetime | None = None

    def __post_init__(self) -> None:
        require_offset(self.start)
        require_watts("a budget", self.watts)
        if self.until is not None:
            require_offset(self.until)
            if self.until <= self.start:
                raise InvalidInputError(
                    f"until ({self.until.isoformat()}) must be later than from ({self.start.isoformat()})"
                )


@dataclass(frozen=True)
class TimedSchedule:
    """A table of dated rows, with a fallback before the first and after the last.

    Attributes:
        rows: one or more, in ascending order; each ends where the next starts.
        fallback_w: watts before the first row, and after the last if it has an end.

    Raises:
        InvalidInputError: there are no rows, they do not ascend, leave a gap or overlap, or the fallback is not finite
            and above 0.
    """

    rows: tuple[TimedRow, ...]
    fallback_w: float

    def __post_init__(self) -> None:
        require_watts("a fallback", self.fallback_w)
        if not self.rows:
            raise InvalidInputError("the table has no rows: give 1 or more")
        for row, following in pairwise(self.rows):
            if following.start <= row.start:
                raise InvalidInputError(
                    f"row {following.start.isoformat()} does not start later than the row before it: sort the rows"
                )
            if row.until is not None and row.until != following.start:
                what = "leave a gap" if row.until < following.start else "overlap"
                raise InvalidInputError(
                    f"rows {what} between {row.until.isoformat()} and {following.start.isoformat()}:"
                    " end each row where the next starts"
                )

    def in_force(self, now: datetime) -> InForce:
        """The budget of the current row, or the fallback.

        Raises:
            InvalidInputError: the time has no offset.
        """
        require_offset(now)
        index = bisect_right(self.rows, now, key=lambda row: row.start) - 1
        if index < 0:
            return InForce(self.fallback_w, "csv", True, f"the table starts at {self.rows[0].start.isoformat()}")
        row = self.rows[index]
        if row.until is not None and now >= row.until:
            return InForce(self.fallback_w, "csv", True, f"the table ended at {row.until.isoformat()}")
        return InForce(row.watts, "csv", False, f"row from {row.start.isoformat()}")


def read_timed_schedule(text: str, fallback_w: float) -> TimedSchedule:
    """Parse a CSV text with the columns `from`, `watts` and optionally `until`.

    Times are ISO 8601 with a UTC offset, such as 2026-06-01T06:00+02:00 or 2026-06-01T04:00Z. An empty `until` means
    until the next row.

    Args:
        text: content of the CSV file.
        fallback_w: watts before the first row, and after the last if it has an end.

    Raises:
        InvalidInputError: a column is missing or unknown, a field is invalid (the text names the line), or the rows do
            not form a schedule.
    """
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff")))
    try:
        columns = [name.strip() for name in reader.fieldnames or []]
        if sorted(columns) not in (["from", "watts"], ["from", "until", "watts"]):
            raise InvalidInputError(f"the first line must be from,watts or from,until,watts, not {','.join(columns)!r}")
        reader.fieldnames = columns
        rows = []
        for fields in reader:
            if None in fields or None in fields.values():
                raise InvalidInputError(f"the line must have {len(columns)} fields")
            until = fields.get("until", "").strip()
            rows.append(TimedRow(_time(fields["from"]), _number(fields["watts"]), _time(until) if until else None))
    except (InvalidInputError, csv.Error) as error:
        raise InvalidInputError(f"line {reader.line_num}: {error}") from None
    return TimedSchedule(tuple(rows), fallback_w)


def _time(text: str) -> datetime:
    try:
        # Python 3.10 does not parse the suffix Z.
        return datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text.strip()))
    except ValueError:
        raise InvalidInputError(f"{text[:_MAX_SHOWN]!r} is not a time: write it as 2026-06-01T06:00+02:00") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInputError(f"{text[:_MAX_SHOWN]!r} is not a number of watts") from None


def _span(text: str, watts: float) -> Span:
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise InvalidInputError(f"{text!r} is not a time span: write it as 06:00-18:00")
    return Span(_minute(match["start"]), _minute(match["end"]) or _DAY_MIN, watts)


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
