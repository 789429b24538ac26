"""One power-aware strategy at a time in each Flower run of this process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from wattfleet_flower.server.errors import TwoStrategiesError


class Runs:
    """The Flower runs of this process that a power-aware strategy is in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._begun: Counter[str] = Counter()

    @contextmanager
    def begun(self, run_id: str) -> Iterator[str]:
        """One strategy's turn in a run; gives the name that the coordinator knows it by.

        Raises:
            TwoStrategiesError: another one has its turn.
        """
        with self._lock:
            if run_id in self._running:
                raise TwoStrategiesError(
                    f"two power-aware strategies at once in run {run_id}: each would plan with all of the site's"
                    " watts. Start the second when the first has ended"
                )
            self._running.add(run_id)
            self._begun[run_id] += 1
            # The second begins again with round 1, of which the coordinator has a plan already.
            name = run_id if self._begun[run_id] == 1 else f"{run_id}-{self._begun[run_id]}"
        try:
            yield name
        finally:
            with self._lock:
                self._running.discard(run_id)


RUNS = Runs()
