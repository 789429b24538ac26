"""Pauses between attempts to reach the coordinator."""

from __future__ import annotations

import asyncio
import random

LONGEST_S = 30.0
FIRST_S = 0.2


class Backoff:
    """Pauses that double, at random up to their whole length, so that a fleet does not come back all at once."""

    def __init__(self) -> None:
        self._up_to_s = FIRST_S

    def reset(self) -> None:
        """An attempt went well."""
        self._up_to_s = FIRST_S

    async def pause(self, longest_s: float = LONGEST_S, spread_s: float = 0.0) -> None:
        """Wait before the next attempt.

        Args:
            longest_s: beyond this the pauses do not grow.
            spread_s: spread the attempts over so many seconds at least.
        """
        await asyncio.sleep(random.uniform(0, max(self._up_to_s, spread_s)))
        self._up_to_s = min(longest_s, 2 * self._up_to_s)
