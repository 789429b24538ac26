"""The time that rounds are timed and waited by; tests bring one of their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What waiting needs."""

    def now_s(self) -> float:
        """Seconds since some moment; they never run backwards."""
        ...

    def sleep_s(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's own."""

    def now_s(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def sleep_s(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
