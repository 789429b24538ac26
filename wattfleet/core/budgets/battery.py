"""Batteries: how much energy a store holds now, by its newest reading, its harvest and what is drawn from it."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Protocol
from zoneinfo import ZoneInfo

from wattfleet.core.budgets.budget import number_of_watts, require_offset, time_of
from wattfleet.core.budgets.energy import require_joules
from wattfleet.core.errors import ImplausibleError, InvalidInputError

_HOURS = 24
_DAY_S = 86_400.0
STEP_S = 1800.0
"""Seconds between two moments at which a battery's energy is followed."""

# --- Harvest ----------------------------------------------------------------------------------------------------------


class Harvest(Protocol):
    """A forecast of what charges a battery. Write watts that are reached at least 19 days out of 20."""

    def watts(self, at: datetime) -> float:
        """The watts that the battery can count on at a time with a UTC offset."""
        ...

    @property
    def ends(self) -> datetime | None:
        """When nothing is known of it any more, although it may go on; None for a harvest of every day."""
        return None

    def least_w(self, begin: datetime, seconds: float, count: int) -> list[float]:
        """The watts that it surely has in each of some equally long stretches of time.

        Args:
            begin: the beginning of the first stretch, with a UTC offset.
            seconds: length of each stretch, at most an hour.
            count: number of stretches.
        """
        at = [self.watts(begin + timedelta(seconds=k * seconds)) for k in range(count + 1)]
        return [min(pair) for pair in pairwise(at)]


@dataclass(frozen=True)
class NoHarvest(Harvest):
    """Nothing charges the battery."""

    def watts(self, at: datetime) -> float:
        """0 W."""
        return 0.0


@dataclass(frozen=True)
class HourlyHarvest(Harvest):
    """The same watts every day, by the wall clock of a time zone.

    Attributes:
        zone: time zone of the wall clock.
        hourly_w: the watts of each hour of the day, from midnight.

    Raises:
        InvalidInputError: these are not 24 numbers, or one is not finite and 0 or more.
    """

    zone: ZoneInfo
    hourly_w: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.hourly_w) != _HOURS:
            raise InvalidInputError(f"a harvest by hour has {_HOURS} numbers of watts, not {len(self.hourly_w)}")
        for watts in self.hourly_w:
            _require_harvest(watts)

    def watts(self, at: datetime) -> float:
        """The watts of the current hour."""
        return self.hourly_w[at.astimezone(self.zone).hour]


@dataclass(frozen=True)
class DatedHarvest(Harvest):
    """A table of dated rows, such as tomorrow's forecast.

    Attributes:
        starts: one or more times with a UTC offset, ascending.
        watts_from: the watts from each of these times to the next. The last row lasts for an hour.

    Raises:
        InvalidInputError: there are no rows, they do not ascend, or a number is not finite and 0 or more.
    """

    starts: tuple[datetime, ...]
    watts_from: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.starts:
            raise InvalidInputError("the table of a harvest has no rows: give 1 or more")
        for start in self.starts:
            require_offset(start)
        for start, following in pairwise(self.starts):
            if following <= start:
                raise InvalidInputError(
                    f"row {following.isoformat()} does not start later than the row before it: sort the rows"
                )
        for watts in self.watts_from:
            _require_harvest(watts)

    def watts(self, at: datetime) -> float:
        """The watts of the current row; 0 W before the first row and after the last one."""
        k = bisect_right(self.starts, at) - 1
        return 0.0 if k < 0 or at >= self.ends else self.watts_from[k]

    @property
    def ends(self) -> datetime:
        """The end of the last row."""
        return self.starts[-1] + timedelta(hours=1)

    def least_w(self, begin: datetime, seconds: float, count: int) -> list[float]:
        """The watts that it surely has in each stretch, that of rows shorter than a stretch included."""
        least_w = super().least_w(begin, seconds, count)
        end = begin + timedelta(seconds=count * seconds)
        for k in range(bisect_right(self.starts, begin), bisect_left(self.starts, end)):
            stretch = min(int((self.starts[k] - begin).total_seconds() / seconds), count - 1)
            least_w[stretch] = min(least_w[stretch], self.watts_from[k])
        return least_w


def read_dated_harvest(text: str) -> DatedHarvest:
    """Parse a CSV text with the columns `from` and `watts`.

    Times are ISO 8601 with a UTC offset, such as 2026-06-01T06:00+02:00.

    Args:
        text: content of the CSV file.

    Raises:
        InvalidInputError: the text has another form, or its rows are no harvest; the text names the line.
    """
    starts, watts = [], []
    lines = text.removeprefix("\ufeff").splitlines()
    if not lines or [each.strip() for each in lines[0].split(",")] != ["from", "watts"]:
        raise InvalidInputError("the first line must be from,watts")
    for number, line in enumerate(lines[1:], 2):
        fields = line.split(",")
        try:
            if len(fields) != len(("from", "watts")):
                raise InvalidInputError("the line must have 2 fields")
            starts.append(time_of(fields[0]))
            watts.append(number_of_watts(fields[1]))
        except InvalidInputError as error:
            raise InvalidInputError(f"line {number}: {error}") from None
    return DatedHarvest(tuple(starts), tuple(watts))


@dataclass(frozen=True)
class MeasuredHarvest(Harvest):
    """The watts that a query returned. They count for a while, and nothing counts before and after that.

    Attributes:
        newest_w: the watts.
        since: when they were measured, with a UTC offset.
        until: the time until which they count, with a UTC offset.

    Raises:
        InvalidInputError: the watts are not finite and 0 or more, or a time has no offset.
    """

    newest_w: float
    since: datetime
    until: datetime

    def __post_init__(self) -> None:
        _require_harvest(self.newest_w)
        require_offset(self.since)
        require_offset(self.until)

    def watts(self, at: datetime) -> float:
        """The watts, or 0 W outside of their time."""
        return self.newest_w if self.since <= at < self.until else 0.0

    @property
    def ends(self) -> datetime:
        """The time until which the watts count."""
        return self.until


def _require_harvest(watts: float) -> None:
    if not (math.isfinite(watts) and watts >= 0):
        raise InvalidInputError(f"the watts of a harvest must be finite and 0 W or more, not {watts:g}")


_LONG_AGO = datetime.fromtimestamp(0, timezone.utc)

NOT_MEASURED = MeasuredHarvest(0.0, _LONG_AGO, _LONG_AGO)
"""A harvest whose query has returned nothing yet: 0 W, although there may be more."""


# --- Charge -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Charge:
    """A reading of a battery's state of charge.

    Attributes:
        share: of its capacity, 0 to 1.
        measured_at: earliest possible time of the measurement, with a UTC offset.

    Raises:
        ImplausibleError: no battery can have this share.
        InvalidInputError: the time has no offset.
    """

    share: float
    measured_at: datetime

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:  # also if it is no number
            raise ImplausibleError(
                f"a battery cannot hold {100 * self.share:g} % of its capacity: check what reports its charge"
            )
        require_offset(self.measured_at)


@dataclass(frozen=True)
class Estimate:
    """The energy that a battery holds now.

    Attributes:
        energy_j: joules.
        problem: why these are few although the battery may hold more, as text for people; empty if all is well.
    """

    energy_j: float
    problem: str = ""


# --- Battery ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Battery:
    """A store of energy of one device, or of a supply and all devices behind it.

    Attributes:
        capacity_j: joules that it can hold.
        reserve_share: share of the capacity that no training may touch.
        harvest: what charges it.
        self_discharge: share of its energy that it loses in a day.
        parked_s: seconds after a round for which it has to feed idle devices without touching the reserve.
        max_age_s: age of a reading in seconds from which the battery counts as ever emptier.
        decay_s: seconds from then on after which it counts as empty.

    Raises:
        InvalidInputError: a number is out of range.
    """

    capacity_j: float
    reserve_share: float = 0.2
    harvest: Harvest = field(default_factory=NoHarvest)
    self_discharge: float = 0.001
    parked_s: float = 0.0
    max_age_s: float = 900.0
    decay_s: float = 4 * 3600.0

    def __post_init__(self) -> None:
        require_joules("the capacity of a battery", self.capacity_j)
        if not 0 <= self.reserve_share < 1:
            raise InvalidInputError(f"the reserve of a battery must be 0 to 99 %, not {100 * self.reserve_share:g} %")
        if not 0 <= self.self_discharge < 1:
            raise InvalidInputError(f"a battery loses 0 to 99 % in a day, not {100 * self.self_discharge:g} %")
        if not 0 <= self.parked_s <= 7 * _DAY_S:
            raise InvalidInputError(f"devices can be parked for 0 to 168 hours, not {self.parked_s / 3600:g}")
        for what, seconds in (("max_age_s", self.max_age_s), ("decay", self.decay_s)):
            if not 0 < seconds <= 366 * _DAY_S:
                raise InvalidInputError(f"{what} must be above 0 s and at most 366 days, not {seconds:g} s")

    @property
    def reserve_j(self) -> float:
        """Joules that no training may touch."""
        return self.reserve_share * self.capacity_j

    def kept_share(self, seconds: float) -> float:
        """The share of its energy that is left after some seconds of self-discharge."""
        return float((1 - self.self_discharge) ** (seconds / _DAY_S))

    def estimate(
        self, charge: Charge | None, now: datetime, idle_w: float, drawn_j: float, harvest: Harvest | None = None
    ) -> Estimate:
        """The energy that it holds now.

        Between readings, it feeds its idle devices and is charged by its harvest. From `max_age_s` on, no harvest
        counts, and the energy shrinks evenly to nothing within `decay_s`.

        Args:
            charge: the newest reading; None without any.
            now: the time, with a UTC offset.
            idle_w: watts of all its devices while they idle.
            drawn_j: joules above idle that the reading does not contain yet, and those that are set aside.
            harvest: what charges it; None for that of the battery.
        """
        if charge is None:
            return Estimate(0.0, "its charge is unknown, so it counts as empty")
        age_s = (now - charge.measured_at).total_seconds()
        if age_s < -self.max_age_s:
            return Estimate(0.0, "its charge was read in the future, so it counts as empty: was the clock set back?")
        age_s = max(0.0, age_s)
        overdue_s = age_s - self.max_age_s
        if overdue_s >= self.decay_s:
            return Estimate(0.0, "its newest reading is too old, so it counts as empty")
        source, passed_s = harvest or self.harvest, 0.0
        energy_j = charge.share * self.capacity_j
        while passed_s < age_s:
            seconds, at = min(STEP_S, age_s - passed_s), charge.measured_at + timedelta(seconds=passed_s)
            is_fresh = passed_s + seconds <= self.max_age_s
            watts = source.least_w(at, seconds, 1)[0] if is_fresh else 0.0
            energy_j = energy_j * self.kept_share(seconds) + (watts - idle_w) * seconds
            energy_j = min(max(energy_j, 0.0), self.capacity_j)
            passed_s += seconds
        energy_j = max(0.0, energy_j - drawn_j)
        if overdue_s <= 0:
            return Estimate(energy_j)
        return Estimate(
            energy_j * (1 - overdue_s / self.decay_s),
            "its charge was not read in time, so it counts as emptier by the hour",
        )
