"""The profiling methods, and how often a workload changes: names for command lines and journals."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class ProfilingMethod(str, Enum):
    """A way to select the modes to measure, and to fit the predictor."""

    TRANSFER = "transfer"
    SCRATCH = "scratch"
    BINARY_SEARCH = "binary-search"
    BRUTE_FORCE = "brute-force"

    def __str__(self) -> str:
        return self.value


class WorkloadChanges(str, Enum):
    """How often a device's workload changes; each new workload has to be measured."""

    NEVER = "never"
    RARELY = "rarely"
    OFTEN = "often"

    def __str__(self) -> str:
        return self.value

    @property
    def workloads(self) -> int:
        """The assumed number of workloads over all hours of training."""
        return _WORKLOADS[self]


_WORKLOADS: Mapping[WorkloadChanges, int] = {
    WorkloadChanges.NEVER: 1,
    WorkloadChanges.RARELY: 3,
    WorkloadChanges.OFTEN: 20,
}
