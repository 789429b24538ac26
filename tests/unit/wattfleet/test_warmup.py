"""Warm-up: computed from CPU cycles, measured on simulated boards, and its effect on fronts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.profiling.profiler import Profiler
from wattfleet.choosing import POWER_QUANTILE, predicted_front
from wattfleet.modes import array_to_modes, modes_to_array
from wattfleet.prediction import Prediction, first_minibatch_gcycles, first_minibatch_s, steady_minibatch_s, warmup_s


def modes_at(*cpu_ghz: float) -> np.ndarray:
    return np.array([[4, ghz * 1e6, 6e8, 2e9] for ghz in cpu_ghz])


def test_warmup_follows_from_the_cycles_and_the_clock() -> None:
    seconds = warmup_s(modes_at(0.5, 1.0, 2.0), np.array([1_000.0, 500.0, 250.0]), 7.0)
    assert seconds.tolist() == [14 - 1, 7 - 0.5, 3.5 - 0.25]


def test_the_cycles_are_the_median_over_modes() -> None:
    modes = modes_at(0.5, 1.0, 2.0)
    assert first_minibatch_gcycles(modes, np.array([14_000.0, 7_100.0, 90_000.0])) == pytest.approx(7.1)


def test_without_a_known_first_minibatch_there_is_no_warmup() -> None:
    assert first_minibatch_gcycles(modes_at(), np.array([])) == 0
    assert warmup_s(modes_at(0.5), np.array([300.0]), 0.0).tolist() == [0]


def test_a_first_minibatch_that_is_not_slower_is_no_warmup() -> None:
    assert warmup_s(modes_at(2.0), np.array([5_000.0]), 7.0).tolist() == [0]


@given(st.floats(0.05, 20), st.integers(1, 3000), st.floats(0, 9), st.sampled_from([0.4, 0.9, 2.0]))
def test_the_steady_minibatch_is_recovered_from_the_whole_training(
    minibatch_s: float, minibatches: int, first_gcycles: float, cpu_ghz: float
) -> None:
    (mode,) = array_to_modes(modes_at(cpu_ghz))
    (start,) = warmup_s(modes_at(cpu_ghz), np.array([minibatch_s * 1e3]), first_gcycles)
    training_s = start + minibatches * minibatch_s
    first_s = first_minibatch_s(mode, first_gcycles)
    found = steady_minibatch_s(training_s, minibatches, first_s)
    if training_s <= 2 * first_s:
        assert found is None
    else:
        assert found == pytest.approx(minibatch_s)


@pytest.mark.parametrize("kind", ["agx-orin", "orin-nano", "orin-nx", "xavier-agx"])
def test_profiles_of_simulated_boards_recover_their_warmup(kind: str) -> None:
    found = []
    for seed in range(4):
        board = SimulatedDevice(kind, seed)
        rows = np.random.default_rng(seed).choice(len(board.modes), 50, replace=False)
        records = [Profiler(board).measure(mode, board.step) for mode in array_to_modes(board.modes[rows])]
        first_ms = np.array([record.first_minibatch_ms for record in records], dtype=np.float64)
        found.append(first_minibatch_gcycles(modes_to_array(record.mode for record in records), first_ms))
    assert np.mean(found) == pytest.approx(board.mean_first_gcycles, rel=0.1)


@given(st.integers(0, 999), st.sampled_from([1, 10, 300]), st.sampled_from([0.0, 2.0, 9.0]))
def test_a_predicted_front_equals_the_comparison_of_whole_trainings(
    seed: int, minibatches: int, first_gcycles: float
) -> None:
    draw = np.random.default_rng(seed)
    modes = modes_at(*draw.choice([0.4, 0.9, 2.0], 30))
    modes[:, 2] += np.arange(30)
    none = np.zeros(30)
    prediction = Prediction(draw.uniform(50, 900, 30), draw.uniform(5e3, 5e4, 30), none, none)
    first_s = first_gcycles / (modes[:, 1] / 1e6)
    steady_s = prediction.minibatch_ms / 1e3
    # The first minibatch includes the warm-up; it is never shorter than the others.
    seconds = np.maximum(first_s, steady_s) + (minibatches - 1) * steady_s
    watts = prediction.power_mw_quantile(POWER_QUANTILE)
    no_slower, no_hungrier = seconds[:, None] <= seconds, watts[:, None] <= watts
    beats = no_slower & no_hungrier & ((seconds[:, None] < seconds) | (watts[:, None] < watts))
    best = np.flatnonzero(~beats.any(axis=0))
    front = predicted_front(modes, prediction, minibatches, first_gcycles)
    assert set(front.modes[:, 2]) == set(modes[best, 2])
    assert front.one_epoch_s == pytest.approx(np.sort(seconds[best]))
