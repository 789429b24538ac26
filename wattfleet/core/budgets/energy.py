"""Energy budgets: joules as text, the account of what is spent and set aside of a budget, and budgets by the day."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from wattfleet.core.errors import EnergySpentError, InvalidInputError

# --- Joules as text ---------------------------------------------------------------------------------------------------

_UNITS_J = {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "Wh": 3_600.0, "kWh": 3_600_000.0}
_TEXT = re.compile(rf"\s*(\S+?)\s*({'|'.join(_UNITS_J)})\s*")
_MAX_SHOWN = 80
"""Characters of a text in an error."""


def joules_of(what: str, energy: str | float) -> float:
    """The joules of a text such as `2 kWh`, `500Wh` or `90 kJ`; a number counts in joules.

    Args:
        what: what has this energy, for the error's text.
        energy: the text or the number.

    Raises:
        InvalidInputError: the text has another form or unit, or the joules are not finite and above 0.
    """
    if isinstance(energy, str):
        found = _TEXT.fullmatch(energy)
        try:
            if found is None:
                raise ValueError
            joules = float(found[1]) * _UNITS_J[found[2]]
        except ValueError:
            raise InvalidInputError(
                f"{what}: {energy[:_MAX_SHOWN]!r} is not an energy: write a number and one of {', '.join(_UNITS_J)},"
                " such as 2 kWh"
            ) from None
    else:
        joules = float(energy)
    require_joules(what, joules)
    return joules


def require_joules(what: str, joules: float) -> None:
    """Check joules that serve as a budget.

    Raises:
        InvalidInputError: they are not finite and above 0; the text begins with `what`.
    """
    if not (math.isfinite(joules) and joules > 0):
        raise InvalidInputError(f"{what} must be finite and above 0 J, not {joules:g}")


# --- Account ----------------------------------------------------------------------------------------------------------

_ROUNDING = 1e-9
"""Relative tolerance for sums of joules, which are not exact in binary."""


@dataclass(frozen=True)
class EnergyAccount:
    """What is left of an energy budget.

    Before a training may begin, the most joules that it can draw are set aside. Its report replaces them by what it has
    drawn, however late it comes. A training that never reports keeps its joules, so no loss creates energy. No time
    appears here, so no clock does either.

    Attributes:
        budget_j: joules of the budget.
        spent_j: joules that trainings have reported.
        set_aside_j: joules that are set aside for trainings without a report.

    Raises:
        InvalidInputError: the budget is not finite and above 0, or the others are not finite and 0 or more.
    """

    budget_j: float
    spent_j: float = 0.0
    set_aside_j: float = 0.0

    def __post_init__(self) -> None:
        require_joules("an energy budget", self.budget_j)
        for joules in (self.spent_j, self.set_aside_j):
            if not (math.isfinite(joules) and joules >= -_ROUNDING * self.budget_j):
                raise InvalidInputError(f"joules must be finite and 0 or more, not {joules:g}")

    @property
    def left_j(self) -> float:
        """Joules that may still be set aside; 0 if more was spent than the budget."""
        return max(0.0, self.budget_j - self.spent_j - self.set_aside_j)

    def has(self, joules: float) -> bool:
        """Whether so many joules may still be set aside."""
        return joules <= self.left_j + _ROUNDING * self.budget_j

    def set_aside(self, joules: float) -> EnergyAccount:
        """The account after joules were set aside for trainings.

        Raises:
            EnergySpentError: so many are not left.
        """
        if not self.has(joules):
            raise EnergySpentError(
                f"{joules:.0f} J are wanted, and {self.left_j:.0f} J are left: raise energy_budget to at least"
                f" {math.ceil(self.spent_j + self.set_aside_j + joules)} J"
            )
        return replace(self, set_aside_j=self.set_aside_j + joules)

    def reported(self, set_aside_j: float, spent_j: float) -> EnergyAccount:
        """The account after a training has reported what it has drawn.

        Args:
            set_aside_j: what was set aside for it.
            spent_j: what it has drawn, possibly more than that.
        """
        return replace(
            self, set_aside_j=max(0.0, self.set_aside_j - set_aside_j), spent_j=self.spent_j + max(0.0, spent_j)
        )


# --- Budgets of a period ----------------------------------------------------------------------------------------------


class Period(str, Enum):
    """The calendar's unit for which a supply has an energy budget."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"


@dataclass(frozen=True)
class PeriodBudget:
    """Joules above idle that all trainings behind a supply may draw in each day, week or month.

    Attributes:
        budget_j: joules of each period.
        per: the period. A week begins on Monday.
        timezone: IANA name of the time zone by whose wall clock periods begin at midnight.

    Raises:
        InvalidInputError: the joules are not finite and above 0, or the time zone is unknown.
    """

    budget_j: float
    per: Period
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        require_joules("an energy budget", self.budget_j)
        zone_named(self.timezone)

    def begin(self, now: datetime) -> datetime:
        """The beginning of the period that contains a time with a UTC offset."""
        local = now.astimezone(zone_named(self.timezone))
        midnight = local.replace(hour=0, minute=0, second=0, microsecond=0, fold=0)  # the first, if clocks repeat it
        if self.per is Period.WEEK:
            return midnight - timedelta(days=midnight.weekday())
        return midnight.replace(day=1) if self.per is Period.MONTH else midnight

    def end(self, now: datetime) -> datetime:
        """The end of the period that contains a time with a UTC offset, and the beginning of the next."""
        # Midnights by the wall clock, since a day has 23 or 25 hours when clocks change.
        days = {Period.DAY: 1, Period.WEEK: 7, Period.MONTH: 31}[self.per]
        following = self.begin(now) + timedelta(days=days)
        return following.replace(day=1) if self.per is Period.MONTH else following


def zone_named(name: str) -> ZoneInfo:
    """The time zone with an IANA name.

    Raises:
        InvalidInputError: there is none.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidInputError(f"unknown time zone {name[:_MAX_SHOWN]!r}: write one such as Europe/Berlin") from None
