"""The information on a training's workload that the device needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from edge_agent.profiling.productive_profiler import ProductiveProfiler
from wattfleet.modes import PowerMode, Workload


class TrainedWorkload(Protocol):
    """The information on a training's workload that the device needs."""

    @property
    def paced(self) -> Workload | None:
        """The workload whose times a virtual board simulates; None for its built-in workload."""
        ...

    @property
    def minibatches_per_epoch(self) -> int:
        """Minibatches of one pass over the device's data."""
        ...

    @property
    def is_length_known(self) -> bool:
        """Whether that number is the device's own rather than assumed."""
        ...

    @property
    def profiled_modes(self) -> int:
        """Number of modes measured so far."""
        ...

    @property
    def first_gcycles(self) -> float:
        """CPU cycles of a training's first minibatch, in units of 1e9; 0 if unknown."""
        ...

    def predicted_minibatch_s(self, mode: PowerMode) -> float:
        """Return the predicted seconds of a minibatch in a mode."""
        ...

    def productive(
        self, power_limit_w: float, minibatches: float, spare_s: Callable[[], float], own_minibatch_s: float
    ) -> ProductiveProfiler:
        """Return the profiler for a training.

        Args:
            power_limit_w: watts reserved for the device.
            minibatches: number of minibatches of the training; infinite if unknown.
            spare_s: returns the seconds that are left for measurements now, beyond the app's own work.
            own_minibatch_s: seconds that a minibatch takes without measurements; 0 if nobody waits for the app's work.
        """
        ...

    def training_was_too_short(self, minibatches: float) -> None:
        """Note that a training with this number of minibatches ended before a mode was measured."""
        ...
