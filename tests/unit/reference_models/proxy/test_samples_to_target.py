"""The number of samples to a target accuracy, computed by hand for scripted accuracies."""

from __future__ import annotations

import math

import pytest

from reference_models.proxy.proxy_runs import RunEnd, RunLimits, samples_to_target
from tests.fakes.proxy_tasks import ScriptedLearner
from wattfleet.errors import InvalidInputError


def test_the_target_is_reached_by_the_mean_of_three_accuracies() -> None:
    # Means of three: 0.6, 0.8, 0.85. The outlier of 0.95 does not reach the target by itself.
    learner = ScriptedLearner([0.1, 0.75, 0.95, 0.7, 0.9])
    end = samples_to_target(learner, 8, RunLimits(0.85, evaluate_every=16, max_samples=800))
    assert end == RunEnd(80, pytest.approx(0.85))
    assert learner.tested_after == [2, 4, 6, 8, 10]


def test_two_high_accuracies_alone_do_not_reach_the_target() -> None:
    end = samples_to_target(ScriptedLearner([1.0, 1.0, 1.0]), 8, RunLimits(0.5, evaluate_every=8, max_samples=80))
    assert end.samples == 24


def test_all_batches_that_divide_the_interval_are_tested_after_the_same_samples() -> None:
    limits = RunLimits(1.0, evaluate_every=32, max_samples=128)
    for batch in (4, 8, 32):
        learner = ScriptedLearner([0.5] * 4)
        samples_to_target(learner, batch, limits)
        assert [count * batch for count in learner.tested_after] == [32, 64, 96, 128]


def test_a_batch_that_does_not_divide_the_interval_is_tested_once_it_is_reached() -> None:
    learner = ScriptedLearner([1.0, 1.0, 1.0])
    end = samples_to_target(learner, 12, RunLimits(0.9, evaluate_every=32, max_samples=200))
    assert learner.tested_after == [3, 6, 8]
    assert end.samples == 96


def test_a_run_ends_without_the_target_before_it_exceeds_the_limit() -> None:
    learner = ScriptedLearner([0.2, 0.4, 0.6, 0.6])
    end = samples_to_target(learner, 8, RunLimits(0.9, evaluate_every=8, max_samples=39))
    assert learner.minibatches == 4
    assert end == RunEnd(None, pytest.approx(1.6 / 3))


def test_a_run_that_diverges_ends_at_once() -> None:
    learner = ScriptedLearner([0.2, math.nan])
    assert samples_to_target(learner, 8, RunLimits(0.9, evaluate_every=8, max_samples=8000)) == RunEnd(None, None)
    assert learner.minibatches == 2


def test_each_test_is_reported_with_the_mean_accuracy() -> None:
    reported: list[tuple[int, float]] = []
    limits = RunLimits(1.0, evaluate_every=8, max_samples=32)
    samples_to_target(ScriptedLearner([0.0, 0.5, 1.0, 1.0]), 8, limits, lambda *each: reported.append(each))
    assert reported == [(8, 0.0), (16, 0.25), (24, 0.5), (32, pytest.approx(2.5 / 3))]


@pytest.mark.parametrize("target", [0.0, -0.1, 1.01, 85.0, math.nan])
def test_a_target_that_is_no_share_is_refused(target: float) -> None:
    with pytest.raises(InvalidInputError, match="above 0 and at most 1"):
        RunLimits(target, 8, 800)


def test_a_target_of_one_can_be_reached() -> None:
    learner = ScriptedLearner([1.0] * 3)
    assert samples_to_target(learner, 8, RunLimits(1.0, evaluate_every=8, max_samples=24)).samples == 24


def test_a_limit_before_the_third_test_is_refused_with_the_least_one() -> None:
    with pytest.raises(InvalidInputError, match="--max-samples at least 48"):
        RunLimits(0.9, evaluate_every=16, max_samples=47)


def test_an_interval_of_no_samples_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="--evaluate-every must be at least 1"):
        RunLimits(0.9, evaluate_every=0, max_samples=47)
