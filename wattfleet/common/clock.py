"""Clocks that are passed in, so that tests and simulations run on virtual time."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Protocol


class Clock(Protocol):
    """A clock that never runs backwards, with a way to wait."""

    def now_s(self) -> float:
        """Return the seconds since a fixed moment."""
        ...

    def sleep_s(self, seconds: float) -> None:
        """Wait for this time, s."""
        ...


class SystemClock:
    """The machine's monotonic clock, which is not affected by changes of the date."""

    def now_s(self) -> float:
        """Return the seconds since the machine started."""
        return time.monotonic()

    def sleep_s(self, seconds: float) -> None:
        """Block for this time, s."""
        time.sleep(seconds)


def utc_now() -> datetime:
    """Return the date and time, for schedules and records; not for durations, since it can be set at any moment."""
    return datetime.now(timezone.utc)


def unix_now_s() -> float:
    """Return the date and time in seconds since 1970; see `utc_now`."""
    return utc_now().timestamp()


def boot_time_s() -> float:
    """Return the seconds since the machine started, including suspended time, unlike `time.monotonic` on Linux."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class VirtualClock:
    """A clock that is advanced only by sleeping; sleeping returns at once and takes exactly the requested time."""

    def __init__(self, start_s: float = 0.0) -> None:
        """Start the clock.

        Args:
            start_s: the initial time, s.
        """
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the seconds since the clock's zero."""
        return self._now_s

    def sleep_s(self, seconds: float) -> None:
        """Advance the clock.

        Raises:
            ValueError: `seconds` is negative or not a number.
        """
        if not seconds >= 0:
            raise ValueError(f"cannot sleep for {seconds} s")
        self._now_s += seconds
