"""Time that passes only when somebody says so."""

from __future__ import annotations


class VirtualClock:
    """A clock for soft devices: sleeping costs nothing and always takes exactly as long as asked."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """Seconds since the clock was made."""
        return self._now_s

    def sleep_s(self, seconds: float) -> None:
        """Move on by `seconds`, which is not negative."""
        if not seconds >= 0:
            raise ValueError(f"cannot sleep for {seconds} s")
        self._now_s += seconds
