"""Which modes are chosen to be measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from wattfleet.boards import BOARDS
from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeArray, ModeSpace
from wattfleet.predictor import Prediction
from wattfleet.sampling import descending, front_modes, spread_modes

SPACE = BOARDS["orin-nano"].space
MODES = SPACE.array()


def rows(modes: ModeArray) -> set[tuple[float, ...]]:
    return {tuple(row) for row in modes.tolist()}


def predicted(time: NDArray[np.float64], power: NDArray[np.float64]) -> Prediction:
    return Prediction(time, power, np.full(len(time), 0.03), np.full(len(time), 0.02))


@given(count=st.integers(1, 80), seed=st.integers(0, 2**32 - 1))
def test_spread_modes_are_distinct_modes_of_the_space_with_the_highest(count: int, seed: int) -> None:
    chosen = spread_modes(MODES, count, seed)
    assert chosen.shape == (count, 4)
    assert len(rows(chosen)) == count
    assert rows(chosen) <= rows(MODES)
    assert tuple(SPACE.highest) in rows(chosen)


def test_the_same_seed_chooses_the_same_modes_another_seed_others() -> None:
    np.testing.assert_array_equal(spread_modes(MODES, 20, 3), spread_modes(MODES, 20, 3))
    assert rows(spread_modes(MODES, 20, 3)) != rows(spread_modes(MODES, 20, 4))


def test_all_modes_can_be_chosen() -> None:
    assert rows(spread_modes(MODES, len(MODES), 0)) == rows(MODES)


def test_modes_that_differ_in_one_knob_only_are_spread_too() -> None:
    line = MODES[(MODES[:, 0] == 4) & (MODES[:, 2] == MODES[0, 2]) & (MODES[:, 3] == MODES[0, 3])]
    clocks = np.sort(np.log(spread_modes(line, 6, 0)[:, 1]))
    assert clocks[-1] - clocks[0] > 0.6 * np.ptp(np.log(line[:, 1]))


def largest_hole(chosen: ModeArray) -> float:
    """Distance from the mode that is farthest from every chosen one, in shares of each knob's log range."""
    unit = (np.log(MODES) - np.log(MODES).min(0)) / np.ptp(np.log(MODES), axis=0)
    taken = (np.log(chosen) - np.log(MODES).min(0)) / np.ptp(np.log(MODES), axis=0)
    return float(np.linalg.norm(unit[:, None] - taken[None], axis=2).min(axis=1).max())


@pytest.mark.parametrize("count", [10, 30])
def test_spread_modes_leave_smaller_holes_than_modes_drawn_at_random(count: int) -> None:
    spread = np.mean([largest_hole(spread_modes(MODES, count, seed)) for seed in range(8)])
    rng = np.random.default_rng(0)
    drawn = np.mean([largest_hole(MODES[rng.choice(len(MODES), count, replace=False)]) for _ in range(8)])
    assert spread < drawn


@pytest.mark.parametrize("count", [0, -1, len(MODES) + 1])
def test_numbers_of_modes_that_cannot_be_are_refused(count: int) -> None:
    with pytest.raises(InvalidInputError, match="cannot be chosen"):
        spread_modes(MODES, count, 0)


@pytest.mark.parametrize("choose", [0, 1])
def test_modes_come_in_descending_order(choose: int) -> None:
    time = np.random.default_rng(0).uniform(1, 2, len(MODES))
    chosen = spread_modes(MODES, 25, 0) if choose else front_modes(predicted(time, 3e4 / time), MODES, MODES[:0], 25)
    keys = [(cpu, gpu, mem, cores) for cores, cpu, gpu, mem in chosen.tolist()]
    assert keys == sorted(keys, reverse=True)


def test_descending_keeps_the_modes() -> None:
    some = MODES[::7]
    assert rows(descending(some)) == rows(some)


FOUR = ModeSpace((1, 2), (500_000, 900_000), (300_000_000,), (2_133_000_000,)).array()


def test_the_front_of_four_modes_by_hand() -> None:
    # The third is dominated: as hungry as the second, and slower.
    prediction = predicted(np.array([40.0, 20.0, 30.0, 10.0]), np.array([5e3, 8e3, 8e3, 2e4]))
    chosen = front_modes(prediction, FOUR, FOUR[:0], 3)
    assert rows(chosen) == rows(FOUR[[0, 1, 3]])
    # Where the best under 8 W is measured already, the next best there is worth a measurement.
    assert rows(front_modes(prediction, FOUR, FOUR[[0, 1, 3]], 3)) == rows(FOUR[[2]])


@given(seed=st.integers(0, 10_000), count=st.integers(1, 12), done=st.integers(0, 60))
def test_front_modes_are_unmeasured_and_no_mode_passed_over_beats_one(seed: int, count: int, done: int) -> None:
    rng = np.random.default_rng(seed)
    modes = MODES[rng.choice(len(MODES), 60, replace=False)]
    time, power = rng.uniform(1, 10, 60), rng.uniform(5e3, 5e4, 60)
    already = modes[rng.permutation(60)[:done]]
    chosen = front_modes(predicted(time, power), modes, already, count)
    assert len(chosen) == min(count, 60 - done)
    assert len(rows(chosen)) == len(chosen)
    assert not rows(chosen) & rows(already)
    left = [k for k in range(60) if tuple(modes[k]) not in rows(already)]
    picked = [k for k in left if tuple(modes[k]) in rows(chosen)]
    passed_over = [k for k in left if k not in picked]
    for j, k in itertools.product(picked, passed_over):
        assert not (time[k] < time[j] and power[k] < power[j])
    under_the_largest_budget = [k for k in left if power[k] <= power[time.argmin()]]
    if under_the_largest_budget:
        assert min(under_the_largest_budget, key=lambda k: time[k]) in picked


def test_a_front_of_no_modes_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="cannot be chosen"):
        front_modes(predicted(np.ones(len(MODES)), np.ones(len(MODES))), MODES, MODES[:0], 0)
