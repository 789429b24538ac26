"""The fronts that a device still has to report, and what its reports state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.runtime.readiness import Readiness
from edge_agent.serving.duty_planning import NoFrontError
from tests.fakes.boards import MODE, PARKED
from tests.fakes.fleets import front
from wattfleet.core.choosing import Front, predicted_front
from wattfleet.core.errors import ImplausibleError
from wattfleet.core.modes import BatchOptions, Measurement, PowerMode, Workload, WorkloadFacts, modes_to_array
from wattfleet.core.prediction import Prediction
from wattfleet_proto.convert import measured_from_messages, workload_from_message

# --- Due fronts -------------------------------------------------------------------------------------------------------
# The fronts that a device still has to report.


@dataclass
class Learner:
    known: KnownWorkload
    is_plausible: bool = True
    no_front: str = ""
    profiled_modes: int = 0
    watts: float = 20.0
    measurements: Sequence[Measurement] = ()
    fits: int = 0

    def refit_if_outdated(self) -> None:
        self.watts = 20.0 * (self.known.workload.facts.batch or 16) / 16

    def learn_from_others(self) -> None:
        self.fits += 1

    def predicted_front(self) -> tuple[Front, Workload]:
        if self.no_front:
            raise NoFrontError(self.no_front)
        if not self.is_plausible:
            raise ImplausibleError("no mode has a plausible epoch")
        return front((1.0, self.watts)), self.known.workload


@dataclass
class Workloads:
    opened: Sequence[Learner]
    latest: Learner | None = None

    def announced(self, workload: Workload, units: object) -> Learner:
        [found] = [each for each in self.opened if each.known.workload.name == workload.name]
        found.known = found.known.completed(workload.facts)
        return found


def ready_with(workloads: Any, share_modes: int = 0) -> Readiness:
    return Readiness(workloads, 5.0, PowerMode(1, 1_000, 1_000_000, 1_000_000), "a" * 64, 0, share_modes)


def test_a_workload_without_a_plausible_front_keeps_no_other_from_being_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    absurd = Learner(KnownWorkload(Workload("absurd"), 2**31 - 1), is_plausible=False)
    other = Learner(KnownWorkload(Workload("other"), 100))
    workloads = Workloads([absurd, other], latest=absurd)
    ready = ready_with(workloads)
    assert [report.workload.name for report in ready.due_fronts()] == ["other"]
    assert "the front of the workload 'absurd' cannot be reported: no mode has a plausible epoch" in caplog.text
    absurd.is_plausible = True
    assert [report.workload.name for report in ready.due_fronts()] == ["absurd"], "the other has not changed"


def test_the_front_of_an_announced_workload_is_reported_even_if_it_is_unchanged() -> None:
    first, second = (Learner(KnownWorkload(Workload(name), 100)) for name in ("first", "second"))
    ready = ready_with(Workloads([first, second]))
    assert [report.workload.name for report in ready.due_fronts()] == ["first", "second"]
    assert ready.due_fronts() == []
    ready.announced(Workload("second"))  # the coordinator may have dropped this workload's front
    assert [report.workload.name for report in ready.due_fronts()] == ["second"]
    assert ready.due_fronts() == []


def test_a_duty_without_a_front_is_reported_with_its_reason_until_there_is_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    learner, other = (Learner(KnownWorkload(Workload(name), 100)) for name in ("digits", "other"))
    ready = ready_with(Workloads([learner, other], latest=other))
    ready.due_fronts()
    learner.no_front = "the duty takes the whole board"
    report, _ = ready.due_fronts()
    assert (report.no_front, report.workload.name, list(report.front.points)) == (learner.no_front, "digits", [])
    assert [each.workload.name for each in ready.due_fronts()] == ["other"], "it has not changed"
    assert caplog.text.count("trainings of the workload 'digits' are not planned for this device: the duty takes") == 1
    learner.no_front = ""
    assert len(ready.due_fronts()[0].front.points) == 1


def test_the_front_of_a_run_that_states_its_batch_is_predicted_for_it() -> None:
    ready = ready_with(Workloads([Learner(KnownWorkload(Workload("digits"), 100))]))
    ready.announced(Workload("digits", WorkloadFacts(batch=32)))
    [report] = ready.due_fronts()
    assert (report.workload.batch, report.front.points[0].power_w) == (32, 40.0)


@pytest.mark.parametrize(("batch", "minibatches"), [(16, 200), (32, 150), (64, 100)])
def test_the_reported_length_is_that_of_the_largest_batch_a_plan_may_choose(batch: int, minibatches: int) -> None:
    """Any batch size may have been trained last: 200 minibatches of 16 make as much progress as 100 of 64."""
    options = BatchOptions((16, 32, 64), (0.5, 0.75, 1.0))
    known = KnownWorkload(Workload("digits", WorkloadFacts(batch=batch), options), minibatches)
    [report] = ready_with(Workloads([Learner(known)])).due_fronts()
    assert report.minibatches_per_epoch == 100
    assert workload_from_message(report.workload) == known.workload


def test_a_front_comes_with_the_first_measured_modes_for_other_devices() -> None:
    measured = [Measurement(PowerMode(4, 10**6, gpu_mhz * 10**6, 2 * 10**9), 80.0, 9e3, 16) for gpu_mhz in range(1, 4)]
    learner = Learner(KnownWorkload(Workload("digits"), 100), measurements=measured[:1])
    ready = ready_with(Workloads([learner]), share_modes=2)
    [report] = ready.due_fronts()
    assert measured_from_messages(report.measured) == tuple(measured[:1])
    learner.measurements = measured
    [report] = ready.due_fronts()
    assert measured_from_messages(report.measured) == tuple(measured[:2]), "due, though its front is the same"
    assert ready_with(Workloads([learner])).due_fronts()[0].measured == [], "none are asked for"


def test_what_others_have_measured_waits_while_the_device_trains() -> None:
    learner = Learner(KnownWorkload(Workload("digits"), 100))
    ready = ready_with(Workloads([learner]))
    ready.announced(Workload("digits"), (), is_training=True)
    assert learner.fits == 0
    ready.announced(Workload("digits"), ())
    assert learner.fits == 1


# --- Reported fronts --------------------------------------------------------------------------------------------------
# Reports of a device's fronts: how often fronts are predicted, and which idle power is stated.


class CountingLearner:
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
    learner, resting_w = CountingLearner(), 0.0
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
