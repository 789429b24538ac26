"""A rate limit that allows short bursts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Allows `burst` events at once, and `per_s` events each second in the long run.

    Attributes:
        per_s: allowed events per second.
        burst: maximum of events at once.
        left: events that are allowed now; negative if events were taken in advance.
        since_s: time of that count, seconds of the caller's clock.
    """

    per_s: float
    burst: float
    left: float
    since_s: float

    @classmethod
    def full(cls, per_s: float, burst: float, now_s: float) -> TokenBucket:
        """Return a full bucket."""
        return cls(per_s, burst, burst, now_s)

    def is_empty(self, now_s: float) -> bool:
        """Return whether no event is allowed now."""
        self._refill(now_s)
        return self.left < 1

    def take(self, now_s: float) -> bool:
        """Take an event if it is allowed now, and return whether it was."""
        if self.is_empty(now_s):
            return False
        self.left -= 1
        return True

    def take_later(self, now_s: float) -> float:
        """Take an event in any case, and return the seconds until it is allowed."""
        self._refill(now_s)
        self.left -= 1
        return max(0.0, -self.left / self.per_s)

    def _refill(self, now_s: float) -> None:
        self.left = min(self.burst, self.left + self.per_s * (now_s - self.since_s))
        self.since_s = now_s
