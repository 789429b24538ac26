"""Plans beside a duty: fronts that keep it, and the mode and batch size in which a device answers requests."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_agent.learning.fitting import FittedModes, NoFrontError
from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.serving.duty_figures import DutyNow
from edge_agent.serving.turns import Batching
from tests.fakes.duties import FAST, HALF, MODES, NONE, SLOW, TRAINING, Planning, duty_within
from wattfleet.core.choosing import KnownModes
from wattfleet.core.duties import Demand, Duty, MeasuredArrivals, ModesWithDuty, keep_duty
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import (
    BatchOptions,
    Measurement,
    ModeArray,
    Profile,
    Task,
    Workload,
    WorkloadFacts,
)
from wattfleet.core.prediction import Prediction

# --- Duty planning ----------------------------------------------------------------------------------------------------
# Fronts beside a duty: only modes that keep it, with the time left for training, or the reason for no front.


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
    planning.turns.duty = duty_within(100.0)
    assert planning.modes_of_front() == {HALF, FAST}
    front = planning.front()
    assert (front.epoch_s > [2.0, 4.0]).all(), "inference takes a part of the time"
    assert front.power_w.tolist() == [20.0, 9.0], "the larger watts of inference and training"
    planning.turns.duty = duty_within(10_000.0)
    assert planning.modes_of_front() == {SLOW, HALF, FAST}
    assert planning.front().epoch_s[0] == pytest.approx(2.0, rel=0.02), "hardly any request, and much time for it"
    planning.turns.duty = None
    assert planning.front().epoch_s.tolist() == [2.0, 4.0, 8.0]
    assert planning.fits == [("camera", (1,), 1)], "predicted once"


def test_a_duty_that_takes_the_whole_board_leaves_no_front_but_a_reason(planning: Planning) -> None:
    planning.turns.duty = duty_within(25.0)
    with pytest.raises(NoFrontError, match="the duty takes the whole board: 95 % of 1 requests a second within 25 ms"):
        planning.front()
    assert [planning.turns.keeps_duty(mode) for mode in (SLOW, HALF, FAST)] == [False, True, True]


def test_a_training_in_progress_has_no_time_once_the_duty_takes_the_whole_board(planning: Planning) -> None:
    planning.turns.duty = duty_within(100.0)
    planning.front()
    planning.trains(lambda: (MODES, TRAINING), 20.0)
    assert planning.why_no_training() is None
    planning.turns.duty = duty_within(25.0)
    assert planning.why_no_training() is None, "not before the front beside the new duty is known"
    with pytest.raises(NoFrontError):
        planning.front()
    assert planning.why_no_training().startswith("the duty takes the whole board")


def test_a_training_that_is_hardly_known_leaves_no_front_but_a_remedy(planning: Planning) -> None:
    """The median of 20 ms per minibatch fits, but the 95 % quantile is 104 ms."""
    planning.turns.duty = duty_within(100.0)
    unsure = Prediction(TRAINING.minibatch_ms, TRAINING.power_mw, np.ones(3), NONE)
    with pytest.raises(
        NoFrontError, match="there are too few measurements .* `wattfleet agent profile`, set the duty after"
    ):
        planning.beside(MODES, unsure)


@pytest.mark.parametrize(
    ("wanted", "why"), [(duty_within(9.0), "no mode answers"), (duty_within(900.0, 500.0), "are more than")]
)
def test_a_duty_that_no_mode_keeps_leaves_no_front_but_a_reason(planning: Planning, wanted: Duty, why: str) -> None:
    planning.turns.duty = wanted
    with pytest.raises(NoFrontError, match=f"the duty cannot be kept: .*{why}"):
        planning.front()
    assert not any(planning.turns.keeps_duty(mode) for mode in (SLOW, HALF, FAST))


def test_an_unknown_inference_leaves_no_front_until_it_was_seen(tmp_path: Path) -> None:
    planning = Planning(tmp_path)
    planning.turns.duty = duty_within(100.0)
    with pytest.raises(NoFrontError, match="the inference of 'camera' has not been measured yet: let it answer"):
        planning.front()
    planning.turns.server_connected(1)
    for _ in range(8):
        planning.times.batch_answered(FAST, 1, 10.0, False)
    assert planning.modes_of_front() == {HALF, FAST}


def test_an_inference_that_cannot_be_predicted_leaves_no_front(planning: Planning) -> None:
    def fails(*_: object) -> Mapping[int, Prediction]:
        raise InvalidInputError("out of order")

    planning.turns.duty = duty_within(100.0)
    for planning.fit, why in ((fails, "out of order"), (None, "has no reference yet")):
        with pytest.raises(NoFrontError, match=f"the inference of 'camera' cannot be predicted: .*{why}"):
            planning.front()


def test_live_times_that_are_longer_take_modes_from_the_front(planning: Planning) -> None:
    planning.turns.duty = duty_within(100.0)
    assert planning.modes_of_front() == {HALF, FAST}
    for _ in range(8):
        planning.times.batch_answered(FAST, 1, 25.0, False)
    assert planning.modes_of_front() == {FAST}


def test_rows_and_servers_that_change_are_predicted_anew(planning: Planning) -> None:
    planning.turns.duty = duty_within(1_000.0)
    planning.front()
    planning.turns.server_connected(6)
    planning.rows.add("camera", Profile.of([Measurement(HALF, 20.0, 7e3, 2)], Task.INFERENCE))
    planning.front()
    assert planning.fits == [("camera", (1,), 1), ("camera", (1, 2, 4, 6), 2)]


def test_without_a_server_the_measured_batches_count(tmp_path: Path) -> None:
    planning = Planning(tmp_path)
    planning.rows.add("camera", Profile.of([Measurement(FAST, 40.0, 20e3, 4)], Task.INFERENCE))
    planning.turns.duty = duty_within(1_000.0)
    planning.front()
    assert planning.fits == [("camera", (1, 2, 4), 1)]


def test_a_mode_that_is_not_predicted_is_judged_by_measured_times(planning: Planning) -> None:
    other = FAST._replace(cores=4)
    planning.turns.in_mode(FAST)
    planning.turns.duty = duty_within(100.0)
    planning.front()
    assert not planning.turns.keeps_duty(other), "nothing is known of it"
    planning.times.batch_answered(other, 1, 10.0, False)
    assert planning.turns.keeps_duty(other)
    planning.turns.duty = duty_within(79.0)
    assert not planning.turns.keeps_duty(SLOW) and planning.turns.keeps_duty(FAST), "another duty: measured times"


NOW = DutyNow(duty_within(100.0), 20.0, 8, 1.0, {FAST: {1: 10.0, 4: 20.0}})


@pytest.mark.parametrize(
    ("later", "differs"),
    [
        (NOW, False),
        (replace(NOW, duty=duty_within(99.0)), True),
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
    planning.turns.duty = duty_within(100.0)
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

    assert rate(duty_within(100.0, 5.0)) == 5.0
    planning.turns.batch_answered(1, [10.0], 0)
    planning.now_s = 10.0
    planning.turns.batch_answered(199, [10.0], 0)
    assert rate(duty_within(100.0, 5.0)) == 20.0
    assert rate(duty_within(100.0, 50.0)) == 50.0
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
    planning.turns.duty = duty_within(100.0)
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
    planning.turns.duty = duty_within(500.0, 120.0)
    server = planning.turns.server_connected(8)
    planning.turns.server_gone(1)
    for _ in range(8):
        planning.times.batch_answered(FAST, 8, 17.0, False)
    before = planning.modes_of_front()
    planning.turns.server_gone(server)
    assert planning.modes_of_front() == before


def test_further_measured_rows_lead_to_another_front(planning: Planning) -> None:
    planning.turns.duty = duty_within(100.0)
    assert [planning.has_changed(), planning.has_changed()] == [True, False]
    planning.rows.add("camera", Profile.of([Measurement(SLOW, 12.0, 9e3, 1)], Task.INFERENCE))
    assert [planning.has_changed(), planning.has_changed()] == [True, False]


def test_a_failure_that_may_pass_is_tried_again_after_a_while(planning: Planning) -> None:
    def killed(*arguments: object) -> ModesWithDuty:
        raise WattfleetError("the process was killed")

    planning.turns.duty = duty_within(100.0)
    assert planning.has_changed()
    keep, planning.keep = planning.keep, killed
    with pytest.raises(NoFrontError, match="killed"):
        planning.front()
    assert [planning.has_changed() for _ in range(31)].count(True) == 1
    planning.keep = keep
    planning.front()


# --- Duty batching ----------------------------------------------------------------------------------------------------
# The batch size and mode in which a device answers requests, and how its plans account for them.

PER_S = 40.0


class Batches(Planning):
    """Doubling the batch size takes 1.5 times as long and draws 1 W more. The middle mode draws the least."""

    def predict(self, workload: str, batches: tuple[int, ...], rows: Profile) -> Mapping[int, Prediction]:
        times_ms, power_mw = np.array([40.0, 20.0, 10.0]), np.array([9e3, 7e3, 20e3])
        return {
            batch: Prediction(times_ms * 1.5 ** np.log2(batch), power_mw + 1e3 * np.log2(batch), NONE, NONE)
            for batch in batches
        }


@pytest.fixture
def batched_planning(tmp_path: Path) -> Batches:
    """A server that accepts batches of 8 requests, and a duty that leaves time for training."""
    batched_planning = Batches(tmp_path)
    batched_planning.turns.plan_batching = batched_planning.batching
    batched_planning.turns.server_connected(8)
    for _ in range(8):
        batched_planning.times.batch_answered(FAST, 1, 10.0, False)
    batched_planning.turns.duty = duty_within(400.0, PER_S)
    return batched_planning


def training() -> tuple[ModeArray, Prediction]:
    return MODES, TRAINING


def test_a_server_is_limited_to_the_batch_of_the_plan_in_each_mode(batched_planning: Batches) -> None:
    front = batched_planning.front()
    planned = front.power_w[[tuple(mode) for mode in front.modes.tolist()].index(FAST)]
    batched_planning.trains(training, 100.0)
    found = {}
    for mode in (FAST, HALF):
        batched_planning.turns.in_mode(mode)
        found[mode] = batched_planning.turns.batching
    # The expected batch size is the one that allows the most minibatches of training per second.
    batches = [1, 2, 4, 8]
    inference = KnownModes.of(
        np.repeat(MODES, 4, axis=0),
        Prediction(
            np.array([ms * 1.5 ** np.log2(b) for ms in (40.0, 20.0, 10.0) for b in batches]),
            np.ones(12),
            np.zeros(12),
            np.zeros(12),
        ),
        None,
        np.array(3 * batches),
    )
    kept = keep_duty(KnownModes.of(MODES, TRAINING), inference, Demand(PER_S, 400.0), 0.0)
    for mode, batching in found.items():
        rows = np.flatnonzero((kept.beside.modes == np.array(mode)).all(axis=1))
        best = rows[kept.beside.minibatch_ms[rows].argmin()]
        assert batching.batch == kept.beside.stated_batch()[best] > 1
        assert 0 < batching.wait_ms < kept.cycle_ms[best]
    assert found[FAST] != found[HALF]
    assert planned > 20.0, "a larger batch draws more than a single request"


def test_watts_that_allow_no_larger_batch_lead_to_a_smaller_one(batched_planning: Batches) -> None:
    batched_planning.front()
    batched_planning.turns.in_mode(FAST)
    batched_planning.trains(training, 100.0)
    largest = batched_planning.turns.batching
    batched_planning.trains(training, 21.0)
    assert 1 <= batched_planning.turns.batching.batch <= 2 < largest.batch
    batched_planning.trains(training, 12.0)
    assert batched_planning.turns.batching == Batching(), "the plan has no training with so few watts"


def test_without_training_requests_are_answered_at_once_with_the_least_power(batched_planning: Batches) -> None:
    assert batched_planning.turns.batching == Batching(), "nothing is planned yet"
    batched_planning.front()
    batched_planning.turns.in_mode(FAST)
    assert batched_planning.turns.batching == Batching(1, 0.0)
    batched_planning.turns.in_mode(SLOW)
    assert batched_planning.turns.batching == Batching(8, 0.0), "smaller ones would not keep up"
    batched_planning.trains(
        lambda: (MODES, Prediction(2 * TRAINING.minibatch_ms, TRAINING.power_mw, NONE, NONE)), 100.0
    )
    assert batched_planning.turns.batching == Batching(), "no front was reported of this training"
    batched_planning.trains(None)
    batched_planning.turns.duty = duty_within(399.0, PER_S)
    assert batched_planning.turns.batching == Batching(), "another duty"
    batched_planning.turns.duty = None
    assert batched_planning.turns.batching == Batching()


def test_servers_hear_of_another_batch_whoever_changes_the_mode(batched_planning: Batches) -> None:
    told: list[Batching] = []
    batched_planning.turns.batching_changed = lambda: told.append(batched_planning.turns.batching)
    batched_planning.turns.in_mode(FAST)
    batched_planning.front()
    changing = threading.Thread(target=batched_planning.turns.in_mode, args=(SLOW,))
    changing.start()
    changing.join()
    batched_planning.turns.in_mode(SLOW)
    assert told == [Batching(1), Batching(8)]


def test_a_device_rests_where_requests_take_the_least_power(batched_planning: Batches) -> None:
    batched_planning.turns.in_mode(FAST)
    assert batched_planning.turns.is_rested(SLOW, MODES), "nothing is known of the others' power"
    assert batched_planning.resting_w() == 0.0
    batched_planning.turns.changed.clear()
    batched_planning.front()
    assert batched_planning.turns.changed.is_set()
    assert not batched_planning.turns.is_rested(SLOW, MODES)
    assert batched_planning.turns.resting_mode(SLOW, MODES) == HALF
    batched_planning.turns.in_mode(HALF)
    assert batched_planning.turns.is_rested(SLOW, MODES)
    assert batched_planning.resting_w() == 7.0
    batched_planning.turns.duty = None
    assert (batched_planning.turns.resting_mode(SLOW, MODES), batched_planning.resting_w()) == (SLOW, 0.0)


def test_a_device_that_cannot_keep_its_duty_draws_what_the_highest_mode_does(batched_planning: Batches) -> None:
    batched_planning.turns.duty = duty_within(1.0, PER_S)
    with pytest.raises(NoFrontError, match="cannot be kept"):
        batched_planning.front()
    assert batched_planning.turns.resting_mode(SLOW, MODES) == FAST
    assert batched_planning.resting_w() == 23.0, "with a batch of 8"
    assert batched_planning.turns.batching == Batching()
