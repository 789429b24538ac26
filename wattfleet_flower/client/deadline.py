"""Stops a training at its deadline and measures how much of its work was done."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from wattfleet_io.gpu import wait_for_gpu
from wattfleet_io.wrapped_loader import length_of

Batch = TypeVar("Batch")

# The next minibatch is predicted to take the median time of the last 31, so that one stall does not end a training.
_WINDOW = 31
# A GPU works asynchronously. Near the deadline each minibatch is synchronized, so that only finished work counts.
_SYNCHRONIZE_LAST_S = 5.0


class Deadline:
    """One training's deadline, and how much of its work was done before it.

    Attributes:
        used: whether it limited any loader.
        cut: whether it ended the training early.
        app_weighs: whether the app's own weight counts only what was done.
    """

    def __init__(self, epochs: float, deadline_s: float | None, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start the training's clock.

        Args:
            epochs: local epochs assigned.
            deadline_s: seconds from now by which the training has to end; None for no deadline.
            now_s: returns the current time.
        """
        self._epochs = epochs
        self._now_s = now_s
        self._ends_s = float("inf") if deadline_s is None else now_s() + deadline_s
        self._durations_s: deque[float] = deque(maxlen=_WINDOW)
        self._done = 0
        self._epoch_length: int | None = None
        self.used = self.cut = self.app_weighs = False

    def bounded(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield minibatches of `loader` until the next one would end after the deadline.

        The training's first minibatch is always yielded. Once the deadline has ended the training, nothing is yielded.
        """
        self.used = True
        self._epoch_length = length_of(loader) or self._epoch_length
        batches = iter(loader)
        yielded = 0
        try:
            while True:
                started_s = self._now_s()
                if self._is_over(started_s):
                    self.cut |= yielded != self._epoch_length
                    return
                try:
                    batch = next(batches)
                except StopIteration:
                    # A loader without a length has shown it by its end.
                    self._epoch_length = yielded or self._epoch_length
                    return
                yield batch
                yielded += 1
                self._done += 1
                if self._ends_s - self._now_s() < _SYNCHRONIZE_LAST_S:
                    wait_for_gpu()
                self._durations_s.append(self._now_s() - started_s)
        finally:
            close = getattr(batches, "close", None)
            if close is not None:  # a measuring loader re-applies the assigned mode
                close()

    def stop(self) -> None:
        """End the training after the current minibatch, whatever the time."""
        self._ends_s = -float("inf")

    @property
    def epochs_done(self) -> float | None:
        """Local epochs trained: 0 if the training was cut and an epoch's length is unknown.

        None if the training was not cut, so that it did every epoch assigned.
        """
        if not self.cut:
            return None
        return min(self._epochs, self._done / self._epoch_length) if self._epoch_length else 0.0

    @property
    def share(self) -> float | None:
        """The share of the assigned work that was done, 0 to 1; None if unknown."""
        epochs_done = self.epochs_done
        if epochs_done is None:
            return 1.0
        return epochs_done / self._epochs if epochs_done else None

    def _is_over(self, now_s: float) -> bool:
        if self.cut or not self._done:
            return self.cut
        expected_s = statistics.median(self._durations_s) if self._durations_s else 0.0
        return now_s + expected_s > self._ends_s
