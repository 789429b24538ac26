"""Stored weights are read back, and damaged ones are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from safetensors.numpy import load, save

from wattfleet.choosing import spread_modes
from wattfleet.errors import CorruptReferenceError
from wattfleet.modes import BOARDS, Profile, Workload
from wattfleet.prediction import (
    Predictor,
    RooflinePredictor,
    pack_artefact,
    predictor_class,
    predictor_names,
    restore_predictor,
)
from wattfleet.prediction.roofline import PowerParameters, TimeParameters, power_mw, settings_of, step_time_ms
from wattfleet_evaluation.powertrain.networks import NEURONS, DenseNetwork
from wattfleet_evaluation.powertrain.predictors import PowerTrainPredictor, Quantity, ScratchPredictor
from wattfleet_evaluation.regression.predictors import (
    BoostingPredictor,
    ForestPredictor,
    LinearPredictor,
    TreePredictor,
)

SPACE = BOARDS["orin-nano"].space.array()
TIME = TimeParameters(270, 80, 16, 46, 7, 122, 3, 4, 1, 0.2, 1.9, 0.3, 6)
POWER = PowerParameters(6000, 20, 240, 650, 8300, 1100, 400, 6000, 400, 1.7, 1.2, 1.4, 0.4)


def profile_of(count: int) -> Profile:
    modes = spread_modes(SPACE, count, 0)
    settings = settings_of(modes, None)
    return Profile(modes, step_time_ms(TIME, settings), power_mw(POWER, TIME, settings))


def fitted(count: int) -> RooflinePredictor:
    return RooflinePredictor.fit(profile_of(count))


@pytest.fixture(scope="module")
def few() -> RooflinePredictor:
    return fitted(8)


@pytest.mark.parametrize("count", [8, 450])
def test_a_saved_predictor_predicts_bit_identically(count: int) -> None:
    predictor = fitted(count)
    restored = RooflinePredictor.load(predictor.save())
    before, after = predictor.predict(SPACE), restored.predict(SPACE)
    np.testing.assert_array_equal(after.minibatch_ms, before.minibatch_ms)
    np.testing.assert_array_equal(after.power_mw, before.power_mw)
    np.testing.assert_array_equal(after.time_log_sd, before.time_log_sd)
    np.testing.assert_array_equal(after.power_log_sd, before.power_log_sd)
    assert restored.save() == predictor.save()


@pytest.mark.parametrize("weights", [b"", b"\x00" * 100, b"\x80\x04\x95pickle", b"{}" * 50])
def test_bytes_in_another_format_are_refused(weights: bytes) -> None:
    with pytest.raises(CorruptReferenceError, match="not in safetensors format"):
        RooflinePredictor.load(weights)


def test_truncated_weights_are_refused(few: RooflinePredictor) -> None:
    with pytest.raises(CorruptReferenceError, match="fetch the reference again"):
        RooflinePredictor.load(few.save()[:-8])


def quantity() -> Quantity:
    """An untrained network."""
    rng, sizes = np.random.default_rng(0), (4, *NEURONS)
    weights = tuple(rng.normal(0, 0.1, (n, m)) for m, n in itertools.pairwise(sizes))
    network = DenseNetwork(SPACE.mean(0), SPACE.std(0), weights, tuple(np.zeros(n) for n in NEURONS))
    return Quantity(network, 10.0, 0.1)


@cache
def stored(kind: str) -> bytes:
    """One predictor of every kind."""
    made: dict[str, Callable[[], Predictor]] = {
        "roofline": lambda: fitted(8),
        "powertrain": lambda: PowerTrainPredictor(quantity(), quantity(), np.unique(SPACE[:, 2])),
        "scratch": lambda: ScratchPredictor(quantity(), quantity()),
        "linear": lambda: LinearPredictor.fit(profile_of(8)),
        "tree": lambda: TreePredictor.fit(profile_of(8)),
        "forest": lambda: ForestPredictor.fit(profile_of(8)),
        "boosting": lambda: BoostingPredictor.fit(profile_of(8)),
    }
    return made[kind]().save()


def load_as(kind: str, tensors: dict[str, np.ndarray]) -> Predictor:
    return predictor_class(kind).load(save(tensors))


ARRAYS = [(kind, name) for kind in predictor_names() for name in sorted(load(stored(kind)))]


@pytest.mark.parametrize(("kind", "name"), ARRAYS)
def test_every_array_is_needed_and_of_one_shape_and_type(kind: str, name: str) -> None:
    tensors = load(stored(kind))
    load_as(kind, tensors)
    without = {key: values for key, values in tensors.items() if key != name}
    with pytest.raises(CorruptReferenceError):
        load_as(kind, without)
    for wrong in (
        tensors[name].astype(np.float32),
        np.array(1.0),
        np.ones((7, 7, 7)),
        np.full_like(tensors[name], np.nan) if tensors[name].size else np.array([np.inf]),
    ):
        with pytest.raises(CorruptReferenceError):
            load_as(kind, {**tensors, name: wrong})


@pytest.mark.parametrize("value", [1e308, -1e308, 1e14])
@pytest.mark.parametrize(("kind", "name"), [pair for pair in ARRAYS if load(stored(pair[0]))[pair[1]].size])
def test_extreme_numbers_are_refused(kind: str, name: str, value: float) -> None:
    tensors = load(stored(kind))
    tensors[name].flat[0] = value
    with pytest.raises(CorruptReferenceError):
        load_as(kind, tensors)


@pytest.mark.parametrize("value", [-1.0, 0.0, 1e-300])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("roofline", "time"),
        ("roofline", "power"),
        ("roofline", "time_remainder.modes"),
        ("roofline", "power_remainder.measurement_var"),
        ("powertrain", "gpu_hz"),
        ("powertrain", "time.scale"),
        ("scratch", "power.floor_and_log_sd"),
        ("forest", "power_mw"),
    ],
)
def test_parameters_that_are_not_positive_are_refused(kind: str, name: str, value: float) -> None:
    tensors = load(stored(kind))
    tensors[name].flat[0] = value
    with pytest.raises(CorruptReferenceError):
        load_as(kind, tensors)


@pytest.mark.parametrize(
    ("name", "value"),
    [("time_remainder.process", -1.0), ("power_remainder.parameter_sd", 31.0), ("time_remainder.share", 31.0)],
)
def test_logarithms_out_of_range_are_refused(name: str, value: float) -> None:
    tensors = load(stored("roofline"))
    tensors[name].flat[0] = value
    with pytest.raises(CorruptReferenceError):
        load_as("roofline", tensors)


@pytest.mark.parametrize("value", [1e12, -1e12])
def test_a_reference_whose_predictions_overflow_is_not_restored(value: float) -> None:
    tensors = load(stored("roofline"))
    tensors["time_remainder.weights"][:] = value
    predictor = RooflinePredictor.load(save(tensors))
    artefact = pack_artefact(predictor, Workload("w", 16, 100), "orin-nano", {}, {})
    with pytest.raises(CorruptReferenceError, match="not finite and positive"):
        restore_predictor(artefact)
