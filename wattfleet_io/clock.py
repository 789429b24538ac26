"""Clocks that are passed in, so that tests and simulations run on virtual time."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Protocol


class Clock(Protocol):
    """A clock that never runs backwards, and a way to wait by it."""

    def now_s(self) -> float:
        """Seconds since a fixed moment."""
        ...

    def sleep_s(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's monotonic clock, which changes of the date do not affect."""

    def now_s(self) -> float:
        """Seconds since the machine started."""
        return time.monotonic()

    def sleep_s(self, seconds: float) -> None:
        """Block for so many seconds."""
        time.sleep(seconds)


def utc_now() -> datetime:
    """The date and time, for schedules and records: no duration is timed by it, since it can be set at any moment."""
    return datetime.now(timezone.utc)


def unix_now_s() -> float:
    """The date and time in seconds since 1970, as `utc_now`."""
    return utc_now().timestamp()


def boot_time_s() -> float:
    """Seconds since the machine started, suspended time included, which `time.monotonic` leaves out on Linux."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class VirtualClock:
    """A clock that only sleeping advances; sleeping returns at once and takes exactly as long as asked."""

    def __init__(self, start_s: float = 0.0) -> None:
        """Start the clock.

        Args:
            start_s: the time that it shows first.
        """
        self._now_s = start_s

    def now_s(self) -> float:
        """Seconds since the clock's zero."""
        return self._now_s

    def sleep_s(self, seconds: float) -> None:
        """Advance the clock.

        Raises:
            ValueError: `seconds` is negative or not a number.
        """
        if not seconds >= 0:
            raise ValueError(f"cannot sleep for {seconds} s")
        self._now_s += seconds
