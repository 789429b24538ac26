"""The physical model, its fits, and the Gaussian processes on its residuals."""

from __future__ import annotations

from dataclasses import astuple, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from wattfleet.core.modes import BOARDS
from wattfleet.core.prediction.roofline import (
    PowerParameters,
    Prior,
    TimeParameters,
    power_mw,
    robust_fit,
    settings_of,
    step_parts,
    step_time_ms,
)
from wattfleet.core.prediction.roofline.estimation import (
    MEASUREMENT_SD,
    Correction,
    Points,
    Process,
    Surface,
    both_at,
    expected_process,
    generalised_fit,
    jacobian,
    residual_weights,
)
from wattfleet.core.prediction.roofline.physics import loader_cores, log_time_gradient

# --- Physics ----------------------------------------------------------------------------------------------------------
# The physical model: cases computed by hand, and invariants.


NOTHING = 1e-12
IDLE = TimeParameters(*[NOTHING] * len(fields(TimeParameters)))
NO_POWER = PowerParameters(*[NOTHING] * len(fields(PowerParameters)))
ALONE = replace(IDLE, gpu_overlap=50, launch_overlap=50, loading_overlap=50, workers=1e6)
SOME = TimeParameters(270, 80, 16, 46, 7, 122, 3, 4, 1, 0.2, 1.9, 0.3, 6)

# Orders of magnitude around the values of any workload or board.
TIMES = st.builds(TimeParameters, *[st.floats(1e-3, 1e4)] * 7, *[st.floats(0.05, 50)] * 6, *[st.floats(1e-3, 1e2)] * 5)
BATCHES = st.integers(1, 512)
POWERS = st.builds(PowerParameters, *[st.floats(1e-2, 1e5)] * 9, *[st.floats(0.05, 5)] * 4)


Values = NDArray[np.float64]


def mode(cores: float, cpu_ghz: float, gpu_ghz: float, mem_ghz: float, batch: float = 16) -> Values:
    return np.array([[cores, cpu_ghz * 1e6, gpu_ghz * 1e9, mem_ghz * 1e9, batch]])


def time_of(theta: TimeParameters, *knobs: float, batch: float = 16) -> float:
    return float(step_time_ms(theta, mode(*knobs, batch))[0])


def space_of(board: str, batch: int = 16) -> Values:
    modes = BOARDS[board].space.array()
    return settings_of(modes, np.full(len(modes), batch))


def test_a_million_gpu_cycles_take_a_millisecond_at_one_gigahertz() -> None:
    assert time_of(replace(ALONE, compute_mcycles=10), 4, 1, 0.5, 1) == pytest.approx(20)
    assert time_of(replace(ALONE, serial_compute_mcycles=10), 4, 1, 0.5, 1) == pytest.approx(20)


def test_launching_needs_one_core_however_many_are_online() -> None:
    theta = replace(ALONE, launch_mcycles=30)
    assert time_of(theta, 1, 1.5, 1, 1) == pytest.approx(20)
    assert time_of(theta, 12, 1.5, 1, 1) == pytest.approx(20)


def test_fixed_time_adds_to_everything() -> None:
    assert time_of(replace(ALONE, traffic_mcycles=40, fixed_ms=3), 4, 1, 1, 2) == pytest.approx(23)


@pytest.mark.parametrize(("overlap", "together"), [(1e-9, 7.0), (1.0, 5.0), (200.0, 4.0)])
def test_overlap_ranges_from_the_sum_to_the_longer_time(overlap: float, together: float) -> None:
    theta = replace(ALONE, compute_mcycles=3, traffic_mcycles=4, gpu_overlap=overlap)
    assert time_of(theta, 4, 1, 1, 1) == pytest.approx(together, rel=1e-3)


def test_loading_waits_for_its_core_and_for_the_memory() -> None:
    # With 100 cores, the only worker has its own core, and nothing else limits it.
    theta = replace(ALONE, loading_mcycles=30, loading_stall_mcycles=20, workers=1)
    assert time_of(theta, 100, 1, 1, 2) == pytest.approx(30 + 10, rel=1e-3)


def test_the_training_process_takes_about_one_core_for_itself() -> None:
    # As measured in modes limited by loading, with 2, 4 and 6 cores: 1 : 1/3 : 1/5.
    theta = replace(ALONE, loading_mcycles=100, main_cores=1)
    two, four, six = (time_of(theta, cores, 1, 1, 1) for cores in (2, 4, 6))
    assert four / two == pytest.approx(1 / 3, abs=0.07)
    assert six / two == pytest.approx(1 / 5, abs=0.07)


def test_loading_gains_nothing_from_cores_beyond_its_workers() -> None:
    theta = replace(ALONE, loading_mcycles=100, main_cores=1, workers=4)
    assert time_of(theta, 12, 1, 1, 1) == pytest.approx(100 / 4, rel=0.02)


def test_background_load_takes_a_larger_share_of_slow_cores() -> None:
    theta = replace(ALONE, main_cores=NOTHING, background_ghz=0.4)
    slow, fast = loader_cores(theta, np.array([6.0, 6.0]), np.array([0.2, 2.0]))
    assert slow == pytest.approx(6 - 2, abs=0.1)
    assert fast == pytest.approx(6 - 0.2, abs=0.1)


def test_one_core_at_the_lowest_clock_still_loads() -> None:
    assert 0 < loader_cores(replace(SOME, background_ghz=1), np.array([1.0]), np.array([0.1152]))[0] < 0.1


def test_power_is_a_floor_plus_the_power_of_each_clock() -> None:
    theta = replace(ALONE, fixed_ms=1)
    drawn = replace(NO_POWER, floor_mw=5000, core_clock_mw=100, gpu_clock_mw=1000, mem_clock_mw=300)
    knobs = mode(4, 2.0, 0.5, 3.0)
    assert power_mw(drawn, theta, knobs)[0] == pytest.approx(5000 + 4 * 2 * 100 + 0.5 * 1000 + 3 * 300)


def test_a_resource_draws_busy_power_for_its_share_of_the_step() -> None:
    half_busy = replace(ALONE, compute_mcycles=10, fixed_ms=10)
    assert power_mw(replace(NO_POWER, gpu_busy_mw=8000), half_busy, mode(4, 1, 1, 1))[0] == pytest.approx(4000)
    assert power_mw(replace(NO_POWER, mem_compute_mw=800), half_busy, mode(4, 1, 1, 2))[0] == pytest.approx(800)
    half_moving = replace(ALONE, traffic_mcycles=20, fixed_ms=10)
    assert power_mw(replace(NO_POWER, mem_traffic_mw=3000), half_moving, mode(4, 1, 1, 2))[0] == pytest.approx(3000)
    assert power_mw(replace(NO_POWER, gpu_stall_mw=600), half_moving, mode(4, 1, 0.5, 2))[0] == pytest.approx(150)


def test_busy_cores_are_the_loading_ones_and_the_launching_one() -> None:
    draws = replace(NO_POWER, core_busy_mw=100)
    launching = replace(ALONE, launch_mcycles=10)
    assert power_mw(draws, launching, mode(8, 1, 1, 1))[0] == pytest.approx(100)
    loading = replace(ALONE, loading_mcycles=1000, workers=3)
    assert power_mw(draws, loading, mode(100, 1, 1, 1))[0] == pytest.approx(300, rel=0.01)


def test_voltage_raises_power_above_the_knee_only() -> None:
    raised = replace(NO_POWER, gpu_clock_mw=1000, gpu_voltage=2, gpu_knee_ghz=0.7)
    below, above = (power_mw(raised, ALONE, mode(4, 1, gpu, 1))[0] for gpu in (0.3, 1.3))
    assert below == pytest.approx(300, rel=0.01)
    assert above == pytest.approx(1300 * (1 + 2 * 0.6**2), rel=0.02)


@given(theta=TIMES, board=st.sampled_from(sorted(BOARDS)), scale=st.floats(0.1, 10), batch=BATCHES)
def test_a_step_is_no_shorter_than_its_parts_and_scales_with_the_work(
    theta: TimeParameters, board: str, scale: float, batch: int
) -> None:
    settings = space_of(board, batch)[::97]
    parts = step_parts(theta, settings)
    for part in (parts.loading_ms, parts.launch_ms, parts.compute_ms, parts.traffic_ms):
        assert (part > 0).all()
        assert (parts.step_ms >= part * (1 - 1e-9)).all()
    work = np.array(astuple(theta))
    work[:7] *= scale
    np.testing.assert_allclose(step_time_ms(TimeParameters(*work), settings), scale * parts.step_ms, rtol=1e-9)


@given(theta=TIMES, power=POWERS, board=st.sampled_from(sorted(BOARDS)), batch=BATCHES)
def test_every_mode_of_every_board_has_a_finite_positive_power(
    theta: TimeParameters, power: PowerParameters, board: str, batch: int
) -> None:
    drawn = power_mw(power, theta, space_of(board, batch)[::97])
    assert np.isfinite(drawn).all()
    assert (drawn > power.floor_mw).all()


@given(theta=TIMES, board=st.sampled_from(sorted(BOARDS)), knob=st.integers(0, 3))
def test_raising_one_knob_never_slows_a_step(theta: TimeParameters, board: str, knob: int) -> None:
    space = BOARDS[board].space
    shape = [len(values) for values in (space.cores, space.cpu_khz, space.gpu_hz, space.mem_hz)]
    times: Values = step_time_ms(theta, space_of(board)).reshape(shape)
    assert (np.diff(times, axis=knob) <= 1e-9 * times.max()).all()


@pytest.mark.parametrize("kind", sorted(BOARDS))
def test_a_whole_mode_space_is_positive_and_finite(kind: str) -> None:
    times = step_time_ms(SOME, space_of(kind))
    assert np.isfinite(times).all()
    assert (times > 0).all()


def test_parameters_survive_conversion_to_logarithms_and_back() -> None:
    np.testing.assert_allclose(astuple(TimeParameters.from_log(SOME.log())), astuple(SOME))


@pytest.mark.parametrize(
    ("work", "fixed"),
    [
        ("loading_mcycles", "loading_fixed"),
        ("launch_mcycles", "launch_fixed"),
        ("compute_mcycles", "compute_fixed"),
        ("serial_compute_mcycles", "compute_fixed"),
        ("traffic_mcycles", "traffic_fixed"),
        ("fixed_ms", "fixed_ms_fixed"),
    ],
)
def test_a_part_of_the_work_grows_with_the_batch(work: str, fixed: str) -> None:
    # The fixed part is a third of the growing part: 3/4 + 1/4 at 16 samples, and 4 * 3/4 + 1/4 at 64 samples.
    theta = replace(ALONE, **{work: 40.0, fixed: 1 / 3})
    at_16, at_64, at_1 = (time_of(theta, 100, 1, 1, 1, batch=batch) for batch in (16, 64, 1))
    assert at_64 / at_16 == pytest.approx(3.25, rel=1e-6)
    assert at_1 / at_16 == pytest.approx(0.25 + 0.75 / 16, rel=1e-6)


def test_the_work_is_stated_for_16_samples_whatever_its_growth() -> None:
    settings = space_of("agx-orin")[::97]
    grows = replace(SOME, launch_fixed=1e-3, compute_fixed=50, traffic_fixed=7, loading_fixed=2, fixed_ms_fixed=9)
    np.testing.assert_allclose(step_time_ms(grows, settings), step_time_ms(SOME, settings))


@given(theta=TIMES, few=BATCHES, more=BATCHES)
def test_a_larger_batch_takes_longer_and_less_for_each_sample(theta: TimeParameters, few: int, more: int) -> None:
    few, more = sorted((few, more))
    short, long = (step_time_ms(theta, space_of("orin-nano", batch)[::97]) for batch in (few, more))
    assert (short <= long * (1 + 1e-9)).all()
    assert (short / few >= long / more * (1 - 1e-9)).all()


def test_several_parameter_sets_at_once_equal_each_alone() -> None:
    settings = space_of("orin-nano")[::50]
    sets = [SOME, replace(SOME, compute_mcycles=300, workers=1)]
    powers = [PowerParameters(6000, 20, 240, 650, 8300, 1100, 400, 6000, 400, 1.7, 1.2, 1.4, 0.4)] * 2
    powers[1] = replace(powers[1], gpu_busy_mw=100)
    many = TimeParameters.from_log(np.stack([each.log() for each in sets], axis=1))
    together = step_time_ms(many, settings)
    np.testing.assert_allclose(together, [step_time_ms(each, settings) for each in sets])
    drawn = power_mw(PowerParameters.from_log(np.stack([each.log() for each in powers], axis=1)), SOME, settings)
    np.testing.assert_allclose(drawn, [power_mw(each, SOME, settings) for each in powers])


@given(theta=TIMES, batch=st.sampled_from([1, 16, 64]))
def test_the_exact_gradient_equals_finite_differences(theta: TimeParameters, batch: int) -> None:
    modes = BOARDS["agx-orin"].space.array()[::1009]
    settings = settings_of(modes, np.full(len(modes), batch))
    numeric = jacobian(lambda log: np.log(step_time_ms(TimeParameters.from_log(log), settings)), theta.log())
    assert log_time_gradient(theta, settings) == pytest.approx(numeric, abs=2e-3)


# --- Estimation -------------------------------------------------------------------------------------------------------
# Fits compared with closed-form solutions, also with some wrong observations.

RNG = np.random.default_rng(1)
DESIGN = RNG.normal(size=(40, 3))
TRUTH = np.array([0.7, -0.4, 0.2])
VAGUE = Prior.independent(np.zeros(3), np.full(3, 10.0))


def linear(parameters: Values) -> Values:
    return np.asarray((DESIGN @ parameters).T)


def test_exact_observations_give_the_true_parameters() -> None:
    fitted = robust_fit(linear, DESIGN @ TRUTH, VAGUE, 0.02, "soft_l1", 1)
    np.testing.assert_allclose(fitted, TRUTH, atol=1e-5)


def test_wrong_observations_do_not_change_a_robust_fit() -> None:
    observed = DESIGN @ TRUTH
    observed[:6] += 3.0
    np.testing.assert_allclose(robust_fit(linear, observed, VAGUE, 0.02, "cauchy", 3), TRUTH, atol=1e-3)


def test_unobserved_parameters_keep_their_prior_mean() -> None:
    prior = Prior.independent(np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 0.3]))
    fitted = robust_fit(lambda p: np.repeat(p[0][:, None], 5, axis=1), np.full(5, 1.0), prior, 0.02, "soft_l1", 2)
    np.testing.assert_allclose(fitted, prior.mean, atol=1e-6)


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_a_generalised_fit_of_a_linear_model_is_the_bayesian_posterior_mean(correlation: float) -> None:
    mean, sd = np.array([0.5, 0.5, -0.5]), np.array([0.3, 1.0, 0.5])
    between = np.outer(sd, sd) * (correlation + (1 - correlation) * np.eye(3))
    root = RNG.normal(size=(40, 40)) * 0.05
    covariance = root @ root.T + 0.01 * np.eye(40)
    observed = DESIGN @ TRUTH + RNG.normal(size=40) * 0.1
    precision = DESIGN.T @ np.linalg.inv(covariance) @ DESIGN + np.linalg.inv(between)
    pull = DESIGN.T @ np.linalg.inv(covariance) @ observed + np.linalg.solve(between, mean)
    fitted = generalised_fit(linear, observed, Prior.correlated(mean, between), covariance, mean)
    np.testing.assert_allclose(fitted, np.linalg.solve(precision, pull), atol=1e-5)


def test_a_further_parameter_is_independent_of_the_others() -> None:
    covariance = np.array([[2.0, 0.5], [0.5, 1.0]])
    longer = Prior.correlated(np.array([1.0, 2.0]), covariance).extended(0.4, 0.25)
    assert longer.mean.tolist() == [1.0, 2.0, 0.4]
    expected = [[2, 0.5, 0], [0.5, 1, 0], [0, 0, 0.0625]]
    np.testing.assert_allclose(longer.root @ longer.root.T, expected, atol=1e-8)


def test_deviations_and_parameters_are_inverse() -> None:
    prior = Prior.correlated(np.array([1.0, 2.0]), np.array([[2.0, 0.5], [0.5, 1.0]]))
    parameters = np.array([[3.0, 1.0], [-2.0, 0.5]])
    found = prior.parameters(np.stack([prior.deviations(column) for column in parameters.T], axis=1))
    np.testing.assert_allclose(found, parameters)


def test_fits_survive_parameters_whose_exponentials_overflow() -> None:
    prior = Prior.independent(np.array([700.0]), np.array([1000.0]))
    fitted = robust_fit(
        lambda p: np.repeat(np.log(np.exp(p.T) + 1), 2, axis=1), np.array([2.0, 2.0]), prior, 0.02, "soft_l1", 1
    )
    assert np.isfinite(fitted).all()


def test_the_jacobian_of_a_linear_model_is_its_design() -> None:
    np.testing.assert_allclose(jacobian(linear, TRUTH), DESIGN, atol=1e-6)


def test_residual_weights_halve_at_the_width_and_fall_with_the_4th_power() -> None:
    assert residual_weights(np.array([0.0, 0.1, -0.3]), 0.1).tolist() == pytest.approx([1.0, 0.5, 1 / 82])


# --- Residual ---------------------------------------------------------------------------------------------------------
# Gaussian processes on residuals, compared with cases computed by hand and with known surfaces.

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
