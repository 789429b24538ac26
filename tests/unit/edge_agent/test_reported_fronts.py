"""Reports of a device's fronts: how often fronts are predicted, and which idle power is stated."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np

from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.runtime.readiness import Readiness
from tests.fakes.real_time_board import MODE, PARKED
from wattfleet.choosing import predicted_front
from wattfleet.modes import Workload, modes_to_array
from wattfleet.prediction import Prediction


class Learner:
    """The learner of a profiled workload; it counts the predictions of its front."""

    def __init__(self) -> None:
        self.known = KnownWorkload(Workload("digits"), 100)
        self.profiled_modes, self.measurements = 3, ()
        self.predictions = 0

    def predicted_front(self) -> tuple[Any, Workload]:
        self.predictions += 1
        values = Prediction(np.array([20.0]), np.array([9e3]), np.zeros(1), np.zeros(1))
        return predicted_front(modes_to_array([MODE]), values, 100), self.known.workload


def test_several_names_are_predicted_once_and_idle_counts_what_requests_take() -> None:
    learner, resting_w = Learner(), 0.0
    workloads: Any = Mock(opened=[learner], latest=None, is_default=lambda each: False)
    ready = Readiness(workloads, 3.0, PARKED, "digest", True, 0, resting_w=lambda: resting_w)
    ready._announced["digits"] = {"a", "b", "c"}  # noqa: SLF001 - the names of three runs
    assert [(each.workload.name, each.idle_w) for each in ready.due_fronts()] == [("a", 3.0), ("b", 3.0), ("c", 3.0)]
    assert learner.predictions == 1
    resting_w = 7.0
    assert [each.idle_w for each in ready.due_fronts()] == [7.0, 7.0, 7.0]
    resting_w = 2.0
    assert {each.idle_w for each in ready.due_fronts()} == {3.0}, "parked, it draws more than that"
    assert not ready.due_fronts(), "nothing has changed"
