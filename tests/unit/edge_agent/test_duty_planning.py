"""Fronts beside a duty: only modes that keep it, with the time left for training, or the reason for no front."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_agent.learning.fitting import FittedModes, NoFrontError
from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.serving.duty_figures import DutyNow
from tests.fakes.planned_duty import FAST, HALF, MODES, NONE, SLOW, TRAINING, Planning, duty
from wattfleet.duties import Duty, MeasuredArrivals, ModesWithDuty
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.modes import (
    BatchOptions,
    Measurement,
    Profile,
    Task,
    Workload,
    WorkloadFacts,
)
from wattfleet.prediction import Prediction


@pytest.fixture
def planning(tmp_path: Path) -> Planning:
    """A board with one measured row of inference and a connected inference server."""
    planning = Planning(tmp_path)
    planning.turns.server_connected(1)
    planning.rows.add("camera", Profile.of([Measurement(FAST, 10.0, 20e3, 1)], Task.INFERENCE))
    return planning


def test_without_a_duty_a_front_is_that_of_training_alone(planning: Planning) -> None:
    assert (planning.front().epoch_s.tolist(), planning.fits) == ([2.0, 4.0, 8.0], [])


def test_a_front_has_only_modes_that_keep_the_duty_with_the_time_that_is_left(planning: Planning) -> None:
    """An answer, including one minibatch before it, takes at most 30, 60 or 120 ms by mode, plus at most one cycle."""
    planning.turns.duty = duty(100.0)
    assert planning.modes_of_front() == {HALF, FAST}
    front = planning.front()
    assert (front.epoch_s > [2.0, 4.0]).all(), "inference takes a part of the time"
    assert front.power_w.tolist() == [20.0, 9.0], "the larger watts of inference and training"
    planning.turns.duty = duty(10_000.0)
    assert planning.modes_of_front() == {SLOW, HALF, FAST}
    assert planning.front().epoch_s[0] == pytest.approx(2.0, rel=0.02), "hardly any request, and much time for it"
    planning.turns.duty = None
    assert planning.front().epoch_s.tolist() == [2.0, 4.0, 8.0]
    assert planning.fits == [("camera", (1,), 1)], "predicted once"


def test_a_duty_that_takes_the_whole_board_leaves_no_front_but_a_reason(planning: Planning) -> None:
    planning.turns.duty = duty(25.0)
    with pytest.raises(NoFrontError, match="the duty takes the whole board: 95 % of 1 requests a second within 25 ms"):
        planning.front()
    assert [planning.turns.keeps_duty(mode) for mode in (SLOW, HALF, FAST)] == [False, True, True]


def test_a_training_in_progress_has_no_time_once_the_duty_takes_the_whole_board(planning: Planning) -> None:
    planning.turns.duty = duty(100.0)
    planning.front()
    planning.trains(lambda: (MODES, TRAINING), 20.0)
    assert planning.why_no_training() is None
    planning.turns.duty = duty(25.0)
    assert planning.why_no_training() is None, "not before the front beside the new duty is known"
    with pytest.raises(NoFrontError):
        planning.front()
    assert planning.why_no_training().startswith("the duty takes the whole board")


def test_a_training_that_is_hardly_known_leaves_no_front_but_a_remedy(planning: Planning) -> None:
    """The median of 20 ms per minibatch fits, but the 95 % quantile is 104 ms."""
    planning.turns.duty = duty(100.0)
    unsure = Prediction(TRAINING.minibatch_ms, TRAINING.power_mw, np.ones(3), NONE)
    with pytest.raises(
        NoFrontError, match="there are too few measurements .* `wattfleet agent profile`, set the duty after"
    ):
        planning.beside(MODES, unsure)


@pytest.mark.parametrize(("wanted", "why"), [(duty(9.0), "no mode answers"), (duty(900.0, 500.0), "are more than")])
def test_a_duty_that_no_mode_keeps_leaves_no_front_but_a_reason(planning: Planning, wanted: Duty, why: str) -> None:
    planning.turns.duty = wanted
    with pytest.raises(NoFrontError, match=f"the duty cannot be kept: .*{why}"):
        planning.front()
    assert not any(planning.turns.keeps_duty(mode) for mode in (SLOW, HALF, FAST))


def test_an_unknown_inference_leaves_no_front_until_it_was_seen(tmp_path: Path) -> None:
    planning = Planning(tmp_path)
    planning.turns.duty = duty(100.0)
    with pytest.raises(NoFrontError, match="the inference of 'camera' has not been measured yet: let it answer"):
        planning.front()
    planning.turns.server_connected(1)
    for _ in range(8):
        planning.times.batch_answered(FAST, 1, 10.0, False)
    assert planning.modes_of_front() == {HALF, FAST}


def test_an_inference_that_cannot_be_predicted_leaves_no_front(planning: Planning) -> None:
    def fails(*_: object) -> Mapping[int, Prediction]:
        raise InvalidInputError("out of order")

    planning.turns.duty = duty(100.0)
    for planning.fit, why in ((fails, "out of order"), (None, "has no reference yet")):
        with pytest.raises(NoFrontError, match=f"the inference of 'camera' cannot be predicted: .*{why}"):
            planning.front()


def test_live_times_that_are_longer_take_modes_from_the_front(planning: Planning) -> None:
    planning.turns.duty = duty(100.0)
    assert planning.modes_of_front() == {HALF, FAST}
    for _ in range(8):
        planning.times.batch_answered(FAST, 1, 25.0, False)
    assert planning.modes_of_front() == {FAST}


def test_rows_and_servers_that_change_are_predicted_anew(planning: Planning) -> None:
    planning.turns.duty = duty(1_000.0)
    planning.front()
    planning.turns.server_connected(6)
    planning.rows.add("camera", Profile.of([Measurement(HALF, 20.0, 7e3, 2)], Task.INFERENCE))
    planning.front()
    assert planning.fits == [("camera", (1,), 1), ("camera", (1, 2, 4, 6), 2)]


def test_without_a_server_the_measured_batches_count(tmp_path: Path) -> None:
    planning = Planning(tmp_path)
    planning.rows.add("camera", Profile.of([Measurement(FAST, 40.0, 20e3, 4)], Task.INFERENCE))
    planning.turns.duty = duty(1_000.0)
    planning.front()
    assert planning.fits == [("camera", (1, 2, 4), 1)]


def test_a_mode_that_is_not_predicted_is_judged_by_measured_times(planning: Planning) -> None:
    other = FAST._replace(cores=4)
    planning.turns.in_mode(FAST)
    planning.turns.duty = duty(100.0)
    planning.front()
    assert not planning.turns.keeps_duty(other), "nothing is known of it"
    planning.times.batch_answered(other, 1, 10.0, False)
    assert planning.turns.keeps_duty(other)
    planning.turns.duty = duty(79.0)
    assert not planning.turns.keeps_duty(SLOW) and planning.turns.keeps_duty(FAST), "another duty: measured times"


NOW = DutyNow(duty(100.0), 20.0, 8, 1.0, {FAST: {1: 10.0, 4: 20.0}})


@pytest.mark.parametrize(
    ("later", "differs"),
    [
        (NOW, False),
        (replace(NOW, duty=duty(99.0)), True),
        (replace(NOW, largest_batch=None), True),
        (replace(NOW, arrivals_per_s=22.0), False),  # within three standard deviations, which are 17 %
        (replace(NOW, arrivals_per_s=26.0), True),
        (replace(NOW, arrivals_per_s=15.0), True),
        (replace(NOW, live={FAST: {1: 11.0, 4: 20.0}}), False),
        (replace(NOW, live={FAST: {1: 15.0, 4: 20.0}}), True),
        (replace(NOW, live={FAST: {1: 10.0}}), True),
        (replace(NOW, switch_ms=2.0), False),
    ],
)
def test_fronts_are_due_again_after_more_than_a_chance_change(later: DutyNow, differs: bool) -> None:
    assert later.differs_from(NOW) is differs


def test_a_rate_of_many_requests_counts_from_a_change_of_ten_percent() -> None:
    many = replace(NOW, arrivals_per_s=2_000.0)
    assert not replace(many, arrivals_per_s=2_180.0).differs_from(many)
    assert replace(many, arrivals_per_s=2_220.0).differs_from(many)
    silent = replace(NOW, arrivals_per_s=0.0)
    assert not silent.differs_from(silent) and silent.demand().arrival_per_s == 0.1


def test_a_change_is_told_once(planning: Planning) -> None:
    assert not planning.has_changed()
    planning.turns.duty = duty(100.0)
    assert [planning.has_changed(), planning.has_changed()] == [True, False]
    planning.turns.server_connected(4)
    assert [planning.has_changed(), planning.has_changed()] == [True, False]
    planning.turns.duty = None
    assert [planning.has_changed(), planning.has_changed()] == [True, False]


def test_the_measured_rate_counts_if_it_is_above_the_expected_one(planning: Planning) -> None:
    def rate(expected: Duty) -> float:
        planning.turns.duty = expected
        now = planning.turns.duty_now()
        assert now is not None
        return now.arrivals_per_s

    assert rate(duty(100.0, 5.0)) == 5.0
    planning.turns.batch_answered(1, [10.0], 0)
    planning.now_s = 10.0
    planning.turns.batch_answered(199, [10.0], 0)
    assert rate(duty(100.0, 5.0)) == 20.0
    assert rate(duty(100.0, 50.0)) == 50.0
    assert rate(Duty("camera", MeasuredArrivals(50.0), 100.0)) == 20.0


@pytest.mark.parametrize(("before", "after"), [(10.0, 0.0), (10.0, 0.4), (30.0, 0.5), (0.0, 10.0)])
def test_a_rate_that_nearly_ceases_counts_as_a_change(before: float, after: float) -> None:
    assert replace(NOW, arrivals_per_s=after).differs_from(replace(NOW, arrivals_per_s=before))


@pytest.mark.parametrize(
    ("per_s", "planned"), [(10.49, 11.0), (10.0, 10.0), (0.31, 0.31), (99.2, 100.0), (1234.0, 1300.0)]
)
def test_the_rate_to_plan_with_is_rounded_up(per_s: float, planned: float) -> None:
    assert replace(NOW, arrivals_per_s=per_s).demand().arrival_per_s == pytest.approx(planned)


def test_a_batch_that_does_not_fit_leaves_the_front_of_the_others(planning: Planning) -> None:
    planning.turns.duty = duty(100.0)
    options = BatchOptions((16, 64), (1.0, 1.0))
    known = KnownWorkload(Workload("digits", WorkloadFacts(batch=16), options), 100)
    slower = Prediction(50 * TRAINING.minibatch_ms, TRAINING.power_mw, NONE, NONE)
    fitted = FittedModes(MODES, TRAINING, {16: TRAINING, 64: slower}, known)
    front = fitted.front(known, np.ones(3, dtype=bool), 0.0, planning.beside)[0]
    assert front.batch is not None and set(front.batch.tolist()) == {16}
    with pytest.raises(NoFrontError):
        replace(fitted, by_batch={16: slower, 64: slower}).front(known, np.ones(3, dtype=bool), 0.0, planning.beside)


def test_the_front_stays_while_the_server_restarts(planning: Planning) -> None:
    planning.fit = lambda workload, batches, rows: {
        batch: Prediction(np.full(3, 9.0 + batch), np.full(3, 15e3), NONE, NONE) for batch in batches
    }
    planning.turns.duty = duty(500.0, 120.0)
    server = planning.turns.server_connected(8)
    planning.turns.server_gone(1)
    for _ in range(8):
        planning.times.batch_answered(FAST, 8, 17.0, False)
    before = planning.modes_of_front()
    planning.turns.server_gone(server)
    assert planning.modes_of_front() == before


def test_further_measured_rows_lead_to_another_front(planning: Planning) -> None:
    planning.turns.duty = duty(100.0)
    assert [planning.has_changed(), planning.has_changed()] == [True, False]
    planning.rows.add("camera", Profile.of([Measurement(SLOW, 12.0, 9e3, 1)], Task.INFERENCE))
    assert [planning.has_changed(), planning.has_changed()] == [True, False]


def test_a_failure_that_may_pass_is_tried_again_after_a_while(planning: Planning) -> None:
    def killed(*arguments: object) -> ModesWithDuty:
        raise WattfleetError("the process was killed")

    planning.turns.duty = duty(100.0)
    assert planning.has_changed()
    keep, planning.keep = planning.keep, killed
    with pytest.raises(NoFrontError, match="killed"):
        planning.front()
    assert [planning.has_changed() for _ in range(31)].count(True) == 1
    planning.keep = keep
    planning.front()
