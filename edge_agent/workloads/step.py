"""One minibatch of a profiled workload."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Where the time of one minibatch went.

    Attributes:
        fetch_stall_ms: how long training waited for its data, ms.
        compute_ms: how long it computed once the data was there, ms.
    """

    fetch_stall_ms: float
    compute_ms: float


Step = Callable[[], StepTimes | None]
"""Trains one minibatch and returns its times when it is done; None if it does not measure them."""

OpenSteps = Callable[[], AbstractContextManager[Step]]
"""Starts a training; the end of the block releases its resources."""
