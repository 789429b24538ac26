"""Budgets: how many watts a supply may give at a moment, and why. Times come from the caller, always with an offset."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from wattfleet.errors import InvalidInputError


@dataclass(frozen=True)
class InForce:
    """The watts that a supply may give now.

    Attributes:
        watts: finite and not negative; 0 where a source measured that there are none.
        source: kind of budget they come from: constant, schedule, csv or query; operator for an override.
        fallback: they are the stated fallback, because the source gives none.
        reason: for people, why it is these; the same text as long as the reason is the same.
    """

    watts: float
    source: str
    fallback: bool
    reason: str


class Budget(Protocol):
    """Watts that follow from the time alone."""

    def in_force(self, now: datetime) -> InForce:
        """What is in force at a moment, which has an offset from UTC.

        Raises:
            InvalidInputError: it has none.
        """
        ...


@dataclass(frozen=True)
class ConstantBudget:
    """The same watts at all times.

    Attributes:
        watts: finite, above zero.

    Raises:
        InvalidInputError: they are not.
    """

    watts: float

    def __post_init__(self) -> None:
        require_watts("a budget", self.watts)

    def in_force(self, now: datetime) -> InForce:
        """The watts, whatever the time."""
        return InForce(self.watts, "constant", False, "always the same")


@dataclass(frozen=True)
class Override:
    """Watts that the operator sets in place of what a supply's budget says.

    Attributes:
        watts: finite, above zero.
        until: when they are over, with an offset; None where they last until they are cleared.

    Raises:
        InvalidInputError: the watts are not, or the time has no offset.
    """

    watts: float
    until: datetime | None = None

    def __post_init__(self) -> None:
        require_watts("a budget", self.watts)
        if self.until is not None:
            require_offset(self.until)

    def in_force(self, now: datetime) -> InForce | None:
        """The watts; None once they are over."""
        if self.until is not None and now >= self.until:
            return None
        return InForce(self.watts, "operator", False, "set by the operator")


@dataclass(frozen=True)
class Reading:
    """Watts that a source measured.

    Attributes:
        watts: what it measured.
        measured_at: with an offset; the measurement is from then or later.

    Raises:
        InvalidInputError: the watts are not finite or negative, or the time has no offset.
    """

    watts: float
    measured_at: datetime

    def __post_init__(self) -> None:
        # Zero is a measurement, unlike in a stated budget: the sun has set.
        if not (math.isfinite(self.watts) and self.watts >= 0):
            raise InvalidInputError(f"measured watts must be finite and not negative, not {self.watts:g}")
        require_offset(self.measured_at)


@dataclass(frozen=True)
class ReadingRule:
    """How long a source's newest reading is in force, and what is when there is none.

    Attributes:
        max_age_s: seconds since it was measured after which a reading is stale.
        fallback_w: watts in force without a reading that is fresh.

    Raises:
        InvalidInputError: one of them is not finite and above zero.
    """

    max_age_s: float
    fallback_w: float

    def __post_init__(self) -> None:
        require_watts("a fallback", self.fallback_w)
        if not (math.isfinite(self.max_age_s) and self.max_age_s > 0):
            raise InvalidInputError(f"the age of a reading must be finite and above zero s, not {self.max_age_s:g}")

    def in_force(self, now: datetime, newest: Reading | None, trouble: str = "") -> InForce:
        """The newest reading while it is fresh, else the fallback.

        Args:
            now: with an offset.
            newest: the source's newest reading; None if it never gave one.
            trouble: why the source gives none now, in words; empty if it does.

        Raises:
            InvalidInputError: the time has no offset.
        """
        require_offset(now)
        # A reading from the future is one from before the clock was set back: it must not last until then.
        if newest is not None and abs((now - newest.measured_at).total_seconds()) <= self.max_age_s:
            return InForce(newest.watts, "query", False, "measured")
        reason = "nothing was measured yet" if newest is None else f"nothing was measured for {self.max_age_s:g} s"
        return InForce(self.fallback_w, "query", True, f"{reason}: {trouble}" if trouble else reason)


def require_watts(what: str, watts: float) -> None:
    """Make sure that stated watts can be a budget.

    Raises:
        InvalidInputError: they are not finite and above zero; the text begins with `what`.
    """
    if not (math.isfinite(watts) and watts > 0):
        raise InvalidInputError(f"{what} must be finite and above zero watts, not {watts:g}")


def require_offset(time: datetime) -> None:
    """Make sure that a time says which moment it is.

    Raises:
        InvalidInputError: it has no offset from UTC.
    """
    if time.utcoffset() is None:
        raise InvalidInputError(f"{time.isoformat()} has no offset from UTC: write it as 2026-06-01T06:00+02:00")
