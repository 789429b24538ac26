"""The machine's own time."""

from __future__ import annotations

import time


class SystemClock:
    """Seconds that no change of the date moves (a `Clock`)."""

    def now_s(self) -> float:
        """Seconds since the machine started."""
        return time.monotonic()

    def sleep_s(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)
