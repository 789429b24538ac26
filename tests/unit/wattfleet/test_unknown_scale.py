"""Predictions from a prior that was estimated from few workloads, compared with simulated workloads and Student's t."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import multivariate_normal, multivariate_t, norm, t

from reference_models import load
from wattfleet.choosing import KnownModes, fastest_within_budget
from wattfleet.modes import BOARDS, Profile, WorkloadFacts
from wattfleet.prediction import RooflinePredictor, restore_predictor
from wattfleet.prediction.roofline import PowerParameters, Prior, TimeParameters, settings_of
from wattfleet.prediction.roofline.physics import power_mw, step_time_ms
from wattfleet.prediction.roofline.residual import MEASUREMENT_SD
from wattfleet.prediction.roofline.unknown_scale import unknown_scale

Values = NDArray[np.float64]

NO_ROWS = (np.empty(0), np.empty((0, 0)), np.empty((0, 0)))
ROOT = np.array([[0.4, 0, 0], [0.1, 0.3, 0], [-0.2, 0.1, 0.5]])
COVARIANCE = ROOT @ ROOT.T
ORIN = BOARDS["agx-orin"]
WORKERS = WorkloadFacts(loader_workers=4)
WORKLOADS = 400


@pytest.mark.parametrize("samples", [3.0, 7.0, 30.0])
def test_without_rows_the_interval_is_that_of_students_t(samples: float) -> None:
    found = unknown_scale(*NO_ROWS, samples)
    assert np.sqrt(found.factor) * norm.ppf(0.95) == pytest.approx(t(samples).ppf(0.95), rel=0.01)


def test_intervals_from_few_samples_hold_the_next_one_as_often_as_stated() -> None:
    rng = np.random.default_rng(0)
    estimated = np.sqrt((rng.normal(0, 0.2, (20_000, 5)) ** 2).mean(1))
    following = np.abs(rng.normal(0, 0.2, 20_000)) / estimated
    wide = np.sqrt(unknown_scale(*NO_ROWS, 5.0).factor)
    assert (following <= 1.645 * wide).mean() == pytest.approx(0.9, abs=0.01)
    assert (following <= 1.645).mean() < 0.86


def test_the_evidence_is_the_density_of_students_t() -> None:
    values = np.array([0.3, -0.6, 1.1])
    found = unknown_scale(values, COVARIANCE, 1e-9 * np.eye(3), 6.0)
    expected = multivariate_t(np.zeros(3), COVARIANCE, df=6).logpdf(values) + 1.5 * np.log(2 * np.pi)
    assert found.log_evidence == pytest.approx(expected, abs=0.05)


def test_a_known_covariance_keeps_its_size() -> None:
    values, noise = np.array([0.3, -0.6, 1.1]), np.diag([0.1, 0.2, 0.3])
    found = unknown_scale(values, COVARIANCE, noise, None)
    expected = multivariate_normal(np.zeros(3), COVARIANCE + noise).logpdf(values) + 1.5 * np.log(2 * np.pi)
    assert found.factor == 1
    assert found.log_evidence == pytest.approx(expected)


def test_rows_far_from_the_mean_widen_the_covariance_and_near_ones_narrow_it() -> None:
    noise = 0.01 * np.eye(3)
    near, none, far = (
        unknown_scale(size * np.array([1.0, -1.0, 1.0]), COVARIANCE, noise, 6.0).factor for size in (0.01, 0.6, 4.0)
    )
    assert near < none < far
    assert near < 1 < far


def drawn(prior: Prior, rng: np.random.Generator) -> Values:
    """The parameters of a workload, if only `samples` others showed how workloads differ."""
    assert prior.samples is not None
    size = prior.samples / rng.chisquare(prior.samples)
    return prior.parameters(np.sqrt(size) * rng.normal(size=len(prior.mean)))


def test_a_choice_before_any_measurement_keeps_its_budget() -> None:
    reference = restore_predictor(load("agx_orin_resnet18"), ORIN)
    assert isinstance(reference, RooflinePredictor) and reference.population is not None
    modes = ORIN.space.array()[::53]
    settings = settings_of(modes, None)
    predicted = RooflinePredictor.fit(Profile.of(()), reference, WORKERS).predict(modes)
    known = KnownModes.of(modes, predicted)
    budgets_mw = [18e3, 25e3, 35e3]
    chosen = [
        int(np.flatnonzero((modes == fastest_within_budget(known, budget).mode).all(1))[0]) for budget in budgets_mw
    ]
    of_time = reference.population.time_prior(WORKERS, ORIN.hardware)
    of_power = reference.population.power_prior(WORKERS, ORIN.hardware)
    rng = np.random.default_rng(1)
    over = np.zeros((WORKLOADS, 3))
    within, time_within = np.zeros((2, WORKLOADS, len(modes)))
    for k in range(WORKLOADS):
        time = TimeParameters.from_log(drawn(of_time, rng))
        power = PowerParameters.from_log(drawn(of_power, rng))
        measured = power_mw(power, time, settings) * np.exp(rng.normal(0, MEASUREMENT_SD, len(modes)))
        over[k] = measured[chosen] > budgets_mw
        deviation = np.log(measured / predicted.power_mw) / predicted.power_log_sd
        within[k] = np.abs(deviation) <= 1.645
        log_ratio = np.log(step_time_ms(time, settings) / predicted.minibatch_ms)
        time_within[k] = np.abs(log_ratio) <= 1.645 * predicted.time_log_sd
    # Three standard errors of 400 workloads are 3.3 percentage points of 5 %, and 4.5 of 90 %.
    assert (over.mean(0) <= 0.05 + 0.033).all()
    assert within.mean(0).min() >= 0.9 - 0.045
    assert 0.9 - 0.045 <= time_within.mean() <= 0.9 + 0.06
