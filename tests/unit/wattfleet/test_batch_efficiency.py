"""The efficiency of batch sizes, compared with figures computed by hand and simulated gradients."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.choosing import BatchEfficiency, gradient_noise_scale, scaled_learning_rate
from wattfleet.errors import InvalidInputError

MEASURED = BatchEfficiency(
    "resnet18", (4, 16, 64), (0.25, 0.5, 1.0), (0.1, 0.0, 0.2), "cifar10, 5 seeds", unreached=(32,)
)

ascending = st.lists(st.integers(1, 4096), min_size=1, max_size=12, unique=True).map(sorted).map(tuple)


def test_known_batches_are_looked_up_and_others_interpolated_between_them() -> None:
    assert [MEASURED.of(batch) for batch in (4, 16, 64)] == [0.25, 0.5, 1.0]
    # 8 is halfway between 4 and 16 in logarithms, so that its efficiency is their geometric mean.
    assert MEASURED.of(8) == pytest.approx(math.sqrt(0.25 * 0.5))


@pytest.mark.parametrize(("batch", "said"), [(2, "known: 4, 16, 64"), (128, "known: 4, 16, 64"), (32, "did not reach")])
def test_nothing_is_extrapolated_or_invented_for_an_unreached_batch(batch: int, said: str) -> None:
    assert not MEASURED.knows(batch)
    with pytest.raises(InvalidInputError, match=said):
        MEASURED.of(batch)


@given(ascending, st.data())
def test_interpolation_lies_between_the_neighbours(batches: tuple[int, ...], data: st.DataObject) -> None:
    values = tuple(data.draw(st.floats(0.01, 100)) for _ in batches[1:])
    known = BatchEfficiency("m", batches, (*values, 1.0), (0.0,) * len(batches), "test")
    batch = data.draw(st.integers(batches[0], batches[-1]))
    near = known.of(max(b for b in batches if b <= batch)), known.of(min(b for b in batches if b >= batch))
    assert min(near) * (1 - 1e-9) <= known.of(batch) <= max(near) * (1 + 1e-9)


def test_the_efficiency_of_another_model_is_refused() -> None:
    assert MEASURED.for_model("resnet18") is MEASURED
    with pytest.raises(InvalidInputError, match="belongs to resnet18, not to mobilenet"):
        MEASURED.for_model("mobilenet")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": " "}, "model"),
        ({"origin": "a\nb"}, "origin"),
        ({"batches": (), "relative_samples": (), "spread": ()}, "1 to 64 batch sizes"),
        ({"batches": (4, 4, 64)}, "distinct and ascending"),
        ({"batches": (16, 4, 64)}, "distinct and ascending"),
        ({"batches": (0, 16, 64)}, "whole number"),
        ({"batches": (4, 16.5, 64)}, "whole number"),
        ({"batches": (True, 16, 64)}, "whole number"),
        ({"batches": (4, 16, 10**400)}, "whole number"),
        ({"relative_samples": (0.5, 1.0)}, "2 values for 3"),
        ({"relative_samples": (0.0, 0.5, 1.0)}, "above 0"),
        ({"relative_samples": (math.nan, 0.5, 1.0)}, "finite"),
        ({"relative_samples": (0.5, 1.0, 2.0)}, "must be 1 for the largest batch, 64"),
        ({"spread": (0.1, -0.1, 0.0)}, "at least 0"),
        ({"spread": (0.1, math.inf, 0.0)}, "finite"),
        ({"unreached": (64,)}, "64 is also among"),
    ],
)
def test_wrong_figures_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        replace(MEASURED, **change)


def test_runs_give_the_median_relative_to_the_largest_batch_that_reached_it() -> None:
    found = BatchEfficiency.from_runs(
        "resnet18",
        {
            64: [8000.0, 10000.0, 12500.0],
            8: [2000.0, 4000.0],
            # One of three runs failed: the median of (3000, 5000, never) is 5000.
            16: [3000.0, None, 5000.0],
            # If half or all of the runs of a batch size failed, it is left out.
            128: [9000.0, None],
            32: [None, None, None],
            256: [],
        },
    )
    assert found.batches == (8, 16, 64)
    assert found.relative_samples == pytest.approx((0.3, 0.5, 1.0))
    assert found.unreached == (32, 128, 256)
    assert not found.is_estimate
    # The logarithms of 8000, 10000 and 12500 are log 1.25 apart, so this is their standard deviation.
    assert found.spread[2] == pytest.approx(math.log(1.25))
    assert found.spread[0] == pytest.approx(math.log(2) / math.sqrt(2))


def test_a_single_run_states_no_spread() -> None:
    found = BatchEfficiency.from_runs("m", {4: [100.0], 8: [150.0]})
    assert (found.spread, found.relative_samples) == ((0.0, 0.0), pytest.approx((2 / 3, 1.0)))


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ({}, "no batch size reached"),
        ({8: [None, None], 16: [None]}, "lower the accuracy"),
        ({8: [0.0]}, "above 0"),
        ({8: [math.nan]}, "finite"),
        ({8: [math.inf]}, "finite"),
        ({0: [10.0]}, "whole number"),
    ],
)
def test_runs_that_give_no_efficiency_are_refused(runs: dict[int, list[float | None]], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        BatchEfficiency.from_runs("m", runs)


def test_the_noise_scale_gives_an_estimate_that_says_so() -> None:
    found = BatchEfficiency.from_noise_scale("m", [64, 16], 32)
    # 1 + 16 / 32 = 1.5 and 1 + 64 / 32 = 3.
    assert (found.batches, found.relative_samples) == ((16, 64), pytest.approx((0.5, 1.0)))
    assert found.is_estimate and "noise scale of 32" in found.origin


@pytest.mark.parametrize(("batches", "scale"), [([], 32.0), ([8, 8], 32.0), ([0], 32.0), ([8], 0.0), ([8], math.nan)])
def test_wrong_noise_scales_and_batches_are_refused(batches: list[int], scale: float) -> None:
    with pytest.raises(InvalidInputError):
        BatchEfficiency.from_noise_scale("m", batches, scale)


def test_the_noise_scale_of_simulated_gradients_is_found() -> None:
    """Gradients with a known mean and a known covariance of one sample have a known noise scale."""
    rng = np.random.default_rng(0)
    mean, sd = np.full(10, 0.5), 2.0
    true_scale = 10 * sd**2 / (mean @ mean)
    norms = {
        batch: float(((mean + sd / math.sqrt(batch) * rng.standard_normal((20_000, 10))) ** 2).sum(axis=1).mean())
        for batch in (4, 64)
    }
    assert gradient_noise_scale(4, norms[4], 64, norms[64]) == pytest.approx(true_scale, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 2.0, 8, 1.0), "whole number"),
        ((8, 2.0, 8, 1.0), "must be above the small one"),
        ((2, -1.0, 8, 1.0), "finite and above 0"),
        ((2, 2.0, 8, math.nan), "finite and above 0"),
        ((2, 1.0, 8, 1.0), "average over more minibatches"),
        ((2, 1.0, 8, 2.0), "average over more minibatches"),
        ((2, 8.0, 8, 1.0), "average over more minibatches"),
    ],
)
def test_norms_without_a_noise_scale_are_refused(arguments: tuple[int, float, int, float], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        gradient_noise_scale(*arguments)


@pytest.mark.parametrize(("optimizer", "rate"), [("adam", 0.05), ("adamw", 0.05), ("sgd", 0.025), ("none", 0.1)])
def test_the_learning_rate_is_scaled_as_the_optimizer_needs(optimizer: str, rate: float) -> None:
    assert scaled_learning_rate(0.1, 128, 32, optimizer) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0.1, 128, 32, "lion"), "adamw"),
        ((0.0, 128, 32, "sgd"), "above 0"),
        ((0.1, 0, 32, "sgd"), "base_batch"),
        ((0.1, 128, 0, "sgd"), "batch"),
    ],
)
def test_learning_rates_that_cannot_be_scaled_are_refused(arguments: tuple[float, int, int, str], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        scaled_learning_rate(*arguments)


def test_json_restores_the_same_figures() -> None:
    assert BatchEfficiency.from_json(MEASURED.to_json()) == MEASURED
    assert BatchEfficiency.from_json(MEASURED.to_json().encode()) == MEASURED


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format_version": 2}, "format 2"),
        ({"format_version": True}, "format True"),
        ({"extra": 1}, "unknown extra"),
        ({"model": None}, "model must be str"),
        ({"is_estimate": 1}, "is_estimate must be bool"),
        ({"batches": "4"}, "batches must be list"),
        ({"batches": [4.0, 16, 64]}, "list of at most 64 int"),
        ({"spread": [True, 0, 0]}, "list of at most 64 float"),
        ({"spread": [10**400, 0, 0]}, "too large"),
        ({"spread": [math.nan, 0, 0]}, "finite"),
        ({"batches": list(range(1, 100))}, "at most 64"),
    ],
)
def test_damaged_json_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        BatchEfficiency.from_json(json.dumps({**json.loads(MEASURED.to_json()), **change}))


@pytest.mark.parametrize("text", ["", "{", "[]", "1", b"\xff", "[" * 100_000])
def test_text_that_is_no_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidInputError, match="batch efficiency"):
        BatchEfficiency.from_json(text)


def test_json_without_a_key_is_refused() -> None:
    content = json.loads(MEASURED.to_json())
    del content["spread"]
    with pytest.raises(InvalidInputError, match="lacks spread"):
        BatchEfficiency.from_json(json.dumps(content))
