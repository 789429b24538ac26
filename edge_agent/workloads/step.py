"""One minibatch of a profiled workload."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """The parts of one minibatch's time.

    Attributes:
        fetch_stall_ms: time that training waited for its data, ms.
        compute_ms: time that it computed once it had the data, ms.
    """

    fetch_stall_ms: float
    compute_ms: float


Step = Callable[[], StepTimes | None]
"""Trains one minibatch and then returns its times; None if it does not measure them."""

OpenSteps = Callable[[], AbstractContextManager[Step]]
"""Starts a training; leaving the block releases its resources."""
