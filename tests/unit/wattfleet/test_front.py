"""Fronts compared with the definition of Pareto optimality."""

from __future__ import annotations

import math
from random import Random
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.fronts import columns_of, front
from wattfleet.choosing import MAX_FRONT_POINTS, Front, pareto_front, predicted_front
from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeArray, PowerMode
from wattfleet.prediction import Prediction

QUANTILE_95 = NormalDist().inv_cdf(0.95)
FEW = st.integers(0, 6).map(float)
ANY = st.floats(0, 1e9)


def optimal(points: list[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other point dominates, found by comparing all pairs."""
    kept = [
        k
        for k, (time, power) in enumerate(points)
        if not any(
            other[0] <= time and other[1] <= power and (other != (time, power) or earlier < k)
            for earlier, other in enumerate(points)
            if earlier != k
        )
    ]
    return sorted(kept, key=lambda k: points[k])


@given(st.lists(st.tuples(FEW, FEW), max_size=20) | st.lists(st.tuples(ANY, ANY), max_size=20))
def test_a_front_equals_the_comparison_of_all_pairs(points: list[tuple[float, float]]) -> None:
    time, power = (np.array([point[axis] for point in points], dtype=np.float64) for axis in (0, 1))
    found = pareto_front(time, power)
    assert found.tolist() == optimal(points)
    assert (np.diff(time[found]) > 0).all() and (np.diff(power[found]) < 0).all()


def prediction(ms: list[float], mw: list[float], power_log_sd: float | list[float] = 0.0) -> Prediction:
    n = len(ms)
    return Prediction(np.array(ms), np.array(mw), np.full(n, 0.02), np.zeros(n) + np.array(power_log_sd))


def numbered(n: int) -> ModeArray:
    """Modes with the core counts 1 to n."""
    return np.array([[1 + k, 1e6, 1e9, 2e9] for k in range(n)], dtype=np.float64)


def test_a_predicted_front_is_in_seconds_per_epoch_and_watts() -> None:
    predicted = predicted_front(numbered(3), prediction([50, 80, 90], [30_000, 20_000, 25_000], 0.1), 3125)
    assert predicted.epoch_s.tolist() == [156.25, 250.0]
    assert predicted.power_w.tolist() == [30.0, 20.0]
    assert predicted.planned_w == pytest.approx([30 * math.exp(0.1 * QUANTILE_95), 20 * math.exp(0.1 * QUANTILE_95)])
    assert predicted.epoch_log_sd.tolist() == [0.02, 0.02]
    assert [predicted.mode(k) for k in range(len(predicted))] == [
        PowerMode(1, 1_000_000, 1_000_000_000, 2_000_000_000),
        PowerMode(2, 1_000_000, 1_000_000_000, 2_000_000_000),
    ]


def test_a_mode_with_uncertain_power_loses_to_a_more_certain_one() -> None:
    # The slower mode draws 1 W less by the median, but not by the planned watts.
    ms, mw, unsure = [50.0, 60.0], [20_000.0, 19_000.0], [0.01, 0.2]
    assert predicted_front(numbered(2), prediction(ms, mw, unsure), 100).modes[:, 0].tolist() == [1]
    assert predicted_front(numbered(2), prediction(ms, mw, 0.01), 100).modes[:, 0].tolist() == [1, 2]


@settings(max_examples=10)
@given(st.randoms(use_true_random=False))
@pytest.mark.parametrize("optimal_points", [1, 2, 63, 64, 65, 66, 100, 129, 400])
def test_thinning_keeps_the_ends_and_only_optimal_points(optimal_points: int, random: Random) -> None:
    seconds = sorted(random.sample(range(1, 5_000), optimal_points))
    watts = sorted(random.sample(range(1, 5_000), optimal_points), reverse=True)
    best = [(float(time), float(power)) for time, power in zip(seconds, watts, strict=True)]
    points = [*best, *((time + 1, power + 1) for time, power in best[::3])]  # and some dominated points
    random.shuffle(points)
    predicted = predicted_front(
        numbered(len(points)), prediction([time for time, _ in points], [1e3 * power for _, power in points]), 1_000
    )
    kept = list(zip(predicted.epoch_s.tolist(), predicted.power_w.tolist(), strict=True))
    assert len(kept) <= MAX_FRONT_POINTS == 64
    assert set(kept) <= set(best)
    assert (kept[0], kept[-1]) == (best[0], best[-1])
    if len(best) <= MAX_FRONT_POINTS:
        assert kept == best


def test_thinning_spreads_points_evenly_over_the_watts() -> None:
    # Most modes have almost the lowest power, where one watt more or less hardly matters.
    watts = np.concatenate([np.linspace(50, 10.2, 200), np.linspace(10.1, 10, 2_000)])
    predicted = predicted_front(
        numbered(len(watts)), prediction(list(range(1, len(watts) + 1)), (watts * 1e3).tolist()), 1_000
    )
    step_w = (50 - 10) / (MAX_FRONT_POINTS - 1)
    assert len(predicted) >= MAX_FRONT_POINTS - 1
    assert -np.diff(predicted.power_w).min() < 1.5 * step_w
    assert predicted.power_w[[0, -1]] == pytest.approx([50, 10])


def test_a_front_may_have_one_to_max_points() -> None:
    assert len(front((10, 20))) == 1
    assert len(front(*((1.0 + k, 100.0 - k) for k in range(MAX_FRONT_POINTS)))) == MAX_FRONT_POINTS


def test_planned_watts_grow_with_the_standard_deviation() -> None:
    assert front((1, 20)).planned_w.tolist() == [20]
    # Of 100,000 draws of such a power, 5 % exceed the planned watts.
    draws = 20 * np.exp(0.15 * np.random.default_rng(3).standard_normal(100_000))
    assert (draws > front((1, 20), power_log_sd=0.15).planned_w[0]).mean() == pytest.approx(0.05, abs=0.003)


GOOD = front((10, 30), (20, 20), (30, 10))


def test_points_are_ordered_by_epoch_time_including_warmup() -> None:
    shown = front((10, 30), (8, 20), warmup_s=[1, 4])
    assert shown.one_epoch_s.tolist() == [11, 12]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epoch_s": np.array([10.0, 10.0, 30.0])}, "times must rise"),
        ({"epoch_s": np.array([10.0, 30.0, 20.0])}, "times must rise"),
        ({"power_w": np.array([30.0, 30.0, 10.0])}, "planned watts fall"),
        ({"power_w": np.array([10.0, 20.0, 30.0])}, "planned watts fall"),
        # The medians fall, but the planned watts do not.
        ({"power_log_sd": np.array([0.0, 0.4, 0.9])}, "planned watts fall"),
        ({"epoch_s": np.array([0.0, 20.0, 30.0])}, "finite and above zero"),
        ({"epoch_s": np.array([10.0, np.nan, 30.0])}, "finite and above zero"),
        ({"epoch_s": np.array([10.0, 20.0, np.inf])}, "finite and above zero"),
        ({"power_w": np.array([30.0, 20.0, -1.0])}, "finite and above zero"),
        ({"power_w": np.array([np.nan, 20.0, 10.0])}, "finite and above zero"),
        ({"modes": np.zeros((3, 4))}, "finite and above zero"),
        ({"epoch_log_sd": np.array([0.1, -0.1, 0.1])}, "not negative"),
        ({"power_log_sd": np.array([0.1, np.nan, 0.1])}, "not negative"),
        ({"warmup_s": np.array([0.0, -1.0, 0.0])}, "not negative"),
        ({"warmup_s": np.array([0.0, np.inf, 0.0])}, "not negative"),
        ({"warmup_s": np.array([0.0, 0.0])}, r"\[k, 4\] modes"),
        # The epochs get longer, but the times including warm-up do not.
        ({"warmup_s": np.array([15.0, 0.0, 0.0])}, "times must rise"),
        ({"epoch_s": np.array([10.0, 20.0])}, r"\[k, 4\] modes"),
        ({"power_log_sd": np.zeros((3, 1))}, r"\[k, 4\] modes"),
        ({"modes": np.ones((3, 5))}, r"\[k, 4\] modes"),
    ],
)
def test_invalid_columns_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        Front(**(columns_of(GOOD) | changes))


@pytest.mark.parametrize("k", [0, MAX_FRONT_POINTS + 1])
def test_a_front_of_no_or_too_many_points_is_refused(k: int) -> None:
    with pytest.raises(InvalidInputError, match=f"1 to {MAX_FRONT_POINTS} points, not {k}"):
        front(*((1.0 + step, 100.0 - step) for step in range(k)))


def test_a_front_over_several_batches_names_the_batch_of_each_point() -> None:
    # An epoch of 160 samples has 160, 40 or 10 steps. The second mode is dominated, and the last one is not plausible.
    per_epoch, batch = np.array([160.0, 40, 10, 10]), np.array([1, 4, 16, 16])
    found = predicted_front(
        numbered(4), prediction([10, 90, 100, 1e15], [20_000, 30_000, 25_000, 1_000]), per_epoch, batch=batch
    )
    assert found.epoch_s.tolist() == [1.0, 1.6]
    assert found.batch is not None
    assert found.batch.tolist() == [16, 1]


def test_fronts_of_other_batches_are_not_equal() -> None:
    def of(batch: list[int] | None) -> Front:
        values = None if batch is None else np.array(batch)
        return predicted_front(numbered(2), prediction([50, 80], [30_000, 20_000]), 100, batch=values)

    assert of([1, 4]).equals(of([1, 4])) and of(None).equals(of(None))
    assert not of([1, 4]).equals(of([1, 16]))
    assert not of([1, 4]).equals(of(None)) and not of(None).equals(of([1, 4]))


@pytest.mark.parametrize("batch", [[1], [0, 4]])
def test_impossible_batches_of_a_front_are_refused(batch: list[int]) -> None:
    two = front((1.0, 20.0), (2.0, 10.0))
    with pytest.raises(InvalidInputError, match="one for each point, at least 1 sample each"):
        Front(two.modes, two.epoch_s, two.power_w, two.epoch_log_sd, two.power_log_sd, two.warmup_s, np.array(batch))
