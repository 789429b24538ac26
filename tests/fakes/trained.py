"""The workload that a training trains, in tests without a learner."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wattfleet.modes import PowerMode, Workload


def _nothing(power_limit_w: float) -> Any:
    return None


@dataclass
class Trained:
    """A workload with this many minibatches in an epoch."""

    minibatches_per_epoch: int = 500
    profiler: Callable[[float], Any] = _nothing
    first_gcycles: float = 0.0
    paced: Workload | None = None
    is_length_known: bool = True
    too_short: float = 0.0
    minibatch_s: float = 0.0
    profiled_modes: int = 5
    spare_s: Callable[[], float] = lambda: math.inf

    def predicted_minibatch_s(self, mode: PowerMode) -> float:
        return self.minibatch_s

    def productive(
        self, power_limit_w: float, minibatches: float, spare_s: Callable[[], float], own_minibatch_s: float
    ) -> Any:
        self.spare_s = spare_s
        return self.profiler(power_limit_w)

    def training_was_too_short(self, minibatches: float) -> None:
        self.too_short = minibatches
