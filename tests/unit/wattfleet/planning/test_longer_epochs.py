"""Rounds in flight whose devices now need longer for an epoch because of their duties, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.fakes.fronts import columns_of, front
from wattfleet.choosing import Front
from wattfleet.planning import Allowance, InTraining, Offer, RoundPlan, TrimmedPlan, plan_round, review_epochs
from wattfleet.planning.policies import AllDevices

ORIN = Offer("orin", front((10, 50), (20, 30), (40, 20)), 5.0)
NANO = Offer("nano", front((35, 15), (60, 10)), 3.0)
SITE = Allowance.of_site(100.0)
HELD_W = 30.0


def planned(deadline_s: float | None = None) -> RoundPlan:
    """Two epochs in 70 s: the Nano in its fastest mode, and the Orin in its second one at 30 W."""
    return replace(plan_round([ORIN, NANO], AllDevices(), SITE, 2.0, 1), deadline_s=deadline_s)


def beside_duty(*points: tuple[int, float, float]) -> Front:
    """A front of points, each given as the number of its mode, seconds and watts."""
    modes = np.array([[4, 1_500_000 - number, 600_000_000, 2_133_000_000] for number, _, _ in points], dtype=np.float64)
    return Front(**columns_of(front(*((seconds, watts) for _, seconds, watts in points))) | {"modes": modes})


def reviewed(plan: RoundPlan, now: Front, elapsed_s: float | None = 0.0) -> TrimmedPlan | None:
    offer = replace(ORIN, front=now, limit_w=HELD_W)
    return review_epochs(plan, [InTraining(offer, elapsed_s)], replace(SITE, elsewhere_w={"site": 15.0}))


def reason_of(trim: TrimmedPlan, device_id: str) -> str:
    return next(each.reason for each in trim.plan.decisions if each.device_id == device_id)


def test_epochs_that_still_fit_into_the_round_change_nothing() -> None:
    plan = planned()
    assert (plan.duration_s, plan.assignments[1].power_limit_w) == (70.0, HELD_W)
    assert reviewed(plan, beside_duty((0, 20, 50), (1, 35, 30), (2, 80, 20))) is None
    # A change interrupts the app, which is not worth it for less than a twentieth of the round.
    assert reviewed(plan, beside_duty((0, 20, 50), (1, 36.7, 30))) is None
    assert reviewed(plan, beside_duty((0, 20, 50), (1, 36.8, 30))) is not None


def test_another_mode_within_the_watts_brings_the_device_back() -> None:
    trim = reviewed(planned(), beside_duty((0, 20, 50), (7, 30, 29), (8, 34, 28), (9, 36, 20)))
    assert trim is not None
    [nano, orin] = trim.plan.assignments
    # The mode with the least power that is fast enough. The device keeps its power limit.
    assert (orin.epoch_s, orin.power_w, orin.power_limit_w) == (34, 28, HELD_W)
    assert (trim.plan.duration_s, trim.changed, trim.ended) == (70.0, ("orin",), ())
    assert nano == planned().assignments[0]
    assert "moved to another mode because its epochs take longer beside its duty" in reason_of(trim, "orin")
    assert trim.plan.in_other_mode == ("orin",)


def test_without_such_a_mode_the_training_goes_on_and_the_plan_says_how_long() -> None:
    trim = reviewed(planned(), beside_duty((0, 30, 50), (1, 60, 30), (2, 90, 20)))
    assert trim is not None
    [orin] = [each for each in trim.plan.assignments if each.device_id == "orin"]
    assert (orin.mode, orin.epoch_s, orin.power_limit_w) == (planned().assignments[1].mode, 60, HELD_W)
    assert (trim.plan.duration_s, trim.changed) == (120.0, ("orin",))
    assert "ends later because its epochs take longer beside its duty" in reason_of(trim, "orin")
    assert reviewed(trim.plan, beside_duty((0, 30, 50), (1, 60, 30), (2, 90, 20))) is None


def test_the_fastest_mode_within_the_watts_is_taken_if_none_is_fast_enough() -> None:
    trim = reviewed(planned(), beside_duty((0, 30, 50), (7, 50, 29), (8, 60, 28)))
    assert trim is not None
    assert (trim.plan.assignments[1].epoch_s, trim.plan.duration_s) == (50, 100.0)


def test_a_device_without_a_mode_within_its_watts_is_left_to_its_agent() -> None:
    assert reviewed(planned(80.0), beside_duty((0, 30, 50))) is None


def test_a_device_that_misses_the_deadline_is_left_out_with_the_reason() -> None:
    plan = planned(80.0)
    slower = beside_duty((0, 30, 50), (1, 60, 30))
    trim = reviewed(plan, slower)
    assert trim is not None
    assert (trim.ended, trim.plan.stopped, [each.device_id for each in trim.plan.assignments]) == (
        ("orin",),
        ("orin",),
        ["nano"],
    )
    assert "its duty leaves too little time: 120 s of training, the deadline is 80 s" in reason_of(trim, "orin")
    assert trim.plan.duration_s == plan.duration_s
    assert trim.plan.planned_w == pytest.approx(15.0 + 5.0)  # the Nano is counted elsewhere, and the Orin idles


@pytest.mark.parametrize(
    ("elapsed_s", "is_left_out"),
    [
        (0.0, True),
        (35.0, False),  # an eighth of 120 s is left after seven eighths of 40 s
        (15.0, True),  # 15 s, and then five eighths of 120 s
        (50.0, False),  # it should have finished, so the remaining time is unknown
        (None, False),
    ],
)
def test_what_should_be_done_by_then_counts_for_the_deadline(elapsed_s: float | None, is_left_out: bool) -> None:
    trim = reviewed(planned(80.0), beside_duty((0, 30, 50), (1, 60, 30)), elapsed_s)
    assert trim is not None
    assert bool(trim.ended) == is_left_out
