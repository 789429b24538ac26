"""How a reference uses one workload measured on a board to predict the next one."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import cache

import numpy as np
import pytest

import reference_models
from wattfleet.modes import Hardware, Profile, WorkloadFacts, board_named
from wattfleet.prediction import RooflinePredictor, learned_member, restore_predictor
from wattfleet.prediction.roofline import PowerParameters, TimeParameters, power_mw, settings_of, step_time_ms
from wattfleet.prediction.roofline.estimation import Correction, Points, Process, Remainder, Surface
from wattfleet.prediction.roofline.hypothesis import Hypothesis
from wattfleet.prediction.roofline.population import Estimate

SPACE = board_named("agx-orin").space.array()
FACTS = WorkloadFacts(batch=16, loader_workers=4)
# Hardware that is in no population.
HARDWARE = Hardware(1024, 128, 10)


@cache
def reference() -> RooflinePredictor:
    found = restore_predictor(reference_models.load("agx_orin_resnet18"))
    assert isinstance(found, RooflinePredictor)
    return found.adapted(board_named("agx-orin").hardware, HARDWARE)


def drawn(count: int, seed: int) -> np.ndarray:
    return SPACE[np.random.default_rng(seed).choice(len(SPACE), count, replace=False)]


def workload(modes: np.ndarray, time_factor: float, busy_factor: float) -> Profile:
    """A workload on a board whose lowest power and voltage curves are unlike those of any other board."""
    known = reference().likeliest
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


def power_error(reference: RooflinePredictor, modes: np.ndarray) -> float:
    """Mean relative error of the power of the second workload after the measurement of some modes."""
    truth = workload(drawn(1000, 2), time_factor=1.5, busy_factor=0.8)
    fitted = RooflinePredictor.fit(workload(modes, time_factor=1.5, busy_factor=0.8), reference, FACTS)
    found = fitted.predict(truth.modes)
    return float(np.abs(found.power_mw / truth.power_mw - 1).mean())


@pytest.mark.parametrize("population", [True, False])
def test_a_second_workload_has_a_smaller_power_error(population: bool) -> None:
    start = reference() if population else replace(reference(), population=None)
    knows_board = start.with_workload(RooflinePredictor.fit(first(), start, FACTS), FACTS)
    alone, after = (np.mean([power_error(each, drawn(5, k)) for k in range(3, 6)]) for each in (start, knows_board))
    assert after < 0.75 * alone


def test_a_workload_that_was_not_measured_teaches_nothing() -> None:
    nothing = Profile(np.empty((0, 4)), np.empty(0), np.empty(0))
    learned = learned_member(RooflinePredictor.fit(nothing, reference(), FACTS).likeliest, FACTS, HARDWARE)
    assert not learned.time.information.any()
    assert not learned.power.information.any()


def test_a_corpus_can_be_learned_as_well() -> None:
    whole = RooflinePredictor.fit(first(500), facts=FACTS)
    knows_board = reference().with_workload(whole, FACTS)
    assert power_error(knows_board, drawn(5, 3)) < 0.75 * power_error(reference(), drawn(5, 3))


def test_a_reference_with_another_workload_survives_a_round_trip() -> None:
    knows_board = reference().with_workload(RooflinePredictor.fit(first(), reference(), FACTS), FACTS)
    read = RooflinePredictor.load(knows_board.save())
    assert read.save() == knows_board.save()
    assert power_error(read, drawn(5, 3)) == power_error(knows_board, drawn(5, 3))


def test_unknown_loader_workers_are_those_that_the_rows_showed() -> None:
    unknown = WorkloadFacts(batch=16)
    fitted = RooflinePredictor.load(RooflinePredictor.fit(first(), reference(), unknown).save())
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
