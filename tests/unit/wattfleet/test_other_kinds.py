"""A workload that was measured on another kind of board: what follows for this one, and what cannot mislead it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.other_kinds import Case, measured_cases, simulated_cases
from reference_models import load
from wattfleet.modes import BOARDS, Profile, Task, WorkloadFacts
from wattfleet.prediction import RooflinePredictor, restore_predictor
from wattfleet.prediction.roofline.estimation import Surface
from wattfleet.prediction.roofline.population import Estimate, Population

NANO, ORIN = BOARDS["orin-nano"].hardware, BOARDS["agx-orin"].hardware
FACTS = WorkloadFacts(batch=16, loader_workers=4)


def population() -> Population:
    predictor = restore_predictor(load("agx_orin_resnet18"))
    assert isinstance(predictor, RooflinePredictor) and predictor.population is not None
    return predictor.population


def errors_pct(case: Case, helped: bool) -> dict[int, tuple[float, float]]:
    return {
        count: (outcome.time_pct, outcome.power_pct)
        for how, count, outcome in case.outcomes()
        if (how != "alone") is helped
    }


def test_the_prior_is_that_of_a_joint_normal_distribution() -> None:
    # With regular information, the parameters elsewhere are an observation with known errors: textbook conditioning.
    known = population()
    effects = known.time_effects
    k = len(effects.between)
    rng = np.random.default_rng(1)
    root = rng.normal(size=(k, k))
    information = root @ root.T + np.eye(k)
    observed = effects.workload(Task.TRAINING, NANO)[0] + rng.normal(size=k)
    estimate = Estimate(observed, information, Surface.zero())
    mean, covariance = effects.workload(Task.TRAINING, ORIN, [(NANO, estimate, np.zeros(k))])

    here, there = effects.workload(Task.TRAINING, ORIN), effects.workload(Task.TRAINING, NANO)
    ours, theirs = (np.hstack([np.eye(k), np.zeros((k, k)), part * np.eye(k)]) for part in (0.0, 1.0))
    across = (1 - effects.spreads.share_of_board) * effects.between + ours @ effects.covariance @ theirs.T
    noisy = there[1] + np.linalg.inv(information)
    np.testing.assert_allclose(mean, here[0] + across @ np.linalg.solve(noisy, observed - there[0]), rtol=1e-6)
    expected = here[1] - across @ np.linalg.solve(noisy, across.T)
    np.testing.assert_allclose(covariance, expected, rtol=1e-6, atol=1e-9)


def test_without_information_elsewhere_nothing_changes() -> None:
    effects = population().power_effects
    k = len(effects.between)
    nothing = Estimate(np.full(k, 7.0), np.zeros((k, k)), Surface.zero())
    alone = effects.workload(Task.TRAINING, NANO)
    known = effects.workload(Task.TRAINING, NANO, [(ORIN, nothing, np.zeros(k))] * 2)
    np.testing.assert_allclose(known[0], alone[0])
    np.testing.assert_allclose(known[1], alone[1])


def test_rows_of_another_kind_of_board_help_a_board_without_measurements() -> None:
    cases = list(simulated_cases(0))[:4]  # one network on four kinds of board
    alone, helped = (np.array([list(errors_pct(case, how).values()) for case in cases]) for how in (False, True))
    assert (helped[:, 0, 0] < 0.9 * alone[:, 0, 0]).all(), "the time without measurements"
    assert (helped.mean(axis=0) < 1.05 * alone.mean(axis=0)).all(), "time and power, however many are measured"


def test_another_workload_under_the_same_name_does_little_harm() -> None:
    case = next(simulated_cases(0))
    other = case.elsewhere
    slower = Profile(other.modes, 8.0 * other.minibatch_ms, 1.3 * other.power_mw, other.batch)
    alone, misled = errors_pct(case, False), errors_pct(replace(case, elsewhere=slower), True)
    assert misled[5][0] < 1.3 * alone[5][0]


def test_rows_that_no_parameters_explain_are_ignored() -> None:
    case = next(simulated_cases(0))
    absurd = Profile(case.elsewhere.modes, np.full(16, 1e-7), np.full(16, 1e9), case.elsewhere.batch)
    reference = case.reference.with_elsewhere([(case.board, absurd)])
    fitted = RooflinePredictor.fit(case.own, reference, case.facts)
    found = fitted.predict(case.truth.modes, case.truth.batch)
    assert np.isfinite(found.minibatch_ms).all() and np.isfinite(found.power_mw).all()


@pytest.mark.data
def test_resnet_on_the_orin_nano_is_better_known_with_rows_of_the_agx_orin(corpora: Path) -> None:
    errors = [
        (errors_pct(case, False), errors_pct(case, True))
        for seed in range(3)
        for case in measured_cases(corpora, seed)
        if "orin-nano" in case.label
    ]
    alone, helped = (np.median([each[k][0] for each in errors], axis=0) for k in (0, 1))
    assert alone[0] > 28 and helped[0] < 18
    assert helped[1] < alone[1]
