"""The machine's clock."""

from __future__ import annotations

import time


class SystemClock:
    """Monotonic seconds, unaffected by changes of the date (a `Clock`)."""

    def now_s(self) -> float:
        """Seconds since boot."""
        return time.monotonic()

    def sleep_s(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)
