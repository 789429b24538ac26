"""The default predictor: few measurements, batch sizes, further measurements, warm-up, and its explanations."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference_models
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.profiling.profiler import Profiler
from tests.fakes.profiles import POWER, TIME, drawn, errors_pct, measured, reference
from tests.fakes.short_forms import examples, first
from wattfleet.core.choosing import POWER_QUANTILE, predicted_front
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    BatchArray,
    FittedWorkload,
    PowerMode,
    Profile,
    Task,
    WorkloadFacts,
    array_to_modes,
    board_named,
    modes_to_array,
    read_profile,
)
from wattfleet.core.prediction import (
    Prediction,
    RooflinePredictor,
    conditioned,
    first_minibatch_gcycles,
    first_minibatch_s,
    pack_artefact,
    restore_predictor,
    steady_minibatch_s,
    warmup_s,
)
from wattfleet.core.prediction.roofline import (
    MEASUREMENT_SD,
    TimeParameters,
    correlation,
    explain,
    settings_of,
    step_time_ms,
)
from wattfleet.core.prediction.roofline.physics import step_shares

# --- Roofline ---------------------------------------------------------------------------------------------------------
# The default predictor with few or no measurements, and with missing knobs.


SPACE = board_named("agx-orin").space.array()
NOTHING = Profile(np.empty((0, 4)), np.empty(0), np.empty(0))


@cache
def shipped_reference() -> RooflinePredictor:
    found = restore_predictor(reference_models.load("agx_orin_resnet18"))
    assert isinstance(found, RooflinePredictor)
    return found


def measured_like_shipped(modes: np.ndarray, time_factor: float = 1.0, power_factor: float = 1.0) -> Profile:
    truth = shipped_reference().predict(modes)
    return Profile(modes, time_factor * truth.minibatch_ms, power_factor * truth.power_mw)


def assert_sound(prediction: Prediction) -> None:
    for values in (prediction.minibatch_ms, prediction.power_mw, prediction.time_log_sd, prediction.power_log_sd):
        assert np.isfinite(values).all()
        assert (values > 0).all()


def held(prediction: Prediction, truth: Profile) -> tuple[float, float]:
    """The shares of true times and powers that lie within the 90 % interval."""
    time = (prediction.minibatch_ms_quantile(0.05) <= truth.minibatch_ms) & (
        truth.minibatch_ms <= prediction.minibatch_ms_quantile(0.95)
    )
    power = (prediction.power_mw_quantile(0.05) <= truth.power_mw) & (
        truth.power_mw <= prediction.power_mw_quantile(0.95)
    )
    return float(time.mean()), float(power.mean())


def test_without_measurements_the_reference_predicts_wide_intervals() -> None:
    fitted = RooflinePredictor.fit(NOTHING, shipped_reference())
    found, known = fitted.predict(SPACE), shipped_reference().predict(SPACE)
    assert_sound(found)
    # The mean of all known workloads is predicted instead of the reference's own workload.
    assert np.median(np.abs(np.log(found.minibatch_ms / known.minibatch_ms))) < 0.7
    assert (found.time_log_sd > 10 * known.time_log_sd).all()
    assert RooflinePredictor.load(fitted.save()).save() == fitted.save()
    # Another workload on this board: less power and three times the time.
    assert min(held(found, measured_like_shipped(SPACE, time_factor=3, power_factor=0.9))) > 0.9


def test_too_few_modes_without_a_reference_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least 5, or give a reference"):
        RooflinePredictor.fit(NOTHING)
    with pytest.raises(InvalidInputError, match="at least 5"):
        RooflinePredictor.fit(measured_like_shipped(drawn(4, 0)))


def test_a_prior_that_fits_no_row_is_refused() -> None:
    population = shipped_reference().population
    assert population is not None
    # Each parameter has the largest value that can be stored, with the certainty of the shipped reference.
    members = tuple(
        replace(
            each,
            time=replace(each.time, mean=np.full_like(each.time.mean, 30.0)),
            power=replace(each.power, mean=np.full_like(each.power.mean, 30.0)),
        )
        for each in population.members
    )
    absurd = replace(shipped_reference(), population=replace(population, members=members))
    with pytest.raises(InvalidInputError, match="does not fit the measured rows: check the units of the rows, or"):
        RooflinePredictor.fit(measured_like_shipped(drawn(6, 0)), RooflinePredictor.load(absurd.save()))


def test_rows_far_from_any_unit_are_refused() -> None:
    modes = drawn(6, 0)
    with pytest.raises(InvalidInputError, match="does not fit the measured rows"):
        RooflinePredictor.fit(Profile(modes, np.full(6, 1e300), np.full(6, 1e-300)))


@pytest.mark.data
@pytest.mark.parametrize(
    ("target", "board"), [("agx_orin_mobilenetv3", "agx-orin"), ("orin_nano_resnet18", "orin-nano")]
)
def test_intervals_without_measurements_hold_on_measured_corpora(corpora: Path, target: str, board: str) -> None:
    profile = read_profile(corpora / f"{target}.csv")
    start = restore_predictor(reference_models.load("agx_orin_resnet18"), board_named(board))
    assert isinstance(start, RooflinePredictor)
    assert min(held(RooflinePredictor.fit(NOTHING, start).predict(profile.modes), profile)) > 0.9


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_each_measured_mode_narrows_the_intervals(count: int) -> None:
    truth = measured_like_shipped(drawn(count + 1, 7), time_factor=2.5, power_factor=0.6)
    fewer = RooflinePredictor.fit(truth.rows(np.arange(count - 1)), shipped_reference()).predict(SPACE)
    more = RooflinePredictor.fit(truth.rows(np.arange(count)), shipped_reference()).predict(SPACE)
    assert_sound(more)
    assert np.median(more.time_log_sd) < np.median(fewer.time_log_sd)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("knob", range(4))
def test_a_knob_that_never_varies_does_not_prevent_a_fit(knob: int, known: bool) -> None:
    held_at = SPACE[-1, knob]
    space = SPACE[SPACE[:, knob] == held_at]
    modes = space[np.random.default_rng(knob).choice(len(space), 30, replace=False)]
    profile = measured_like_shipped(modes, time_factor=1.5)
    fitted = RooflinePredictor.fit(profile, shipped_reference() if known else None)
    truth = measured_like_shipped(space, time_factor=1.5)
    found = fitted.predict(space)
    assert_sound(found)
    assert np.median(np.abs(found.minibatch_ms / truth.minibatch_ms - 1)) < (0.05 if known else 0.3)
    # At other values of the knob the model may be inaccurate, but its predictions are finite and positive.
    assert_sound(fitted.predict(SPACE))


@pytest.mark.parametrize(
    "mode",
    [[4.0, 2.4e6, 1e9, 1e9], [16.0, 4.5e6, 2.5e9, 1.05e10]],
    ids=["raspberry-pi", "workstation"],
)
def test_a_device_with_one_mode_is_predicted_as_measured(mode: list[float]) -> None:
    only = np.array([mode])
    fitted = RooflinePredictor.fit(Profile(only, np.array([150.0]), np.array([7_000.0])), shipped_reference())
    found = fitted.predict(only)
    assert_sound(found)
    assert found.minibatch_ms[0] == pytest.approx(150, rel=0.05)
    assert found.power_mw[0] == pytest.approx(7_000, rel=0.05)
    with pytest.raises(InvalidInputError, match="give a reference"):
        RooflinePredictor.fit(Profile(only, np.array([150.0]), np.array([7_000.0])))


# --- Roofline batches -------------------------------------------------------------------------------------------------
# The default predictor over power modes and batch sizes.

BATCHES = np.array([1, 4, 8, 16, 64])
# Small batches do not fill the GPU, and launching the kernels takes the same time for every batch.
GROWS = replace(TIME, compute_fixed=0.4, traffic_fixed=0.3, launch_fixed=8.0, loading_fixed=0.05)
ELSEWHERE = drawn(300, 98)


def over_batches(count: int, seed: int) -> Profile:
    modes = drawn(count, seed)
    return measured(modes, GROWS, batch=BATCHES[np.arange(count) % len(BATCHES)])


@cache
def fitted(count: int, seed: int = 0) -> RooflinePredictor:
    return RooflinePredictor.fit(over_batches(count, seed), reference())


def at(batch: int) -> BatchArray:
    return np.full(len(ELSEWHERE), batch)


def width(found: Prediction) -> float:
    return float(np.median(found.time_log_sd))


@pytest.mark.parametrize("batch", [1, 16, 32, 64])
def test_thirty_rows_predict_measured_and_unmeasured_batches(batch: int) -> None:
    truth = measured(ELSEWHERE, GROWS, batch=at(batch))
    errors = [errors_pct(fitted(30, seed).predict(ELSEWHERE, at(batch)), truth) for seed in range(3)]
    time_pct, power_pct = np.median(errors, axis=0)
    assert time_pct < 6 and power_pct < 4


@pytest.mark.parametrize("count", [30, 450])
def test_an_unmeasured_batch_has_wider_intervals(count: int) -> None:
    between = width(fitted(count).predict(ELSEWHERE, at(32)))
    for batch in (16, 64):
        assert between > 1.05 * width(fitted(count).predict(ELSEWHERE, at(batch)))


def test_a_corpus_of_one_batch_does_not_widen_its_intervals_at_that_batch() -> None:
    corpus = RooflinePredictor.fit(measured(drawn(450, 0)))
    own, other = corpus.predict(ELSEWHERE), corpus.predict(ELSEWHERE, at(128))
    truth = measured(ELSEWHERE)
    below, above = own.minibatch_ms_quantile(0.05), own.minibatch_ms_quantile(0.95)
    assert 0.8 < ((below <= truth.minibatch_ms) & (truth.minibatch_ms <= above)).mean() < 0.99
    assert own.time_log_sd.max() < 0.03 < width(other)


def test_a_batch_is_stated_after_a_fit_to_several() -> None:
    with pytest.raises(InvalidInputError, match="fitted to several batch sizes: state the batch size of each row"):
        fitted(30).predict(ELSEWHERE)
    again = RooflinePredictor.load(fitted(30).save())
    with pytest.raises(InvalidInputError, match="several batch sizes"):
        again.predict(ELSEWHERE)
    np.testing.assert_array_equal(
        again.predict(ELSEWHERE, at(32)).minibatch_ms, fitted(30).predict(ELSEWHERE, at(32)).minibatch_ms
    )


def test_an_artefact_of_several_batches_is_restored() -> None:
    artefact = pack_artefact(fitted(30), FittedWorkload("w", 64, 100), "agx-orin", {}, {})
    assert restore_predictor(artefact).save() == fitted(30).save()


@pytest.mark.parametrize("stated", ["rows", "facts"])
def test_the_only_batch_is_predicted_by_default(stated: str) -> None:
    modes = drawn(12, 0)
    if stated == "rows":
        found = RooflinePredictor.fit(measured(modes, GROWS, batch=np.full(12, 64)), reference())
    else:
        plain = measured(modes, GROWS, batch=np.full(12, 64))
        rows = Profile(plain.modes, plain.minibatch_ms, plain.power_mw)
        found = RooflinePredictor.fit(rows, reference(), WorkloadFacts(batch=64))
    assert found.batch == 64
    own, default = found.predict(ELSEWHERE, at(64)), found.predict(ELSEWHERE)
    np.testing.assert_array_equal(own.minibatch_ms, default.minibatch_ms)
    assert (found.predict(ELSEWHERE, at(1)).minibatch_ms < default.minibatch_ms).all()


def test_two_false_rows_of_a_hundred_hardly_change_a_fit() -> None:
    truth = measured(ELSEWHERE, GROWS, batch=at(16))
    before, after = [], []
    for seed in range(4):
        rows = over_batches(100, seed)
        time, power = rows.minibatch_ms.copy(), rows.power_mw.copy()
        time[[7, 41]] *= [2.5, 0.4]
        power[[7, 41]] *= [0.6, 1.7]
        damaged = Profile(rows.modes, time, power, rows.batch, rows.task)
        before.append(errors_pct(RooflinePredictor.fit(rows, reference()).predict(ELSEWHERE, at(16)), truth))
        after.append(errors_pct(RooflinePredictor.fit(damaged, reference()).predict(ELSEWHERE, at(16)), truth))
    for one, other in zip(np.median(before, axis=0), np.median(after, axis=0), strict=True):
        assert other < 1.25 * one + 0.1


def test_power_depends_on_the_batch_only_through_the_step() -> None:
    found = fitted(100).predict(ELSEWHERE, at(64))
    truth = measured(ELSEWHERE, GROWS, POWER, batch=at(64))
    assert errors_pct(found, truth)[1] < 2.5


# --- Conditioning -----------------------------------------------------------------------------------------------------
# Predictions after further measurements, compared with the conditional normal distribution by matrix inverse.

N = 12
MODES = SPACE[np.random.default_rng(0).choice(len(SPACE), N, replace=False)]
BATCH = np.random.default_rng(1).choice([1, 4, 16, 32], N)


def predicted(seed: int) -> Prediction:
    drawn = np.random.default_rng(seed)
    time, power, time_sd, power_sd = drawn.uniform([[5], [5e3], [0.02], [0.02]], [[500], [50e3], [0.6], [0.3]], (4, N))
    return Prediction(time, power, time_sd, power_sd)


def random_profile(rows: np.ndarray, seed: int = 5) -> Profile:
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


@examples(40)
@given(st.integers(0, 10_000), st.lists(st.integers(0, N - 1), min_size=1, max_size=6, unique=True))
def test_it_is_the_conditional_normal_distribution(seed: int, rows: list[int]) -> None:
    before, found = predicted(seed), random_profile(np.array(rows), seed)
    after = conditioned(before, MODES, BATCH, np.array(rows), found)
    time, time_sd = by_inverse(np.log(before.minibatch_ms), before.time_log_sd, rows, found.minibatch_ms)
    power, power_sd = by_inverse(np.log(before.power_mw), before.power_log_sd, rows, found.power_mw)
    np.testing.assert_allclose(np.log(after.minibatch_ms), time, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.log(after.power_mw), power, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(after.time_log_sd, time_sd, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.power_log_sd, power_sd, rtol=1e-4, atol=1e-5)


@given(st.permutations(range(5)))
def test_the_order_of_the_measurements_does_not_matter(order: list[int]) -> None:
    rows, found = np.arange(5), random_profile(np.arange(5))
    one = conditioned(predicted(3), MODES, BATCH, rows, found)
    other = conditioned(predicted(3), MODES, BATCH, rows[order], found.rows(np.array(order)))
    np.testing.assert_allclose(one.minibatch_ms, other.minibatch_ms, rtol=1e-8)
    np.testing.assert_allclose(one.power_log_sd, other.power_log_sd, rtol=1e-6)


def test_a_measured_row_takes_its_measured_value() -> None:
    rows, before = np.array([4]), predicted(0)
    found = random_profile(rows)
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
        conditioned(before, MODES, BATCH, np.array([], dtype=np.intp), random_profile(np.array([], dtype=np.intp)))
        is before
    )


def test_other_lengths_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="12 predictions for 11 rows, and 1 measurements for 1"):
        conditioned(predicted(0), MODES[1:], BATCH[1:], np.array([0]), random_profile(np.array([0])))
    with pytest.raises(InvalidInputError, match="12 predictions for 12 rows, and 2 measurements for 1"):
        conditioned(predicted(0), MODES, BATCH, np.array([0]), random_profile(np.array([0, 1])))


def test_measuring_makes_no_prediction_less_certain() -> None:
    before = predicted(0)
    after = before
    for seed in range(5):
        after = conditioned(after, MODES, BATCH, np.array([0]), random_profile(np.array([0]), seed))
    assert (after.time_log_sd <= before.time_log_sd + 1e-12).all()


# --- Warm-up ----------------------------------------------------------------------------------------------------------
# Warm-up: computed from CPU cycles, measured on simulated boards, and its effect on fronts.


def modes_at(*cpu_ghz: float) -> np.ndarray:
    return np.array([[4, ghz * 1e6, 6e8, 2e9] for ghz in cpu_ghz])


def test_warmup_follows_from_the_cycles_and_the_clock() -> None:
    seconds = warmup_s(modes_at(0.5, 1.0, 2.0), np.array([1_000.0, 500.0, 250.0]), 7.0)
    assert seconds.tolist() == [14 - 1, 7 - 0.5, 3.5 - 0.25]


def test_the_cycles_are_the_median_over_modes() -> None:
    modes = modes_at(0.5, 1.0, 2.0)
    assert first_minibatch_gcycles(modes, np.array([14_000.0, 7_100.0, 90_000.0])) == pytest.approx(7.1)


def test_without_a_known_first_minibatch_there_is_no_warmup() -> None:
    assert first_minibatch_gcycles(modes_at(), np.array([])) == 0
    assert warmup_s(modes_at(0.5), np.array([300.0]), 0.0).tolist() == [0]


def test_a_first_minibatch_that_is_not_slower_is_no_warmup() -> None:
    assert warmup_s(modes_at(2.0), np.array([5_000.0]), 7.0).tolist() == [0]


@given(st.floats(0.05, 20), st.integers(1, 3000), st.floats(0, 9), st.sampled_from([0.4, 0.9, 2.0]))
def test_the_steady_minibatch_is_recovered_from_the_whole_training(
    minibatch_s: float, minibatches: int, first_gcycles: float, cpu_ghz: float
) -> None:
    (mode,) = array_to_modes(modes_at(cpu_ghz))
    (start,) = warmup_s(modes_at(cpu_ghz), np.array([minibatch_s * 1e3]), first_gcycles)
    training_s = start + minibatches * minibatch_s
    first_s = first_minibatch_s(mode, first_gcycles)
    found = steady_minibatch_s(training_s, minibatches, first_s)
    if training_s <= 2 * first_s:
        assert found is None
    else:
        assert found == pytest.approx(minibatch_s)


@pytest.mark.parametrize("kind", first(2, ["agx-orin", "orin-nano", "orin-nx", "xavier-agx"]))
def test_profiles_of_simulated_boards_recover_their_warmup(kind: str) -> None:
    found = []
    for seed in range(4):
        board = SimulatedDevice(kind, seed)
        rows = np.random.default_rng(seed).choice(len(board.modes), 50, replace=False)
        records = [Profiler(board).measure(mode, board.step) for mode in array_to_modes(board.modes[rows])]
        first_ms = np.array([record.first_minibatch_ms for record in records], dtype=np.float64)
        found.append(first_minibatch_gcycles(modes_to_array(record.mode for record in records), first_ms))
    assert np.mean(found) == pytest.approx(board.mean_first_gcycles, rel=0.1)


@given(st.integers(0, 999), st.sampled_from([1, 10, 300]), st.sampled_from([0.0, 2.0, 9.0]))
def test_a_predicted_front_equals_the_comparison_of_whole_trainings(
    seed: int, minibatches: int, first_gcycles: float
) -> None:
    draw = np.random.default_rng(seed)
    modes = modes_at(*draw.choice([0.4, 0.9, 2.0], 30))
    modes[:, 2] += np.arange(30)
    none = np.zeros(30)
    prediction = Prediction(draw.uniform(50, 900, 30), draw.uniform(5e3, 5e4, 30), none, none)
    first_s = first_gcycles / (modes[:, 1] / 1e6)
    steady_s = prediction.minibatch_ms / 1e3
    # The first minibatch includes the warm-up; it is never shorter than the others.
    seconds = np.maximum(first_s, steady_s) + (minibatches - 1) * steady_s
    watts = prediction.power_mw_quantile(POWER_QUANTILE)
    no_slower, no_hungrier = seconds[:, None] <= seconds, watts[:, None] <= watts
    beats = no_slower & no_hungrier & ((seconds[:, None] < seconds) | (watts[:, None] < watts))
    best = np.flatnonzero(~beats.any(axis=0))
    front = predicted_front(modes, prediction, minibatches, first_gcycles)
    assert set(front.modes[:, 2]) == set(modes[best, 2])
    assert front.one_epoch_s == pytest.approx(np.sort(seconds[best]))


# --- Explain ----------------------------------------------------------------------------------------------------------
# The explanation of what limits a training step, as shares and as text.

SETTINGS = settings_of(board_named("agx-orin").space.array(), None)
BALANCED = TimeParameters(
    loading_mcycles=40,
    loading_stall_mcycles=10,
    launch_mcycles=20,
    compute_mcycles=20,
    serial_compute_mcycles=8,
    traffic_mcycles=30,
    fixed_ms=1,
    workers=4,
    main_cores=1,
    background_ghz=0.1,
    gpu_overlap=0.8,
    launch_overlap=1.2,
    loading_overlap=3,
)
MODE = PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000)
WORK = {
    "loading": ("loading_mcycles", "loading_stall_mcycles"),
    "launch": ("launch_mcycles",),
    "compute": ("compute_mcycles", "serial_compute_mcycles"),
    "memory": ("traffic_mcycles",),
    "fixed": ("fixed_ms",),
}


def test_shares_are_positive_and_sum_to_one() -> None:
    shares = np.array(astuple(step_shares(BALANCED, SETTINGS)))
    assert (shares >= 0).all()
    np.testing.assert_allclose(shares.sum(0), 1, rtol=1e-12)


@pytest.mark.parametrize("resource", WORK)
def test_a_share_is_the_time_saved_by_less_work(resource: str) -> None:
    less = 1 - 1e-6
    changed = replace(BALANCED, **{name: less * getattr(BALANCED, name) for name in WORK[resource]})
    saved = 1 - step_time_ms(changed, SETTINGS[::50]) / step_time_ms(BALANCED, SETTINGS[::50])
    np.testing.assert_allclose(saved / 1e-6, getattr(step_shares(BALANCED, SETTINGS[::50]), resource), atol=1e-4)


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        ("loading", "more cores or a higher CPU clock"),
        ("launch", "more cores do not help"),
        ("compute", "a higher GPU clock"),
        ("memory", "a higher memory clock"),
        ("fixed", "No knob makes it faster"),
    ],
)
def test_the_resource_with_the_most_work_is_named(resource: str, expected: str) -> None:
    theta = replace(BALANCED, **{name: 200 * getattr(BALANCED, name) for name in WORK[resource]})
    (found,) = explain(theta, np.array([[*MODE, 16]], dtype=np.float64))
    assert found.mode == MODE
    assert found.bound == resource
    assert list(found.shares.values()) == sorted(found.shares.values(), reverse=True)
    assert expected in found.words()


def test_a_second_important_resource_is_named() -> None:
    theta = replace(BALANCED, gpu_overlap=1e-6, compute_mcycles=1e4, traffic_mcycles=2e4)
    (found,) = explain(theta, np.array([[*MODE, 16]], dtype=np.float64))
    assert ", then by " in found.words()


def test_the_shipped_reference_is_bound_by_the_slowed_resource() -> None:
    reference = restore_predictor(reference_models.load("agx_orin_resnet18"))
    assert isinstance(reference, RooflinePredictor)
    assert reference.explain(MODE._replace(cores=2, cpu_khz=268_800)).bound == "loading"
    assert reference.explain(MODE._replace(mem_hz=204_000_000)).bound == "memory"
    assert reference.explain(MODE._replace(gpu_hz=114_750_000)).bound == "compute"
