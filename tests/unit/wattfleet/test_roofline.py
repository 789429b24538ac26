"""The default predictor with few or no measurements, and with missing knobs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import reference_models
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile, board_named, read_profile
from wattfleet.prediction import Prediction, RooflinePredictor, restore_predictor

SPACE = board_named("agx-orin").space.array()
NOTHING = Profile(np.empty((0, 4)), np.empty(0), np.empty(0))


@cache
def reference() -> RooflinePredictor:
    found = restore_predictor(reference_models.load("agx_orin_resnet18"))
    assert isinstance(found, RooflinePredictor)
    return found


def measured(modes: np.ndarray, time_factor: float = 1.0, power_factor: float = 1.0) -> Profile:
    truth = reference().predict(modes)
    return Profile(modes, time_factor * truth.minibatch_ms, power_factor * truth.power_mw)


def drawn(count: int, seed: int) -> np.ndarray:
    return SPACE[np.random.default_rng(seed).choice(len(SPACE), count, replace=False)]


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
    fitted = RooflinePredictor.fit(NOTHING, reference())
    found, known = fitted.predict(SPACE), reference().predict(SPACE)
    assert_sound(found)
    # The mean of all known workloads is predicted instead of the reference's own workload.
    assert np.median(np.abs(np.log(found.minibatch_ms / known.minibatch_ms))) < 0.7
    assert (found.time_log_sd > 10 * known.time_log_sd).all()
    assert RooflinePredictor.load(fitted.save()).save() == fitted.save()
    # Another workload on this board: less power and three times the time.
    assert min(held(found, measured(SPACE, time_factor=3, power_factor=0.9))) > 0.9


def test_too_few_modes_without_a_reference_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least 5, or give a reference"):
        RooflinePredictor.fit(NOTHING)
    with pytest.raises(InvalidInputError, match="at least 5"):
        RooflinePredictor.fit(measured(drawn(4, 0)))


def test_a_prior_that_fits_no_row_is_refused() -> None:
    population = reference().population
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
    absurd = replace(reference(), population=replace(population, members=members))
    with pytest.raises(InvalidInputError, match="does not fit the measured rows: check the units of the rows, or"):
        RooflinePredictor.fit(measured(drawn(6, 0)), RooflinePredictor.load(absurd.save()))


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
    truth = measured(drawn(count + 1, 7), time_factor=2.5, power_factor=0.6)
    fewer = RooflinePredictor.fit(truth.rows(np.arange(count - 1)), reference()).predict(SPACE)
    more = RooflinePredictor.fit(truth.rows(np.arange(count)), reference()).predict(SPACE)
    assert_sound(more)
    assert np.median(more.time_log_sd) < np.median(fewer.time_log_sd)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("knob", range(4))
def test_a_knob_that_never_varies_does_not_prevent_a_fit(knob: int, known: bool) -> None:
    held_at = SPACE[-1, knob]
    space = SPACE[SPACE[:, knob] == held_at]
    modes = space[np.random.default_rng(knob).choice(len(space), 30, replace=False)]
    profile = measured(modes, time_factor=1.5)
    fitted = RooflinePredictor.fit(profile, reference() if known else None)
    truth = measured(space, time_factor=1.5)
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
    fitted = RooflinePredictor.fit(Profile(only, np.array([150.0]), np.array([7_000.0])), reference())
    found = fitted.predict(only)
    assert_sound(found)
    assert found.minibatch_ms[0] == pytest.approx(150, rel=0.05)
    assert found.power_mw[0] == pytest.approx(7_000, rel=0.05)
    with pytest.raises(InvalidInputError, match="give a reference"):
        RooflinePredictor.fit(Profile(only, np.array([150.0]), np.array([7_000.0])))
