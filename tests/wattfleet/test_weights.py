"""Weights that were damaged are refused, whatever is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load, save

from wattfleet.boards import BOARDS
from wattfleet.errors import CorruptReferenceError
from wattfleet.physics import PowerParameters, TimeParameters, power_mw, step_time_ms
from wattfleet.profile import Profile
from wattfleet.roofline import RooflinePredictor
from wattfleet.sampling import spread_modes

SPACE = BOARDS["orin-nano"].space.array()
TIME = TimeParameters(270, 80, 16, 46, 7, 122, 3, 4, 1, 0.2, 1.9, 0.3, 6)
POWER = PowerParameters(6000, 20, 240, 650, 8300, 1100, 400, 6000, 400, 1.7, 1.2, 1.4, 0.4)


def fitted(count: int) -> RooflinePredictor:
    modes = spread_modes(SPACE, count, 0)
    profile = Profile(modes, step_time_ms(TIME, modes), power_mw(POWER, TIME, modes))
    return RooflinePredictor.fit(profile)


@pytest.fixture(scope="module")
def few() -> RooflinePredictor:
    return fitted(8)


@pytest.mark.parametrize("count", [8, 450])
def test_what_was_saved_predicts_to_the_last_bit_alike(count: int) -> None:
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


def names() -> list[str]:
    return sorted(load(fitted(8).save()))


@pytest.mark.parametrize("name", names())
def test_every_array_is_needed_and_of_one_shape_and_type(few: RooflinePredictor, name: str) -> None:
    tensors = load(few.save())
    without = {key: values for key, values in tensors.items() if key != name}
    with pytest.raises(CorruptReferenceError):
        RooflinePredictor.load(save(without))
    for wrong in (
        tensors[name].astype(np.float32),
        np.array(1.0),
        np.ones((7, 7, 7)),
        np.full_like(tensors[name], np.nan) if tensors[name].size else np.array([np.inf]),
    ):
        with pytest.raises(CorruptReferenceError):
            RooflinePredictor.load(save({**tensors, name: wrong}))


@pytest.mark.parametrize(
    "name", ["time", "power", "time_remainder.modes", "power_remainder.measurement_var", "time_remainder.process"]
)
def test_numbers_out_of_range_are_refused(few: RooflinePredictor, name: str) -> None:
    tensors = load(few.save())
    tensors[name].flat[0] = -1.0
    with pytest.raises(CorruptReferenceError):
        RooflinePredictor.load(save(tensors))
