"""The rate at which requests arrive: constant, by a daily schedule, or as measured by the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from wattfleet.budgets import DaySpan, minute_of_day, require_whole_day
from wattfleet.errors import InvalidInputError

MAX_ARRIVALS_PER_S = 1e5
"""Largest plausible number of requests per second on one device."""


@dataclass(frozen=True)
class ConstantArrivals:
    """The same rate at all times.

    Attributes:
        per_s: requests per second, above 0.

    Raises:
        InvalidInputError: the rate is not a number above 0, or beyond `MAX_ARRIVALS_PER_S`.
    """

    per_s: float

    def __post_init__(self) -> None:
        _require_rate("arrivals", self.per_s)

    def rate(self, now: datetime, measured_per_s: float | None) -> float:
        """The constant rate, requests per second."""
        return self.per_s

    def content(self) -> dict[str, Any]:
        """The arrivals as a JSON object."""
        return {"per_s": self.per_s}


@dataclass(frozen=True)
class ArrivalSpan(DaySpan):
    """A time span of every day, and its arrivals.

    Attributes:
        per_s: requests per second in the span; 0 for none.

    Raises:
        InvalidInputError: a minute is out of range, the span is empty, or the rate is not 0 to `MAX_ARRIVALS_PER_S`.
    """

    per_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_rate(str(self), self.per_s, or_none=True)


@dataclass(frozen=True)
class DailyArrivals:
    """The same spans every day, by the wall clock of a time zone.

    Attributes:
        zone: time zone of the wall clock.
        spans: spans that together cover every minute of the day exactly once.

    Raises:
        InvalidInputError: some minutes are in no span or in several, or no requests ever arrive.
    """

    zone: ZoneInfo
    spans: tuple[ArrivalSpan, ...]

    def __post_init__(self) -> None:
        require_whole_day(self.spans, "arrivals", "rates of arrivals")
        if not any(span.per_s for span in self.spans):
            raise InvalidInputError("the schedule has no arrivals at all: remove the duty instead")

    @classmethod
    def of(cls, zone: ZoneInfo, spans: Mapping[str, float]) -> DailyArrivals:
        """Parse a schedule of spans such as `{"06:00-18:00": 30, "18:00-06:00": 2}`.

        Raises:
            InvalidInputError: a span has another form, a rate is out of range, or the day has gaps or overlaps.
        """
        return cls(zone, tuple(ArrivalSpan(*DaySpan.minutes_of(text), per_s) for text, per_s in spans.items()))

    def rate(self, now: datetime, measured_per_s: float | None) -> float:
        """The rate of the current span, requests per second.

        Raises:
            InvalidInputError: the time has no offset.
        """
        minute = minute_of_day(now, self.zone)
        return next(span.per_s for span in self.spans if span.holds(minute))

    def content(self) -> dict[str, Any]:
        """The arrivals as a JSON object."""
        return {"zone": self.zone.key, "schedule": {str(span): span.per_s for span in self.spans}}


@dataclass(frozen=True)
class MeasuredArrivals:
    """The rate that the device has measured.

    Attributes:
        assumed_per_s: requests per second until it has measured any, above 0.

    Raises:
        InvalidInputError: the rate is not a number above 0, or beyond `MAX_ARRIVALS_PER_S`.
    """

    assumed_per_s: float

    def __post_init__(self) -> None:
        _require_rate("assumed arrivals", self.assumed_per_s)

    def rate(self, now: datetime, measured_per_s: float | None) -> float:
        """The measured rate if there is one, otherwise the assumed rate, requests per second."""
        return self.assumed_per_s if measured_per_s is None else measured_per_s

    def content(self) -> dict[str, Any]:
        """The arrivals as a JSON object."""
        return {"assumed_per_s": self.assumed_per_s}


Arrivals = ConstantArrivals | DailyArrivals | MeasuredArrivals


def arrivals_from_content(content: object) -> Arrivals:
    """Create arrivals from the JSON object that their `content` returned.

    Raises:
        InvalidInputError: a key is unknown or missing, or a value is out of range.
    """
    if isinstance(content, dict):
        keys = set(content)
        if keys == {"per_s"}:
            return ConstantArrivals(require_number("per_s", content["per_s"]))
        if keys == {"assumed_per_s"}:
            return MeasuredArrivals(require_number("assumed_per_s", content["assumed_per_s"]))
        if keys == {"zone", "schedule"} and isinstance(content["schedule"], dict):
            spans = {str(text): require_number(str(text), per_s) for text, per_s in content["schedule"].items()}
            return DailyArrivals.of(_zone(content["zone"]), spans)
    raise InvalidInputError('arrivals must have the keys "per_s", or "assumed_per_s", or "zone" and "schedule"')


def require_number(what: str, value: object) -> float:
    """Check that a JSON value is a number, and return it.

    Raises:
        InvalidInputError: it is not a number, or is too large.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidInputError(f"{what} must be a number, not {str(value)[:40]!r}")
    try:
        return float(value)
    except OverflowError:
        raise InvalidInputError(f"{what} is too large a number: give a smaller one") from None


def _zone(name: object) -> ZoneInfo:
    try:
        return ZoneInfo(str(name))
    except (KeyError, ValueError, OSError):
        raise InvalidInputError(f"{str(name)[:40]!r} is not a time zone: write one as Europe/Berlin") from None


def _require_rate(what: str, per_s: float, or_none: bool = False) -> None:
    least_holds = per_s >= 0 if or_none else per_s > 0
    if not (math.isfinite(per_s) and least_holds and per_s <= MAX_ARRIVALS_PER_S):
        least = "0" if or_none else "above 0"
        raise InvalidInputError(
            f"{what}: requests per second must be {least} to {MAX_ARRIVALS_PER_S:,g}, not {per_s:g}"
        )
