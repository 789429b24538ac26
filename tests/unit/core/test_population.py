"""What other workloads and boards tell about a new workload: priors, unknown facts, and wrong references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize

import reference_models
from benchmarks.other_kinds import Case, measured_cases, simulated_cases
from reference_models import load
from tests.fakes.profiles import (
    FOUR_WORKERS,
    POWER,
    SPACE,
    TIME,
    WITHOUT_WORKERS,
    drawn,
    errors_pct,
    measured,
    reference,
    scaled,
)
from tests.fakes.short_forms import examples
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BOARDS, Hardware, Profile, Task, WorkloadFacts, board_named
from wattfleet.core.prediction import Prediction, RooflinePredictor, learned_member, restore_predictor
from wattfleet.core.prediction.roofline import (
    Member,
    Population,
    PowerParameters,
    Prior,
    TimeParameters,
    power_mw,
    settings_of,
    step_time_ms,
)
from wattfleet.core.prediction.roofline.estimation import Correction, Points, Process, Remainder, Surface
from wattfleet.core.prediction.roofline.hypothesis import Hypothesis
from wattfleet.core.prediction.roofline.population import Estimate, _fit_effects
from wattfleet.core.prediction.roofline.priors import Spreads, general_power_prior, general_time_prior

# --- Population -------------------------------------------------------------------------------------------------------
# The prior from a population of workloads, compared with explicit normal distributions.


Values = NDArray[np.float64]

AGX, NANO, UNKNOWN = BOARDS["agx-orin"].hardware, BOARDS["orin-nano"].hardware, Hardware(512, 64, 5)
FOUR = WorkloadFacts(loader_workers=4)
SPREADS = Spreads(
    workload=np.array([[0.2, 0.05], [0.05, 0.1]]),
    task=np.array([0.5, 0.3]),
    board=np.array([0.4, 0.2]),
    unknown_board=np.diag([4.0, 1.0]),
    anywhere=Prior.correlated(np.array([1.0, -1.0]), np.diag([4.0, 9.0])),
    share_of_board=0.2,
)
LOW, HIGH = np.diag([30.0, 20.0]), np.array([[900.0, 200.0], [200.0, 500.0]])
CASES = [
    (Task.TRAINING, AGX, np.array([2.0, 0.3]), HIGH),
    (Task.INFERENCE, AGX, np.array([1.2, 0.5]), LOW),
    (Task.TRAINING, NANO, np.array([2.6, -0.4]), HIGH),
    # The second parameter has no information.
    (Task.TRAINING, AGX, np.array([1.7, 99.0]), np.diag([400.0, 0.0])),
]


def by_size(of: Hardware, to: Hardware) -> Values:
    return np.array([np.log(of.gpu_cores / to.gpu_cores), 0.0])


def design(task: Task, board: Hardware) -> Values:
    return np.hstack([part * np.eye(2) for part in (1.0, float(task is Task.INFERENCE), float(board == NANO))])


ASSUMED_MEAN = np.array([1.0, -1.0, 0, 0, 0, 0])
ASSUMED = np.diag([4.0, 9.0, 0.25, 0.09, 0.16, 0.04])
VALUES = [value - by_size(AGX, board) for _, board, value, _ in CASES]
# A parameter without information has an enormous error.
ERRORS = [np.linalg.inv(information + 1e-9 * np.eye(2)) for *_, information in CASES]


def log_density(values: Values, mean: Values, covariance: Values) -> float:
    quadratic = (values - mean) @ np.linalg.solve(covariance, values - mean)
    return float(-0.5 * (quadratic + np.linalg.slogdet(covariance)[1]))


def log_posterior(between: Values, effects: Values) -> float:
    """The density that the estimates of effects and covariance maximise, up to a constant."""
    found = log_density(effects, ASSUMED_MEAN, ASSUMED)
    for (task, board, *_), value, error in zip(CASES, VALUES, ERRORS, strict=True):
        found += log_density(value, design(task, board) @ effects, between + error)
    wishart = np.linalg.slogdet(between)[1] + np.trace(np.linalg.solve(between, SPREADS.workload))
    return float(found - 0.5 * 4 * wishart)


def joint(between: Values) -> tuple[Values, Values]:
    """Mean and covariance of the effects, taken from the joint distribution of effects and all estimates."""
    designs = np.vstack([design(task, board) for task, board, *_ in CASES])
    noise = np.zeros((8, 8))
    for k, error in enumerate(ERRORS):
        noise[2 * k : 2 * k + 2, 2 * k : 2 * k + 2] = between + error
    gain = ASSUMED @ designs.T @ np.linalg.inv(designs @ ASSUMED @ designs.T + noise)
    mean = ASSUMED_MEAN + gain @ (np.concatenate(VALUES) - designs @ ASSUMED_MEAN)
    return mean, ASSUMED - gain @ designs @ ASSUMED


def learned():
    members = [
        Member(WorkloadFacts(task), board, *[Estimate(value, information, Surface.zero())] * 2)
        for task, board, value, information in CASES
    ]
    return _fit_effects(members, [each.time for each in members], [np.zeros(2)] * 4, SPREADS, by_size)


def test_the_effects_are_the_conditional_distribution_given_all_estimates() -> None:
    found = learned()
    mean, covariance = joint(found.between)
    np.testing.assert_allclose(found.mean, mean, atol=1e-4)
    np.testing.assert_allclose(found.covariance, covariance, atol=1e-4)


def test_the_covariance_between_workloads_is_the_most_probable_one() -> None:
    def cost(parameters: Values) -> float:
        root = np.array([[np.exp(parameters[0]), 0], [parameters[1], np.exp(parameters[2])]])
        return -log_posterior(root @ root.T, joint(root @ root.T)[0])

    best = minimize(cost, [-1.0, 0.0, -1.0], method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-10})
    root = np.array([[np.exp(best.x[0]), 0], [best.x[1], np.exp(best.x[2])]])
    np.testing.assert_allclose(learned().between, root @ root.T, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("task", Task)
@pytest.mark.parametrize("board", [AGX, NANO, UNKNOWN])
def test_the_prior_is_the_effects_and_the_covariance_between_workloads(task: Task, board: Hardware) -> None:
    found = learned()
    mean, covariance = found.workload(task, board)
    effects, uncertain = joint(found.between)
    parts = design(task, board)
    expected = found.between + parts @ uncertain @ parts.T
    if board == UNKNOWN:
        expected = expected + np.diag([0.16, 0.04])
    np.testing.assert_allclose(mean, parts @ effects + by_size(AGX, board), atol=1e-4)
    np.testing.assert_allclose(covariance, expected, atol=1e-4)


def population(factors: Sequence[float], information: float = 1e4) -> Population:
    """Workloads of the AGX Orin whose work is a multiple of a typical one, with typical power."""

    def estimate(mean: Values) -> Estimate:
        return Estimate(mean, information * np.eye(len(mean)), Surface.zero())

    typical = general_time_prior(200.0, FOUR).mean
    scaled = np.arange(len(typical)) < 7
    return Population(
        tuple(
            Member(FOUR, AGX, estimate(typical + np.log(by) * scaled), estimate(general_power_prior().mean))
            for by in factors
        )
    )


def sd(prior: Prior) -> Values:
    return np.sqrt(np.diag(prior.root @ prior.root.T))


def test_the_prior_lies_between_the_members() -> None:
    typical = general_time_prior(200.0, FOUR).mean
    found = population([3.0, 9.0]).time_prior(FOUR, AGX)
    assert (typical[:7] + np.log(3) < found.mean[:7]).all() and (found.mean[:7] < typical[:7] + np.log(9)).all()
    np.testing.assert_allclose(found.mean[7:], typical[7:], atol=0.01)


def test_an_unknown_board_is_less_certain_than_a_measured_one() -> None:
    members = population([1.0, 2.0, 4.0])
    for prior in (members.time_prior, members.power_prior):
        assert (sd(prior(FOUR, UNKNOWN)) > sd(prior(FOUR, AGX))).all()
        np.testing.assert_array_equal(prior(FOUR, None).mean, prior(FOUR, AGX).mean)


def test_members_that_differ_more_give_a_wider_prior() -> None:
    alike, unlike = (population(factors).time_prior(FOUR, AGX) for factors in ([4, 4, 4, 4], [1, 4, 4, 16]))
    assert (sd(unlike)[:7] > sd(alike)[:7]).all()
    # The parameters of work are correlated: a large network needs more of everything.
    covariance = unlike.root @ unlike.root.T
    assert covariance[0, 3] / (sd(unlike)[0] * sd(unlike)[3]) > 0.7


def test_a_task_that_no_member_has_is_less_certain() -> None:
    members = population([1.0, 2.0])
    inference = WorkloadFacts(Task.INFERENCE, loader_workers=4)
    assert (sd(members.time_prior(inference, AGX)) > sd(members.time_prior(FOUR, AGX))).all()


def test_members_of_whom_nothing_is_known_leave_the_assumptions() -> None:
    found = population([50.0, 80.0], information=0.0).time_prior(FOUR, AGX)
    np.testing.assert_allclose(found.mean, general_time_prior(200.0, FOUR).mean, atol=1e-6)


def test_a_population_without_a_member_does_not_know_it() -> None:
    members = population([1.0, 2.0, 100.0])
    kept, two = members.without([2]).time_prior(FOUR, AGX), population([1.0, 2.0]).time_prior(FOUR, AGX)
    np.testing.assert_array_equal(kept.mean, two.mean)


def test_priors_have_a_value_for_every_parameter() -> None:
    members = population([1.0])
    assert len(members.time_prior(FOUR, None).mean) == len(TimeParameters.__dataclass_fields__)
    assert len(members.power_prior(FOUR, None).mean) == len(PowerParameters.__dataclass_fields__)


# --- Hypotheses -------------------------------------------------------------------------------------------------------
# Unknown facts of a workload are inferred from its measurements, and wrong references get little weight.

ELSEWHERE = drawn(400, 99)
NOTHING = measured(SPACE[:0])


def columns(found: Prediction) -> np.ndarray:
    return np.stack([found.minibatch_ms, found.power_mw, found.time_log_sd, found.power_log_sd])


def test_hypotheses_are_weighed_until_the_facts_are_known() -> None:
    unknown = RooflinePredictor.fit(NOTHING, reference())
    assert [round(each.probability, 6) for each in unknown.hypotheses] == [0.8, 0.2]
    for workers in (0, 4):
        known = RooflinePredictor.fit(NOTHING, reference(), WorkloadFacts(loader_workers=workers))
        assert [each.probability for each in known.hypotheses] == [1.0]


@pytest.mark.parametrize(("time", "workers"), [(WITHOUT_WORKERS, 0), (scaled(2.0), 4)])
def test_loader_workers_are_recognised_from_ten_rows(time, workers: int) -> None:
    for seed in range(3):
        rows = measured(drawn(10, seed), time)
        found = RooflinePredictor.fit(rows, reference())
        known = RooflinePredictor.fit(rows, reference(), WorkloadFacts(loader_workers=workers))
        assert found.likeliest.probability > 0.8
        assert found.likeliest.time == known.likeliest.time
        assert len(known.hypotheses) == 1


def test_a_workload_without_loader_workers_is_predicted_from_ten_rows() -> None:
    truth = measured(ELSEWHERE, WITHOUT_WORKERS)
    found, misled = [], []
    for seed in range(3):
        rows = measured(drawn(10, seed), WITHOUT_WORKERS)
        found.append(errors_pct(RooflinePredictor.fit(rows, reference()).predict(ELSEWHERE), truth))
        wrong = RooflinePredictor.fit(rows, reference(), FOUR_WORKERS)
        misled.append(errors_pct(wrong.predict(ELSEWHERE), truth))
    assert np.median(found, axis=0)[0] < 6
    assert np.median(found, axis=0)[0] <= np.median(misled, axis=0)[0]


def test_a_mixture_is_as_good_as_its_best_reference() -> None:
    # An odd board: thirty times the work, half the power, and no overlap.
    odd_time = replace(scaled(30.0), gpu_overlap=0.01, launch_overlap=0.01, loading_overlap=0.01, workers=1.0)
    odd = RooflinePredictor.fit(measured(drawn(450, 3), odd_time, replace(POWER, floor_mw=2_000, gpu_busy_mw=1_000)))
    truth = measured(ELSEWHERE, scaled(2.0))
    alone, mixed = [], []
    for seed in range(4):
        rows = measured(drawn(10, seed), scaled(2.0))
        alone.append(errors_pct(RooflinePredictor.fit_mixed(rows, [reference()]).predict(ELSEWHERE), truth))
        mixed.append(errors_pct(RooflinePredictor.fit_mixed(rows, [odd, reference()]).predict(ELSEWHERE), truth))
    for one, other in zip(np.median(alone, axis=0), np.median(mixed, axis=0), strict=True):
        assert other < 1.15 * one + 0.1


def test_a_mixture_of_one_reference_is_a_transfer_from_it() -> None:
    rows = measured(drawn(8, 0), scaled(2.0))
    assert RooflinePredictor.fit_mixed(rows, [reference()]).save() == RooflinePredictor.fit(rows, reference()).save()
    with pytest.raises(InvalidInputError, match="at least 5, or give a reference"):
        RooflinePredictor.fit_mixed(rows.rows(np.arange(4)), [])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_hardly_any_rows_give_wide_intervals_that_hold(count: int) -> None:
    truth = measured(ELSEWHERE, scaled(5.0))
    held = []
    for seed in range(4):
        found = RooflinePredictor.fit(measured(drawn(count, seed), scaled(5.0)), reference()).predict(ELSEWHERE)
        assert np.isfinite(columns(found)).all() and (columns(found) > 0).all()
        assert np.median(found.time_log_sd) > (0.5 if count == 0 else 0.05)
        below, above = found.minibatch_ms_quantile(0.05), found.minibatch_ms_quantile(0.95)
        held.append(((below <= truth.minibatch_ms) & (truth.minibatch_ms <= above)).mean())
    assert np.mean(held) > 0.85


def rows_of_any_value(count: int) -> st.SearchStrategy[Profile]:
    """Rows with arbitrary times and powers, including ones that no physics explains."""
    modes = st.lists(st.integers(0, len(SPACE) - 1), min_size=count, max_size=count, unique=True)
    times = st.lists(st.floats(0.01, 1e6), min_size=count, max_size=count)
    powers = st.lists(st.floats(100, 1e6), min_size=count, max_size=count)
    return st.builds(lambda m, t, p: Profile(SPACE[m], np.array(t), np.array(p)), modes, times, powers)


@examples(15)
@given(profile=st.integers(1, 7).flatmap(rows_of_any_value))
def test_any_rows_give_finite_positive_predictions(profile: Profile) -> None:
    found = columns(RooflinePredictor.fit(profile, reference()).predict(SPACE[::500]))
    assert np.isfinite(found).all() and (found > 0).all()


@examples(8)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 12), factor=st.floats(0.1, 20))
def test_the_order_of_few_rows_does_not_matter(seed: int, count: int, factor: float) -> None:
    rows = measured(drawn(count, seed), scaled(factor))
    turned = rows.rows(np.random.default_rng(seed).permutation(count))
    one, other = (columns(RooflinePredictor.fit(each, reference()).predict(SPACE[::500])) for each in (rows, turned))
    np.testing.assert_allclose(one, other, rtol=2e-3)


def test_rows_at_one_mode_of_several_batches_can_be_fitted() -> None:
    same = np.repeat(SPACE[-1:], 6, axis=0)
    rows = measured(same, TIME, batch=np.array([1, 2, 4, 8, 16, 32]))
    for known in (reference(), None):
        found = columns(RooflinePredictor.fit(rows, known).predict(SPACE[::500], np.full(len(SPACE[::500]), 64)))
        assert np.isfinite(found).all() and (found > 0).all()


def unit(seed: int) -> tuple:
    """The parameters of one unit, a few percent off those of its kind. The workload is larger than any known one."""
    rng = np.random.default_rng(seed)
    time, power = scaled(2.5).log(), replace(POWER, gpu_busy_mw=16_000).log()
    return (
        type(TIME).from_log(time + rng.normal(0, 0.03, len(time))),
        type(POWER).from_log(power + rng.normal(0, 0.03, len(power))),
    )


def test_rows_of_other_units_predict_a_unit_that_has_measured_nothing() -> None:
    knows_units = reference().with_units([measured(drawn(6, 10 + k), *unit(k)) for k in range(3)])
    alone, together = [], []
    for seed in range(20, 23):
        truth = measured(ELSEWHERE, *unit(seed), noise=0.0)
        alone.append(errors_pct(RooflinePredictor.fit(NOTHING, reference()).predict(ELSEWHERE), truth))
        found = RooflinePredictor.fit(NOTHING, knows_units).predict(ELSEWHERE)
        together.append(errors_pct(found, truth))
        assert (np.abs(np.log(found.power_mw / truth.power_mw)) < 1.645 * found.power_log_sd).mean() > 0.8
    assert (np.median(together, axis=0) < np.median(alone, axis=0) / 2).all()
    assert np.median(together, axis=0)[0] < 6


def test_rows_of_units_that_train_something_else_are_recognised() -> None:
    own, truth = measured(drawn(5, 1), scaled(2.5)), measured(ELSEWHERE, scaled(2.5), noise=0.0)
    elsewhere = measured(drawn(16, 2), scaled(9.0), replace(POWER, gpu_busy_mw=20_000))
    alone = RooflinePredictor.fit(own, reference()).predict(ELSEWHERE)
    misled = RooflinePredictor.fit(own, reference().with_units([elsewhere])).predict(ELSEWHERE)
    assert errors_pct(misled, truth)[0] == pytest.approx(errors_pct(alone, truth)[0], abs=1.0)


def test_absurd_rows_of_units_change_hardly_anything() -> None:
    own, truth = measured(drawn(5, 1)), measured(ELSEWHERE, noise=0.0)
    alone = RooflinePredictor.fit(own, reference()).predict(ELSEWHERE)
    absurd = [replace(measured(drawn(5, 2)), minibatch_ms=np.full(5, ms)) for ms in (1e300, 1e-300)]
    found = RooflinePredictor.fit(own, reference().with_units(absurd)).predict(ELSEWHERE)
    assert errors_pct(found, truth) == pytest.approx(errors_pct(alone, truth), abs=1.0)
    assert reference().with_units([NOTHING]).units == ()


# --- Second workload --------------------------------------------------------------------------------------------------
# How a reference uses one workload measured on a board to predict the next one.

FACTS = WorkloadFacts(batch=16, loader_workers=4)
# Hardware that is in no population.
HARDWARE = Hardware(1024, 128, 10)


@cache
def shipped_reference() -> RooflinePredictor:
    found = restore_predictor(reference_models.load("agx_orin_resnet18"))
    assert isinstance(found, RooflinePredictor)
    return found.adapted(board_named("agx-orin").hardware, HARDWARE)


def workload(modes: np.ndarray, time_factor: float, busy_factor: float) -> Profile:
    """A workload on a board whose lowest power and voltage curves are unlike those of any other board."""
    known = shipped_reference().likeliest
    step = replace(
        known.time,
        compute_mcycles=time_factor * known.time.compute_mcycles,
        loading_mcycles=known.time.loading_mcycles / time_factor,
    )
    power = replace(
        known.power,
        floor_mw=1.8 * known.power.floor_mw,
        gpu_clock_mw=0.6 * known.power.gpu_clock_mw,
        gpu_voltage=2.5 * known.power.gpu_voltage,
        core_voltage=0.3 * known.power.core_voltage,
        gpu_busy_mw=busy_factor * known.power.gpu_busy_mw,
    )
    settings = settings_of(modes, None)
    return Profile(modes, step_time_ms(step, settings), power_mw(power, step, settings))


def first(rows: int = 50) -> Profile:
    return workload(drawn(rows, 1), time_factor=0.6, busy_factor=1.4)


def power_error(shipped_reference: RooflinePredictor, modes: np.ndarray) -> float:
    """Mean relative error of the power of the second workload after the measurement of some modes."""
    truth = workload(drawn(1000, 2), time_factor=1.5, busy_factor=0.8)
    fitted = RooflinePredictor.fit(workload(modes, time_factor=1.5, busy_factor=0.8), shipped_reference, FACTS)
    found = fitted.predict(truth.modes)
    return float(np.abs(found.power_mw / truth.power_mw - 1).mean())


@pytest.mark.parametrize("population", [True, False])
def test_a_second_workload_has_a_smaller_power_error(population: bool) -> None:
    start = shipped_reference() if population else replace(shipped_reference(), population=None)
    knows_board = start.with_workload(RooflinePredictor.fit(first(), start, FACTS), FACTS)
    alone, after = (np.mean([power_error(each, drawn(5, k)) for k in range(3, 6)]) for each in (start, knows_board))
    assert after < 0.75 * alone


def test_a_workload_that_was_not_measured_teaches_nothing() -> None:
    nothing = Profile(np.empty((0, 4)), np.empty(0), np.empty(0))
    learned = learned_member(RooflinePredictor.fit(nothing, shipped_reference(), FACTS).likeliest, FACTS, HARDWARE)
    assert not learned.time.information.any()
    assert not learned.power.information.any()


def test_a_corpus_can_be_learned_as_well() -> None:
    whole = RooflinePredictor.fit(first(500), facts=FACTS)
    knows_board = shipped_reference().with_workload(whole, FACTS)
    assert power_error(knows_board, drawn(5, 3)) < 0.75 * power_error(shipped_reference(), drawn(5, 3))


def test_a_reference_with_another_workload_survives_a_round_trip() -> None:
    knows_board = shipped_reference().with_workload(RooflinePredictor.fit(first(), shipped_reference(), FACTS), FACTS)
    read = RooflinePredictor.load(knows_board.save())
    assert read.save() == knows_board.save()
    assert power_error(read, drawn(5, 3)) == power_error(knows_board, drawn(5, 3))


def test_unknown_loader_workers_are_those_that_the_rows_showed() -> None:
    unknown = WorkloadFacts(batch=16)
    fitted = RooflinePredictor.load(RooflinePredictor.fit(first(), shipped_reference(), unknown).save())
    assert learned_member(fitted.likeliest, unknown, HARDWARE).facts.loader_workers == 4
    assert learned_member(fitted.likeliest, WorkloadFacts(loader_workers=2), HARDWARE).facts.loader_workers == 2


def test_a_member_says_what_its_rows_say_if_the_model_is_linear() -> None:
    """A linear model has an exact oracle: conditioning a joint normal distribution on all rows at once."""
    rng = np.random.default_rng(0)
    k, n, share, share_sd = len(PowerParameters.__dataclass_fields__), 30, 0.4, 0.25
    gradient = rng.normal(0, 1, (n, k + 1))
    points = Points(settings_of(drawn(n, 0), None), np.zeros(n))
    process, measurement_var = Process(0.1, 0.05), rng.uniform(1e-4, 1e-2, n)
    noise = process.covariance(points, points) + np.diag(measurement_var)
    observed = rng.normal(0, 1, n)

    def conditioned(mean: np.ndarray, covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gain = covariance @ gradient.T @ np.linalg.inv(gradient @ covariance @ gradient.T + noise)
        return mean + gain @ (observed - gradient @ mean), covariance - gain @ gradient @ covariance

    def prior(mean: np.ndarray, sd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.append(mean, share), np.diag(np.append(sd, share_sd) ** 2)

    mean, covariance = prior(rng.normal(0, 1, k), rng.uniform(0.2, 1, k))
    fitted, _ = conditioned(mean, covariance)
    weights = np.linalg.solve(noise, observed - gradient @ fitted)
    root = np.linalg.cholesky(covariance)
    correction = Correction(process, points, gradient, root, measurement_var, weights)
    remainder = Remainder(float(fitted[-1]), Surface.zero(), correction)
    time = TimeParameters(*np.ones(len(TimeParameters.__dataclass_fields__)))
    no_time = Remainder(0.0, Surface.zero(), Correction.none(len(astuple(time)) + 1, 0.1, np.array([16])))
    hypothesis = Hypothesis(1.0, time, PowerParameters.from_log(fitted[:-1]), no_time, remainder)
    learned: Estimate = learned_member(hypothesis, FACTS, HARDWARE).power

    other_mean, other_covariance = prior(rng.normal(0, 1, k), rng.uniform(0.2, 1, k))
    expected, expected_covariance = conditioned(other_mean, other_covariance)
    precision = np.linalg.inv(other_covariance[:k, :k])
    found_covariance = np.linalg.inv(precision + learned.information)
    found = found_covariance @ (precision @ other_mean[:k] + learned.information @ learned.mean)
    np.testing.assert_allclose(found_covariance, expected_covariance[:k, :k], atol=1e-10)
    np.testing.assert_allclose(found, expected[:k], atol=5e-3)


# --- Other kinds ------------------------------------------------------------------------------------------------------
# A workload that was measured on another kind of board: what follows for this one, and what cannot mislead it.

ORIN_NANO, AGX_ORIN = BOARDS["orin-nano"].hardware, BOARDS["agx-orin"].hardware


def shipped_population() -> Population:
    predictor = restore_predictor(load("agx_orin_resnet18"))
    assert isinstance(predictor, RooflinePredictor) and predictor.population is not None
    return predictor.population


def case_errors_pct(case: Case, helped: bool) -> dict[int, tuple[float, float]]:
    return {
        count: (outcome.time_pct, outcome.power_pct)
        for how, count, outcome in case.outcomes()
        if (how != "alone") is helped
    }


def test_the_prior_is_that_of_a_joint_normal_distribution() -> None:
    # With regular information, the parameters elsewhere are an observation with known errors: textbook conditioning.
    known = shipped_population()
    effects = known.time_effects
    k = len(effects.between)
    rng = np.random.default_rng(1)
    root = rng.normal(size=(k, k))
    information = root @ root.T + np.eye(k)
    observed = effects.workload(Task.TRAINING, ORIN_NANO)[0] + rng.normal(size=k)
    estimate = Estimate(observed, information, Surface.zero())
    mean, covariance = effects.workload(Task.TRAINING, AGX_ORIN, [(ORIN_NANO, estimate, np.zeros(k))])

    here, there = effects.workload(Task.TRAINING, AGX_ORIN), effects.workload(Task.TRAINING, ORIN_NANO)
    ours, theirs = (np.hstack([np.eye(k), np.zeros((k, k)), part * np.eye(k)]) for part in (0.0, 1.0))
    across = (1 - effects.spreads.share_of_board) * effects.between + ours @ effects.covariance @ theirs.T
    noisy = there[1] + np.linalg.inv(information)
    np.testing.assert_allclose(mean, here[0] + across @ np.linalg.solve(noisy, observed - there[0]), rtol=1e-6)
    expected = here[1] - across @ np.linalg.solve(noisy, across.T)
    np.testing.assert_allclose(covariance, expected, rtol=1e-6, atol=1e-9)


def test_without_information_elsewhere_nothing_changes() -> None:
    effects = shipped_population().power_effects
    k = len(effects.between)
    nothing = Estimate(np.full(k, 7.0), np.zeros((k, k)), Surface.zero())
    alone = effects.workload(Task.TRAINING, ORIN_NANO)
    known = effects.workload(Task.TRAINING, ORIN_NANO, [(AGX_ORIN, nothing, np.zeros(k))] * 2)
    np.testing.assert_allclose(known[0], alone[0])
    np.testing.assert_allclose(known[1], alone[1])


@pytest.mark.parametrize("boards", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_of_another_kind_of_board_help_a_board_without_measurements(boards: int) -> None:
    cases = list(simulated_cases(0))[:boards]  # one network on several kinds of board
    alone, helped = (np.array([list(case_errors_pct(case, how).values()) for case in cases]) for how in (False, True))
    assert (helped[:, 0, 0] < 0.9 * alone[:, 0, 0]).all(), "the time without measurements"
    assert (helped.mean(axis=0) < 1.05 * alone.mean(axis=0)).all(), "time and power, however many are measured"


def test_another_workload_under_the_same_name_does_little_harm() -> None:
    case = next(simulated_cases(0))
    other = case.elsewhere
    slower = Profile(other.modes, 8.0 * other.minibatch_ms, 1.3 * other.power_mw, other.batch)
    alone, misled = case_errors_pct(case, False), case_errors_pct(replace(case, elsewhere=slower), True)
    assert misled[5][0] < 1.3 * alone[5][0]


def test_rows_that_no_parameters_explain_are_ignored() -> None:
    case = next(simulated_cases(0))
    absurd = Profile(case.elsewhere.modes, np.full(16, 1e-7), np.full(16, 1e9), case.elsewhere.batch)
    reference = case.reference.with_elsewhere([(case.board, absurd)])
    fitted = RooflinePredictor.fit(case.own, reference, case.facts)
    found = fitted.predict(case.truth.modes, case.truth.batch)
    assert np.isfinite(found.minibatch_ms).all() and np.isfinite(found.power_mw).all()


@pytest.mark.data
@pytest.mark.slow
def test_resnet_on_the_orin_nano_is_better_known_with_rows_of_the_agx_orin(corpora: Path) -> None:
    errors = [
        (case_errors_pct(case, False), case_errors_pct(case, True))
        for seed in range(3)
        for case in measured_cases(corpora, seed)
        if "orin-nano" in case.label
    ]
    alone, helped = (np.median([each[k][0] for each in errors], axis=0) for k in (0, 1))
    assert alone[0] > 28 and helped[0] < 18
    assert helped[1] < alone[1]
