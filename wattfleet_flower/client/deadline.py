"""A training that ends by its deadline: what was done until then is kept, and counted."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from wattfleet_io.gpu import wait_for_gpu

Batch = TypeVar("Batch")

# The next minibatch is expected to take the median of these last ones: one that stalled does not end a training.
_REMEMBERED = 31
# A GPU works behind what the app has asked for: towards the end it is waited for, so that what is counted is done.
_WAITED_FOR_LAST_S = 5.0


def length_of(loader: Iterable[object]) -> int | None:
    """How many minibatches a loader has; None where it does not say."""
    try:
        return len(loader)  # type: ignore[arg-type]  # asked for is whether it has a length
    except TypeError:
        return None


class Deadline:
    """One training's deadline, and how much of its work was done by then.

    Attributes:
        used: whether any loader was bounded by it.
        cut: whether it ended the training early.
        app_weighs: the app says that its weight counts only what was done.
    """

    def __init__(self, epochs: float, deadline_s: float | None, now_s: Callable[[], float] = time.monotonic) -> None:
        """The training begins.

        Args:
            epochs: local epochs that are assigned.
            deadline_s: seconds from now at which it is to have ended; None for never.
            now_s: the time.
        """
        self._epochs = epochs
        self._now_s = now_s
        self._ends_s = float("inf") if deadline_s is None else now_s() + deadline_s
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._done = 0
        self._epoch_length: int | None = None
        self.used = self.cut = self.app_weighs = False

    def bounded(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The minibatches of `loader` until another one would end after the deadline; the first of all is always given.

        Once the deadline has ended the training, no loader gives any more.
        """
        self.used = True
        self._epoch_length = length_of(loader) or self._epoch_length
        batches = iter(loader)
        given = 0
        try:
            while True:
                asked_s = self._now_s()
                if self._is_over(asked_s):
                    self.cut |= given != self._epoch_length
                    return
                try:
                    batch = next(batches)
                except StopIteration:
                    # Without a length of its own, the loader has had one by its end.
                    self._epoch_length = given or self._epoch_length
                    return
                yield batch
                given += 1
                self._done += 1
                if self._ends_s - self._now_s() < _WAITED_FOR_LAST_S:
                    wait_for_gpu()
                self._took_s.append(self._now_s() - asked_s)
        finally:
            close = getattr(batches, "close", None)
            if close is not None:  # a loader that measures puts the training's own mode back
                close()

    def stop(self) -> None:
        """The training is to end with the minibatch in hand, whatever the time."""
        self._ends_s = -float("inf")

    @property
    def epochs_done(self) -> float | None:
        """Local epochs that were trained; 0 where the training was cut and nobody knows how long an epoch is.

        None where it was not cut: as many as were assigned.
        """
        if not self.cut:
            return None
        return min(self._epochs, self._done / self._epoch_length) if self._epoch_length else 0.0

    @property
    def share(self) -> float | None:
        """How much of the assigned work was done, 0 to 1; None where nobody knows."""
        epochs_done = self.epochs_done
        if epochs_done is None:
            return 1.0
        return epochs_done / self._epochs if epochs_done else None

    def _is_over(self, now_s: float) -> bool:
        if self.cut or not self._done:
            return self.cut
        expected_s = statistics.median(self._took_s) if self._took_s else 0.0
        return now_s + expected_s > self._ends_s
