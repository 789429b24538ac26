"""Gaussian processes on residuals, compared with cases computed by hand and with known surfaces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from wattfleet.modes import BOARDS
from wattfleet.prediction.roofline import settings_of
from wattfleet.prediction.roofline.estimation import (
    MEASUREMENT_SD,
    Correction,
    Points,
    Process,
    Surface,
    both_at,
    expected_process,
)

Values = NDArray[np.float64]

SPACE = settings_of(BOARDS["agx-orin"].space.array(), None)


def points(settings: Values, gpu_share: float = 0.0) -> Points:
    return Points(settings, np.full(len(settings), gpu_share))


HERE, FAR = points(SPACE[-1:]), points(SPACE[:1])
NO_SLOPE = np.zeros((1, 2))
PROCESS = Process(amplitude=0.05, nugget_sd=0.03)


def one_measurement(residual: float, measurement_var: float) -> Correction:
    prior = PROCESS.amplitude**2 + PROCESS.nugget_sd**2
    return Correction(
        PROCESS,
        HERE,
        np.zeros((1, 2)),
        np.zeros((2, 2)),
        np.array([measurement_var]),
        np.array([residual / (prior + measurement_var)]),
    )


def bump(settings: Values) -> Values:
    return np.asarray(0.1 * np.sin(np.log(settings[:, 1] / 1e6)) * np.tanh(np.log(settings[:, 2] / 5e8)))


def test_a_measured_mode_is_corrected_by_its_residual_less_noise() -> None:
    correction = one_measurement(0.1, MEASUREMENT_SD**2)
    # 0.05^2 + 0.03^2 = 0.0034, and 0.01^2 = 0.0001.
    assert correction.at(HERE, NO_SLOPE)[0][0] == pytest.approx(0.1 * 0.0034 / 0.0035)
    variance = 0.0034 - 0.0034**2 / 0.0035 + 0.0001
    assert correction.at(HERE, NO_SLOPE)[1][0] == pytest.approx(np.sqrt(variance))


def test_a_distant_mode_is_not_corrected_and_stays_uncertain() -> None:
    correction = one_measurement(0.1, MEASUREMENT_SD**2)
    assert correction.at(FAR, NO_SLOPE)[0][0] == pytest.approx(0.0, abs=1e-6)
    assert correction.at(FAR, NO_SLOPE)[1][0] == pytest.approx(np.sqrt(0.0034 + 0.0001))


def test_a_measurement_with_a_small_weight_corrects_little() -> None:
    assert PROCESS.measurement_var(np.array([1.0]))[0] == pytest.approx(0.0001)
    doubtful = PROCESS.measurement_var(np.array([0.01]))
    assert doubtful[0] == pytest.approx(0.0001 + 0.0009 * 99)
    assert one_measurement(0.1, doubtful[0]).at(HERE, NO_SLOPE)[0][0] < 0.005


def test_uncertain_parameters_widen_the_prediction_by_their_effect() -> None:
    nothing = Correction.none(2, 0.02, np.array([16.0]))
    assert nothing.at(FAR, np.ones((1, 2)))[1][0] == pytest.approx(np.hypot(0.02, MEASUREMENT_SD))
    uncertain = Correction(
        Process(0.0, 0.02), Points.none(), np.empty((0, 2)), np.diag([0.3, 0.4]), np.empty(0), np.empty(0)
    )
    assert uncertain.at(FAR, np.array([[1.0, 0.5]]))[1][0] == pytest.approx(np.sqrt(0.09 + 0.04 + 0.0004 + 0.0001))


def test_covariances_are_symmetric_and_positive_definite() -> None:
    some = points(SPACE[:: len(SPACE) // 60])
    covariance = PROCESS.covariance(some, some)
    np.testing.assert_allclose(np.diag(covariance), 0.0034)
    np.testing.assert_allclose(covariance, covariance.T)
    assert np.linalg.eigvalsh(covariance).min() > 0.0008


def test_neighbouring_modes_are_distinguished() -> None:
    # 2,188,800 and 2,201,600 kHz are the closest steps that a board has.
    pair = points(np.array([[12, 2_188_800, 1.3005e9, 3.199e9, 16], [12, 2_201_600, 1.3005e9, 3.199e9, 16]]))
    assert PROCESS.covariance(pair, pair)[0, 1] < PROCESS.amplitude**2


def test_another_batch_size_deviates_by_its_share_of_gpu_work() -> None:
    other = SPACE[-1:] * [1, 1, 1, 1, 2]
    for share in (0.0, 0.5, 1.0):
        among = PROCESS.covariance(points(SPACE[-1:], share), points(SPACE[-1:], share))[0, 0]
        across = PROCESS.covariance(points(SPACE[-1:], share), points(other, share))[0, 0]
        assert among == pytest.approx(0.0034 + (0.15 * share) ** 2)
        # log(2) apart with a length scale of 1.
        assert across == pytest.approx(0.0025 * np.exp(-0.5 * np.log(2) ** 2))
        assert PROCESS.variance(points(other, share))[0] == pytest.approx(among)


def test_intervals_widen_by_the_scale() -> None:
    once = one_measurement(0.1, MEASUREMENT_SD**2)
    twice = replace(once, interval_scale=2.0)
    for place in (HERE, FAR):
        np.testing.assert_array_equal(twice.at(place, NO_SLOPE)[0], once.at(place, NO_SLOPE)[0])
        np.testing.assert_allclose(twice.at(place, NO_SLOPE)[1], 2 * once.at(place, NO_SLOPE)[1])


def test_a_left_out_row_is_predicted_by_the_others_alone() -> None:
    rng = np.random.default_rng(3)
    where, seen = points(SPACE[::4000], 0.4), rng.normal(0, 0.05, 5)
    gradient, root = rng.normal(size=(5, 2)), np.array([[0.2, 0.0], [0.1, 0.05]])
    noise = np.array([1e-4, 1e-4, 2e-3, 1e-4, 1e-4])
    # The weights are for residuals around the prior's mean, with the parameters fixed as by a prior without spread.
    for prior_root in (np.zeros((2, 2)), root):
        among = PROCESS.covariance(where, where)
        whole = among + gradient @ prior_root @ prior_root.T @ gradient.T + np.diag(noise)
        correction = Correction(PROCESS, where, gradient, prior_root, noise, np.linalg.solve(whole, seen))
        found, sd = correction.left_out()
        for row in range(5):
            others = np.arange(5) != row
            kept = np.linalg.solve(whole[np.ix_(others, others)], np.column_stack([seen[others], whole[others, row]]))
            assert found[row] == pytest.approx(seen[row] - whole[row, others] @ kept[:, 0])
            variance = whole[row, row] - whole[row, others] @ kept[:, 1] - noise[row] + MEASUREMENT_SD**2
            assert sd[row] == pytest.approx(np.sqrt(variance))


def test_a_surface_follows_a_smooth_residual_and_ignores_low_weights() -> None:
    rng = np.random.default_rng(0)
    settings = SPACE[rng.permutation(len(SPACE))[:1500]]
    seen, trusted = bump(settings) + rng.normal(0, 0.01, len(settings)), np.ones(len(settings))
    seen[::20] += 1.0
    trusted[::20] = 1e-4
    surface = Surface.fit(settings, seen, trusted, np.arange(0, 1500, 5))
    elsewhere = SPACE[::50]
    assert np.abs(surface.at(elsewhere) - bump(elsewhere)).mean() < 0.01


def test_two_surfaces_together_equal_each_alone() -> None:
    rng = np.random.default_rng(0)
    settings, elsewhere = SPACE[:: len(SPACE) // 50], SPACE[::99]
    one, same, other = (Surface(where, rng.normal(size=len(where))) for where in (settings, settings, settings[:7]))
    for second in (same, other):
        for surface, found in zip((one, second), both_at(elsewhere, one, second), strict=True):
            np.testing.assert_allclose(found, surface.at(elsewhere))


def test_the_zero_surface_is_zero() -> None:
    assert Surface.zero().at(SPACE[:5]).tolist() == [0.0] * 5


def test_larger_residuals_give_a_more_uncertain_process() -> None:
    rng = np.random.default_rng(0)
    settings = SPACE[rng.permutation(len(SPACE))[:30]]
    calm, none = np.ones(30), np.zeros((30, 30))
    wild = expected_process(points(settings), rng.normal(0, 0.08, 30), calm, none)
    sure = expected_process(points(settings), np.zeros(30), calm, none)
    assert sure.nugget_sd < 0.01 < 0.04 < wild.nugget_sd
    assert sure.amplitude < wild.amplitude
