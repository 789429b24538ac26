"""Budgets: how many watts a supply may deliver at a given time, and why. Callers pass times with a UTC offset."""

from __future__ import annotations

import csv
import io
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from itertools import pairwise
from typing import Protocol
from zoneinfo import ZoneInfo

from wattfleet.core.errors import InvalidInputError

# --- Supplies ---------------------------------------------------------------------------------------------------------
# Supplies: the tree of power supplies of a fleet, with a site's connection at the root and circuits below it.


@dataclass(frozen=True)
class Supply:
    """One supply.

    Attributes:
        name: its name, unique in the tree.
        parent: the supply that feeds it; None for a site's own connection.
    """

    name: str
    parent: str | None = None


@dataclass(frozen=True)
class Supplies:
    """One or more trees of supplies. Every path upwards ends at a site's own connection.

    Attributes:
        supplies: all supplies, each once, in any order.

    Raises:
        InvalidInputError: there are none, a name is empty or used twice, a parent is unknown, or the supplies form a
            cycle.
    """

    supplies: tuple[Supply, ...]

    def __post_init__(self) -> None:
        if not self.supplies:
            raise InvalidInputError("no supplies: give at least one, without a parent")
        seen: set[str] = set()
        for supply in self.supplies:
            if not supply.name.strip():
                raise InvalidInputError("a supply has an empty name: give it a name")
            if supply.name in seen:
                raise InvalidInputError(f"supply {supply.name!r} is defined twice: give each supply its own name")
            seen.add(supply.name)
        for supply in self.supplies:
            if supply.parent is not None and supply.parent not in seen:
                raise InvalidInputError(
                    f"supply {supply.name!r} has the unknown parent {supply.parent!r}: use one of"
                    f" {', '.join(sorted(seen))}"
                )
        for name in self.names:
            self._require_root(name)

    @cached_property
    def _parents(self) -> Mapping[str, str | None]:
        return {supply.name: supply.parent for supply in self.supplies}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names, in the given order."""
        return tuple(supply.name for supply in self.supplies)

    @cached_property
    def roots(self) -> tuple[str, ...]:
        """The sites' own connections, in the given order."""
        return tuple(supply.name for supply in self.supplies if supply.parent is None)

    def parent_of(self, name: str) -> str | None:
        """The supply that feeds another; None for a site's own connection.

        Raises:
            InvalidInputError: the name is unknown.
        """
        if name not in self._parents:
            raise InvalidInputError(f"unknown supply {name!r}: use one of {', '.join(self.names)}")
        return self._parents[name]

    def path(self, name: str) -> tuple[str, ...]:
        """A supply and all supplies above it, up to the site's own connection.

        Raises:
            InvalidInputError: the name is unknown.
        """
        path = [name]
        while (parent := self.parent_of(path[-1])) is not None:
            path.append(parent)
        return tuple(path)

    def behind(self, name: str) -> tuple[str, ...]:
        """A supply and all supplies that it feeds, directly or not, in the given order.

        Raises:
            InvalidInputError: the name is unknown.
        """
        self.parent_of(name)
        return tuple(each for each in self.names if name in self.path(each))

    def _require_root(self, name: str) -> None:
        """Check that the path upwards from a supply ends at a root."""
        path = [name]
        while (parent := self._parents[path[-1]]) is not None:
            if parent in path:
                cycle = " <- ".join([*path[path.index(parent) :], parent])
                raise InvalidInputError(f"the supplies form a cycle ({cycle}): remove the parent of one of them")
            path.append(parent)


# --- Day spans --------------------------------------------------------------------------------------------------------
# Time spans that repeat every day, by the wall clock of a time zone.

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


# --- Schedules --------------------------------------------------------------------------------------------------------
# Schedules: budgets that repeat daily, or that follow a table of dated rows.

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
            rows.append(
                TimedRow(time_of(fields["from"]), number_of_watts(fields["watts"]), time_of(until) if until else None)
            )
    except (InvalidInputError, csv.Error) as error:
        raise InvalidInputError(f"line {reader.line_num}: {error}") from None
    return TimedSchedule(tuple(rows), fallback_w)


def time_of(text: str) -> datetime:
    """The time that a table states.

    Raises:
        InvalidInputError: the text has another form.
    """
    try:
        # Python 3.10 does not parse the suffix Z.
        return datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text.strip()))
    except ValueError:
        raise InvalidInputError(f"{text[:_MAX_SHOWN]!r} is not a time: write it as 2026-06-01T06:00+02:00") from None


def number_of_watts(text: str) -> float:
    """The watts that a table states.

    Raises:
        InvalidInputError: the text is no number.
    """
    try:
        return float(text)
    except ValueError:
        raise InvalidInputError(f"{text[:_MAX_SHOWN]!r} is not a number of watts") from None


# --- Query fallback ---------------------------------------------------------------------------------------------------
# The watts of a budget that a query measures: its last reading, or the fallback when the reading is too old.


@dataclass(frozen=True)
class Reading:
    """Watts that a source measured.

    Attributes:
        watts: the measured watts.
        measured_at: earliest possible time of the measurement, with a UTC offset.

    Raises:
        InvalidInputError: the watts are negative or not finite, or the time has no offset.
    """

    watts: float
    measured_at: datetime

    def __post_init__(self) -> None:
        # Unlike a configured budget, a measurement may be 0 W, such as solar power at night.
        if not (math.isfinite(self.watts) and self.watts >= 0):
            raise InvalidInputError(f"measured watts must be finite and 0 or more, not {self.watts:g}")
        require_offset(self.measured_at)


@dataclass(frozen=True)
class ReadingRule:
    """How long a source's newest reading is in force, and the fallback without a fresh reading.

    Attributes:
        max_age_s: age in seconds after which a reading is stale.
        fallback_w: watts in force without a fresh reading.

    Raises:
        InvalidInputError: one of them is not finite and above 0.
    """

    max_age_s: float
    fallback_w: float

    def __post_init__(self) -> None:
        require_watts("a fallback", self.fallback_w)
        if not (math.isfinite(self.max_age_s) and self.max_age_s > 0):
            raise InvalidInputError(
                f"the maximum age of a reading must be finite and above 0 s, not {self.max_age_s:g}"
            )

    def in_force(self, now: datetime, newest: Reading | None, trouble: str = "") -> InForce:
        """The newest reading if it is fresh, otherwise the fallback.

        Args:
            now: current time, with a UTC offset.
            newest: the source's newest reading; None if there never was one.
            trouble: why the source has no current value, as text; empty if it has one.

        Raises:
            InvalidInputError: the time has no offset.
        """
        require_offset(now)
        # A reading from the future means that the clock was set back. It must not stay in force until then.
        if newest is not None and abs((now - newest.measured_at).total_seconds()) <= self.max_age_s:
            return InForce(newest.watts, "query", False, "measured")
        reason = "no reading yet"
        if newest is not None:
            # Not the age, since the same reason has to have the same text.
            at = f"{newest.measured_at.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
            reason = f"the newest reading may be from {at}, over {self.max_age_s:g} s ago"
            if newest.measured_at > now:
                reason = f"the newest reading is from {at}, in the future: was the clock set back?"
        return InForce(self.fallback_w, "query", True, f"{reason}: {trouble}" if trouble else reason)


# --- Budget -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InForce:
    """The budget of a supply that is in force now.

    Attributes:
        watts: finite and 0 or more; 0 if a source measured 0 W.
        source: kind of the budget: constant, schedule, csv or query; operator for an override.
        fallback: whether the watts are the fallback, because the source has no current value.
        reason: why these watts are in force, as text for people. The same reason always has the same text.
    """

    watts: float
    source: str
    fallback: bool
    reason: str


class Budget(Protocol):
    """A budget that depends only on the time."""

    def in_force(self, now: datetime) -> InForce:
        """The budget in force at a time with a UTC offset.

        Raises:
            InvalidInputError: the time has no offset.
        """
        ...


@dataclass(frozen=True)
class ConstantBudget:
    """The same watts at all times.

    Attributes:
        watts: finite and above 0.

    Raises:
        InvalidInputError: the watts are not finite and above 0.
    """

    watts: float

    def __post_init__(self) -> None:
        require_watts("a budget", self.watts)

    def in_force(self, now: datetime) -> InForce:
        """The constant budget."""
        return InForce(self.watts, "constant", False, "constant budget")


@dataclass(frozen=True)
class Override:
    """The operator's override of a supply's budget.

    Attributes:
        watts: finite and above 0.
        until: when the override ends, with a UTC offset; None if it lasts until it is cleared.

    Raises:
        InvalidInputError: the watts are not finite and above 0, or the time has no offset.
    """

    watts: float
    until: datetime | None = None

    def __post_init__(self) -> None:
        require_watts("a budget", self.watts)
        if self.until is not None:
            require_offset(self.until)

    def in_force(self, now: datetime) -> InForce | None:
        """The override; None after its end."""
        if self.until is not None and now >= self.until:
            return None
        return InForce(self.watts, "operator", False, "set by the operator")


def require_watts(what: str, watts: float) -> None:
    """Check watts that serve as a budget.

    Raises:
        InvalidInputError: they are not finite and above 0; the text begins with `what`.
    """
    if not (math.isfinite(watts) and watts > 0):
        raise InvalidInputError(f"{what} must be finite and above 0 W, not {watts:g}")


def require_offset(time: datetime) -> None:
    """Check that a time has a UTC offset.

    Raises:
        InvalidInputError: it has none.
    """
    if time.utcoffset() is None:
        raise InvalidInputError(f"{time.isoformat()} has no UTC offset: write it as 2026-06-01T06:00+02:00")
