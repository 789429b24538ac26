"""Exponential backoff with jitter, for attempts to reach the coordinator."""

from __future__ import annotations

import asyncio
import random

MAX_S = 30.0
FIRST_S = 0.2


class Backoff:
    """Pauses of random length below a limit that doubles, so that not all of a fleet reconnects at once."""

    def __init__(self) -> None:
        self._up_to_s = FIRST_S

    def reset(self) -> None:
        """Start again with short pauses, after a success."""
        self._up_to_s = FIRST_S

    async def pause(self, max_s: float = MAX_S, spread_s: float = 0.0) -> None:
        """Wait before the next attempt.

        Args:
            max_s: maximum of the growing limit, s.
            spread_s: spread the attempts over at least this time, s.
        """
        await asyncio.sleep(random.uniform(0, max(self._up_to_s, spread_s)))
        self._up_to_s = min(max_s, 2 * self._up_to_s)
