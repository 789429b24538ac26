"""The physical model: cases computed by hand, and invariants."""

from __future__ import annotations

from dataclasses import astuple, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from wattfleet.modes import BOARDS
from wattfleet.prediction.roofline import (
    PowerParameters,
    TimeParameters,
    power_mw,
    settings_of,
    step_parts,
    step_time_ms,
)
from wattfleet.prediction.roofline.estimation import jacobian
from wattfleet.prediction.roofline.physics import loader_cores, log_time_gradient

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
