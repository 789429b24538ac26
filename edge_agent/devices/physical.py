"""The common base of all boards that physically exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from wattfleet.modes import Workload
from wattfleet_io.clock import Clock


class _HasClock(Protocol):
    @property
    def clock(self) -> Clock: ...


class PhysicalBoard:
    """Base of the devices that represent hardware."""

    mode_persists = True

    def built_in_workload(self, workload: Workload | None = None) -> Callable[[], None] | None:
        """Return None, since a program has to train on the board."""
        return None

    def begin_training(self: _HasClock, workload: Workload | None = None) -> PhysicalTraining:
        """Begin an app's training in the mode in force."""
        return PhysicalTraining(self.clock)


class PhysicalTraining:
    """An app's training on hardware, which does the work itself (an `AppTraining`).

    Args:
        clock: the device's clock.
    """

    first_minibatch_observed = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def minibatches_ended(self, seconds: Sequence[float], ended: Callable[[int, float], bool]) -> None:
        """Replay the minibatches of a report up to the first mode change; the later ones ran in the previous mode."""
        ended_s = self._clock.now_s() - sum(seconds)
        for index, took_s in enumerate(seconds):
            ended_s += took_s
            if ended(index, ended_s):
                return

    def learned(self, workload: Workload | None) -> None:
        """Do nothing, since the hardware trains whatever the app does."""

    def finish(self, minibatches: int) -> None:
        """End the training, whose work the hardware has done."""
