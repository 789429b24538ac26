"""Budgets: how many watts a supply may deliver at a given time, and why. Callers pass times with a UTC offset."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from wattfleet.errors import InvalidInputError


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
