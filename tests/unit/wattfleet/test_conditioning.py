"""Predictions after further measurements, compared with the conditional normal distribution by matrix inverse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile, Task, board_named
from wattfleet.prediction import Prediction, conditioned
from wattfleet.prediction.roofline import MEASUREMENT_SD, correlation, settings_of

N = 12
SPACE = board_named("agx-orin").space.array()
MODES = SPACE[np.random.default_rng(0).choice(len(SPACE), N, replace=False)]
BATCH = np.random.default_rng(1).choice([1, 4, 16, 32], N)


def predicted(seed: int) -> Prediction:
    drawn = np.random.default_rng(seed)
    time, power, time_sd, power_sd = drawn.uniform([[5], [5e3], [0.02], [0.02]], [[500], [50e3], [0.6], [0.3]], (4, N))
    return Prediction(time, power, time_sd, power_sd)


def measured(rows: np.ndarray, seed: int = 5) -> Profile:
    time, power = np.random.default_rng(seed).uniform([[5], [5e3]], [[500], [50e3]], (2, len(rows)))
    return Profile(MODES[rows], time, power, BATCH[rows], Task.INFERENCE)


def by_inverse(
    mean: np.ndarray, sd: np.ndarray, rows: list[int], observed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Textbook conditional mean and standard deviation of each log value, with loops; `sd` is that of measurements."""
    sd = np.sqrt(np.maximum(sd**2 - MEASUREMENT_SD**2, 0))
    points = settings_of(MODES, BATCH)
    covariance = np.array(
        [[float(correlation(points[[i]], points[[j]])[0, 0]) * sd[i] * sd[j] for j in range(N)] for i in range(N)]
    )
    inverse = np.linalg.inv(covariance[np.ix_(rows, rows)] + np.diag([MEASUREMENT_SD**2] * len(rows)))
    means, deviations = [], []
    for i in range(N):
        weights = covariance[i, rows] @ inverse
        means.append(mean[i] + weights @ (np.log(observed) - mean[rows]))
        rest = max(covariance[i, i] - weights @ covariance[rows, i], 0)
        deviations.append(np.sqrt(rest + MEASUREMENT_SD**2))
    return np.array(means), np.array(deviations)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.lists(st.integers(0, N - 1), min_size=1, max_size=6, unique=True))
def test_it_is_the_conditional_normal_distribution(seed: int, rows: list[int]) -> None:
    before, found = predicted(seed), measured(np.array(rows), seed)
    after = conditioned(before, MODES, BATCH, np.array(rows), found)
    time, time_sd = by_inverse(np.log(before.minibatch_ms), before.time_log_sd, rows, found.minibatch_ms)
    power, power_sd = by_inverse(np.log(before.power_mw), before.power_log_sd, rows, found.power_mw)
    np.testing.assert_allclose(np.log(after.minibatch_ms), time, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.log(after.power_mw), power, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(after.time_log_sd, time_sd, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.power_log_sd, power_sd, rtol=1e-4, atol=1e-5)


@given(st.permutations(range(5)))
def test_the_order_of_the_measurements_does_not_matter(order: list[int]) -> None:
    rows, found = np.arange(5), measured(np.arange(5))
    one = conditioned(predicted(3), MODES, BATCH, rows, found)
    other = conditioned(predicted(3), MODES, BATCH, rows[order], found.rows(np.array(order)))
    np.testing.assert_allclose(one.minibatch_ms, other.minibatch_ms, rtol=1e-8)
    np.testing.assert_allclose(one.power_log_sd, other.power_log_sd, rtol=1e-6)


def test_a_measured_row_takes_its_measured_value() -> None:
    rows, before = np.array([4]), predicted(0)
    found = measured(rows)
    after = conditioned(before, MODES, BATCH, rows, found)
    assert after.minibatch_ms[4] == pytest.approx(found.minibatch_ms[0], rel=0.01)
    assert after.time_log_sd[4] < 2 * MEASUREMENT_SD < before.time_log_sd[4]


def test_a_measured_neighbour_moves_a_row_more_than_a_distant_one() -> None:
    ladder = np.unique(SPACE[:, 2])
    modes = np.repeat(SPACE[-1:], 3, axis=0)
    modes[:, 2] = ladder[-1], ladder[-2], ladder[0]
    sd = np.full(3, 0.2)
    before = Prediction(np.full(3, 100.0), np.full(3, 20e3), sd, sd)
    twice = Profile(modes[:1], np.array([200.0]), np.array([20e3]))
    after = conditioned(before, modes, None, np.array([0]), twice)
    assert after.minibatch_ms[0] > after.minibatch_ms[1] > after.minibatch_ms[2] > 100
    assert after.time_log_sd[0] < after.time_log_sd[1] < after.time_log_sd[2]
    np.testing.assert_allclose(after.power_mw, 20e3)


def test_without_measurements_the_prediction_stays() -> None:
    before = predicted(0)
    assert (
        conditioned(before, MODES, BATCH, np.array([], dtype=np.intp), measured(np.array([], dtype=np.intp))) is before
    )


def test_other_lengths_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="12 predictions for 11 rows, and 1 measurements for 1"):
        conditioned(predicted(0), MODES[1:], BATCH[1:], np.array([0]), measured(np.array([0])))
    with pytest.raises(InvalidInputError, match="12 predictions for 12 rows, and 2 measurements for 1"):
        conditioned(predicted(0), MODES, BATCH, np.array([0]), measured(np.array([0, 1])))


def test_measuring_makes_no_prediction_less_certain() -> None:
    before = predicted(0)
    after = before
    for seed in range(5):
        after = conditioned(after, MODES, BATCH, np.array([0]), measured(np.array([0]), seed))
    assert (after.time_log_sd <= before.time_log_sd + 1e-12).all()
