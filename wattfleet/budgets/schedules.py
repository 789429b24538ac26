"""Schedules: budgets that repeat daily, or that follow a table of dated rows."""

from __future__ import annotations

import csv
import io
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

from wattfleet.budgets.budget import InForce, require_offset, require_watts
from wattfleet.budgets.day_spans import DaySpan, minute_of_day, require_whole_day
from wattfleet.errors import InvalidInputError

_MAX_SHOWN = 80
"""Characters of a field in an error."""


@dataclass(frozen=True)
class Span(DaySpan):
    """A time span of every day, and its budget.

    Attributes:
        watts: budget in the span.

    Raises:
        InvalidInputError: a minute is out of range, the span is empty, or the watts are not finite and above 0.
    """

    watts: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require_watts(str(self), self.watts)


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
        require_whole_day(self.spans, "budget", "budgets")

    @classmethod
    def of(cls, zone: ZoneInfo, spans: Mapping[str, float]) -> DailySchedule:
        """Parse a schedule of spans such as `{"06:00-18:00": 200, "18:00-06:00": 80}`.

        An end at midnight may be written 00:00 or 24:00.

        Raises:
            InvalidInputError: a span has another form, its watts are not finite and above 0, or the day has gaps or
                overlaps.
        """
        return cls(zone, tuple(Span(*DaySpan.minutes_of(text), watts) for text, watts in spans.items()))

    def in_force(self, now: datetime) -> InForce:
        """The budget of the current span.

        Raises:
            InvalidInputError: the time has no offset.
        """
        minute = minute_of_day(now, self.zone)
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
