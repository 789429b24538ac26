"""The published order of measuring modes with batch sizes, compared with measuring everything."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.choosing import (
    BatchTooLargeError,
    JointMeasurement,
    PowerFigure,
    PowerLimit,
    gpu_frequencies,
    profile_jointly,
)
from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeSpace, PowerMode

SPACE = ModeSpace((2, 4), (1_000_000,), (100, 200, 300, 400), (800, 1600))
MODES = gpu_frequencies(SPACE)


@dataclass
class FakeBoard:
    """A board whose power increases with frequency and batch size, and that records what was measured."""

    power_mw: Callable[[int, int], float]
    memory: float = math.inf
    with_peak: bool = True
    asked: list[tuple[int, int]] = field(default_factory=list)

    def measure(self, mode: PowerMode, batch: int) -> JointMeasurement:
        self.asked.append((mode.gpu_hz, batch))
        if batch > self.memory:
            raise BatchTooLargeError(f"batch {batch} does not fit")
        return self.true(mode, batch)

    def true(self, mode: PowerMode, batch: int) -> JointMeasurement:
        power = self.power_mw(mode.gpu_hz, batch)
        peak = 1.2 * power if self.with_peak else None
        return JointMeasurement(mode, batch, 1e3 * batch / mode.gpu_hz, power, peak)


def linear(gpu_hz: int, batch: int) -> float:
    return gpu_hz + 10.0 * batch


def test_the_ladder_of_gpu_frequencies_keeps_the_other_knobs_at_their_maximum() -> None:
    assert [mode.gpu_hz for mode in MODES] == [100, 200, 300, 400]
    assert {(mode.cores, mode.cpu_khz, mode.mem_hz) for mode in MODES} == {(4, 1_000_000, 1600)}


def test_each_smaller_batch_continues_at_the_highest_feasible_frequency() -> None:
    board = FakeBoard(linear)
    found = profile_jointly(MODES, [4, 32, 16, 1], PowerLimit(360), board.measure)
    # Powers: batch 32 has 420 at the lowest frequency; batch 16 has 260, 360 and 460; batch 4 has 240, 340 and 440;
    # batch 1 has 210, 310 and 410.
    assert board.asked == [(100, 32), (100, 16), (200, 16), (300, 16), (200, 4), (300, 4), (400, 4), (300, 1), (400, 1)]
    assert [(row.mode.gpu_hz, row.batch) for row in found.rows] == board.asked
    assert found.refused == ()


def test_without_a_limit_only_the_largest_batch_leaves_the_highest_frequency() -> None:
    board = FakeBoard(linear)
    profile_jointly(MODES, [1, 2], PowerLimit(), board.measure)
    assert board.asked == [(100, 2), (200, 2), (300, 2), (400, 2), (400, 1)]


@given(st.data())
def test_nothing_feasible_and_faster_is_missed_if_power_is_monotone(data: st.DataObject) -> None:
    """Powers are sums of random steps, so that they increase with frequency and batch and are otherwise arbitrary."""
    batches = data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True))
    steps = {(mode.gpu_hz, batch): data.draw(st.integers(0, 50)) + 1 for mode in MODES for batch in batches}

    def power(gpu_hz: int, batch: int) -> float:
        return float(sum(step for (hz, b), step in steps.items() if hz <= gpu_hz and b <= batch))

    limit = PowerLimit(data.draw(st.integers(1, 600)), data.draw(st.sampled_from(PowerFigure)))
    memory = data.draw(st.integers(min(batches), 64))
    board = FakeBoard(power, memory)
    found = profile_jointly(MODES, batches, limit, board.measure)

    assert len(set(board.asked)) == len(board.asked)
    assert found.refused == tuple(sorted(batch for batch in batches if batch > memory))
    assert sum(batch > memory for _, batch in board.asked) == len(found.refused)
    for batch in set(batches) - set(found.refused):
        true = [board.true(mode, batch) for mode in MODES]
        best = min((row.minibatch_ms for row in true if row.keeps(limit)), default=None)
        rows = [row for row in found.rows if row.batch == batch]
        assert min((row.minibatch_ms for row in rows if row.keeps(limit)), default=None) == best
    # Each batch size adds at most two rows to the number of frequencies: the one to resume at, and the one above it.
    assert len(found.rows) <= len(MODES) + 2 * len(batches)


def test_the_peak_is_limited_on_request() -> None:
    board = FakeBoard(linear)
    found = profile_jointly(MODES, [10], PowerLimit(400, PowerFigure.PEAK), board.measure)
    # Peaks: 240, 360 and 480.
    assert [row.peak_mw for row in found.rows] == [240, 360, 480]
    with pytest.raises(InvalidInputError, match="no peak power"):
        profile_jointly(MODES, [10], PowerLimit(400, PowerFigure.PEAK), FakeBoard(linear, with_peak=False).measure)


def test_noise_above_the_limit_at_the_resumed_frequency_is_followed_downwards() -> None:
    noisy = {(100, 2): 100, (200, 2): 200, (300, 2): 300, (400, 2): 999, (300, 1): 301, (200, 1): 199}
    board = FakeBoard(lambda gpu_hz, batch: noisy[gpu_hz, batch])
    profile_jointly(MODES, [2, 1], PowerLimit(300), board.measure)
    assert board.asked[-2:] == [(300, 1), (200, 1)]


def test_a_batch_beyond_memory_is_tried_once_and_never_again() -> None:
    board = FakeBoard(linear, memory=16)
    found = profile_jointly(MODES, [8, 16, 32, 64], PowerLimit(), board.measure)
    assert board.asked[:3] == [(100, 64), (100, 32), (100, 16)]
    assert found.refused == (32, 64)

    again = FakeBoard(linear, memory=16)
    assert profile_jointly(MODES, [8, 16, 32, 64], PowerLimit(), again.measure, refused=[32]).refused == (32, 64)
    assert {batch for _, batch in again.asked} == {8, 16}


def test_rows_of_a_batch_that_runs_out_of_memory_later_are_dropped() -> None:
    board = FakeBoard(linear)

    def measure(mode: PowerMode, batch: int) -> JointMeasurement:
        if (mode.gpu_hz, batch) == (300, 8):
            raise BatchTooLargeError("batch 8 does not fit")
        return board.measure(mode, batch)

    found = profile_jointly(MODES, [4, 8], PowerLimit(), measure)
    assert found.refused == (8,)
    assert [(row.mode.gpu_hz, row.batch) for row in found.rows] == [(hz, 4) for hz in (100, 200, 300, 400)]


def test_no_batch_fits() -> None:
    with pytest.raises(BatchTooLargeError, match="not even 4 samples"):
        profile_jointly(MODES, [4, 8], PowerLimit(), FakeBoard(linear, memory=2).measure)


@pytest.mark.parametrize(
    ("modes", "batches", "said"),
    [
        ((), [1], "no modes"),
        (MODES, [], "no batch sizes"),
        (MODES, [0], "whole number"),
        (MODES, [1.5], "whole number"),
        (MODES, [4, 4], "distinct"),
        (MODES[::-1], [4], "ascend"),
        ((MODES[0], MODES[0]), [4], "distinct"),
        ((MODES[0], MODES[1]._replace(cores=2)), [4], "ascend"),
    ],
)
def test_wrong_modes_and_batches_are_refused(modes: tuple[PowerMode, ...], batches: list[int], said: str) -> None:
    board = FakeBoard(linear)
    with pytest.raises(InvalidInputError, match=said):
        profile_jointly(modes, batches, PowerLimit(), board.measure)
    assert board.asked == []


def test_a_measurement_of_something_else_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="but 4c .* with batch 3 was measured"):
        profile_jointly(MODES, [4], PowerLimit(), lambda mode, batch: JointMeasurement(mode, 3, 1.0, 1.0))


@pytest.mark.parametrize("values", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, math.nan, 1), (1, 1, 1, math.inf), (1, 1, 1, 0)])
def test_impossible_measurements_and_limits_are_refused(values: tuple[int, float, float, float]) -> None:
    with pytest.raises(InvalidInputError):
        JointMeasurement(MODES[0], *values)
    for limit_mw in (0, -1, math.nan):
        with pytest.raises(InvalidInputError, match="above 0 mW"):
            PowerLimit(limit_mw)
