"""The workload of a training, as far as the device has to know it."""

from __future__ import annotations

from typing import Protocol

from edge_agent.profiling.productive_profiler import ProductiveProfiler
from wattfleet.modes import Workload


class TrainedWorkload(Protocol):
    """The workload of a training, as far as the device has to know it."""

    @property
    def paced(self) -> Workload | None:
        """The workload that a virtual board is to pace; None for its own."""
        ...

    @property
    def minibatches_per_epoch(self) -> int:
        """Minibatches of one pass over the device's data."""
        ...

    @property
    def is_length_known(self) -> bool:
        """Whether that number is the device's own, and not assumed."""
        ...

    @property
    def first_gcycles(self) -> float:
        """CPU cycles of a training's first minibatch, in units of 1e9; 0 if unknown."""
        ...

    def productive(self, power_limit_w: float, minibatches: float) -> ProductiveProfiler:
        """The profiler for a training with so many watts and minibatches; infinitely many if they are unknown."""
        ...

    def training_was_too_short(self, minibatches: float) -> None:
        """Note that a training of so many minibatches has ended before a mode was measured."""
        ...
