"""Makes sure that only one power-aware strategy at a time runs in each Flower run of this process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from wattfleet_flower.server.errors import TwoStrategiesError


class ActiveRuns:
    """The runs in which a power-aware strategy is running."""

    def __init__(self) -> None:
        """Start with no run."""
        self._lock = threading.Lock()
        self._active: set[str] = set()
        self._strategies: Counter[str] = Counter()

    @contextmanager
    def enter(self, run_id: str) -> Iterator[str]:
        """Mark a run as active within this context, and yield the run id to report to the coordinator.

        Raises:
            TwoStrategiesError: another strategy is running in this run.
        """
        with self._lock:
            if run_id in self._active:
                raise TwoStrategiesError(
                    f"two power-aware strategies are running in run {run_id}: each would plan with all of the site's"
                    " watts. Start the second one after the first has ended"
                )
            self._active.add(run_id)
            self._strategies[run_id] += 1
            # The second strategy starts at round 1 again, which the coordinator has planned already.
            name = run_id if self._strategies[run_id] == 1 else f"{run_id}-{self._strategies[run_id]}"
        try:
            yield name
        finally:
            with self._lock:
                self._active.discard(run_id)


ACTIVE_RUNS = ActiveRuns()
