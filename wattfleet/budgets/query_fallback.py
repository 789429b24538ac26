"""The watts of a budget that a query measures: its last reading, or the fallback when the reading is too old."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timezone

from wattfleet.budgets.budget import InForce, require_offset, require_watts
from wattfleet.errors import InvalidInputError


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
