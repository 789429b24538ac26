"""The quantiles of time, power and energy that apps and strategies get, compared with samples."""

from __future__ import annotations

import numpy as np
import pytest

from wattfleet_flower import Quantiles
from wattfleet_flower.server.predictions import training_prediction
from wattfleet_proto.v1 import planning_pb2, power_pb2

MODE = power_pb2.PowerMode(cores=4, cpu_khz=1_510_400, gpu_hz=624_750_000, mem_hz=2_133_000_000)


def assignment(**predicted: float) -> planning_pb2.Assignment:
    fields = {"epoch_s": 40.0, "power_w": 12.0, "warmup_s": 5.0, "epoch_log_sd": 0.2, "power_log_sd": 0.1}
    return planning_pb2.Assignment(mode=MODE, **{**fields, **predicted})  # type: ignore[arg-type]


def of_samples(samples: np.ndarray) -> list[float]:
    return [float(each) for each in np.quantile(samples, (0.05, 0.5, 0.95))]


def values(quantiles: Quantiles) -> list[float]:
    return [quantiles.low, quantiles.median, quantiles.high]


def test_quantiles_are_those_of_lognormal_errors() -> None:
    rng = np.random.default_rng(0)
    epoch_s = 40.0 * np.exp(0.2 * rng.standard_normal(1_000_000))
    power_w = 12.0 * np.exp(0.1 * rng.standard_normal(1_000_000))
    predicted = training_prediction(assignment(), epochs=3.0)
    assert values(predicted.epoch_s) == pytest.approx(of_samples(epoch_s), rel=0.01)
    assert values(predicted.training_s) == pytest.approx(of_samples(5.0 + 3.0 * epoch_s), rel=0.01)
    assert values(predicted.power_w) == pytest.approx(of_samples(power_w), rel=0.01)
    assert values(predicted.epoch_kj) == pytest.approx(of_samples(epoch_s * power_w / 1e3), rel=0.01)
    # The start's time is certain, but the energy's interval treats it as uncertain and is slightly too wide.
    energy = of_samples((5.0 + 3.0 * epoch_s) * power_w / 1e3)
    assert values(predicted.training_kj) == pytest.approx(energy, rel=0.02)
    assert predicted.training_kj.low <= energy[0] and energy[2] <= predicted.training_kj.high


def test_what_is_not_known_is_none_or_without_an_interval() -> None:
    predicted = training_prediction(assignment(epoch_log_sd=0.0, power_log_sd=0.0), epochs=1.0)
    assert values(predicted.epoch_s) == [40.0] * 3
    assert (predicted.batch, predicted.profiled_modes) == (None, 0)
    assert training_prediction(assignment(batch=16, profiled_modes=7), 1.0).batch == 16
    assert not predicted.is_length_assumed
    assumed = training_prediction(assignment(length_assumed=True), 1.0)
    assert assumed.is_length_assumed and assumed.to_record("", True)["length-assumed"] is True
