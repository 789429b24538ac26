"""Time that passes only on request."""

from __future__ import annotations


class VirtualClock:
    """The clock of a virtual board: sleeping returns at once and advances it by exactly the time asked for."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """Seconds since the clock was created."""
        return self._now_s

    def sleep_s(self, seconds: float) -> None:
        """Advance by `seconds`, 0 or more."""
        if not seconds >= 0:
            raise ValueError(f"cannot sleep for {seconds} s")
        self._now_s += seconds
