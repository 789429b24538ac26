"""The fronts that a device has to report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.runtime.readiness import Readiness
from tests.fakes.fronts import front
from wattfleet.choosing import Front
from wattfleet.errors import ImplausibleError
from wattfleet.modes import PowerMode, Workload


@dataclass
class Learner:
    known: KnownWorkload
    is_plausible: bool = True
    profiled_modes: int = 0

    @property
    def front(self) -> Front:
        if not self.is_plausible:
            raise ImplausibleError("no mode has a plausible epoch")
        return front((1.0, 20.0))


@dataclass
class Workloads:
    opened: Sequence[Learner]
    latest: Learner | None = None

    def is_default(self, learner: Learner) -> bool:
        return False


def test_a_workload_without_a_plausible_front_keeps_no_other_from_being_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    absurd = Learner(KnownWorkload(Workload("absurd"), 2**31 - 1), is_plausible=False)
    other = Learner(KnownWorkload(Workload("other"), 100))
    workloads: Any = Workloads([absurd, other], latest=absurd)
    ready = Readiness(workloads, 5.0, PowerMode(1, 1_000, 1_000_000, 1_000_000), "a" * 64, True, 0)
    assert [report.workload.name for report in ready.due_fronts()] == ["other"]
    assert "the front of the workload 'absurd' cannot be reported: no mode has a plausible epoch" in caplog.text
    absurd.is_plausible = True
    assert [report.workload.name for report in ready.due_fronts()] == ["absurd"], "the other has not changed"
