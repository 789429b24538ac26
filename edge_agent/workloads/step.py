"""One minibatch, as a profile sees it."""

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
"""Trains one minibatch, returns when it is done; None where it does not tell the times apart."""

OpenSteps = Callable[[], AbstractContextManager[Step]]
"""Begins a training whose minibatches are measured; at the end of the block, what it holds is given back."""
