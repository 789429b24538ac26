"""Choosing mode and batch size for training, the order of measuring them, and the efficiency of batch sizes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.short_forms import examples
from wattfleet.core.choosing import (
    BatchEfficiency,
    BatchTooLargeError,
    JointChoice,
    JointMeasurement,
    JointTable,
    KnownModes,
    PowerFigure,
    PowerLimit,
    TrainingObjective,
    baseline_1,
    baseline_2,
    choose_jointly,
    fastest_batch,
    gpu_frequencies,
    gradient_noise_scale,
    highest_safe_gpu_hz,
    profile_jointly,
    scaled_learning_rate,
)
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.modes import ModeSpace, PowerMode, modes_to_array

# --- Joint choice -----------------------------------------------------------------------------------------------------
# Choosing mode and batch size for training, compared with loops over all of them and with cases computed by hand.


SLOW, FAST = (PowerMode(4, 1_000_000, gpu_hz, 1_600_000_000) for gpu_hz in (500_000_000, 1_000_000_000))
ROWS = [
    JointMeasurement(SLOW, 4, 8.0, 4_000, 4_800),
    JointMeasurement(FAST, 4, 6.0, 6_000, 7_200),
    JointMeasurement(SLOW, 16, 24.0, 5_000, 6_000),
    JointMeasurement(FAST, 16, 16.0, 8_000, 9_600),
    JointMeasurement(SLOW, 64, 80.0, 6_000, 7_200),
    JointMeasurement(FAST, 64, 48.0, 10_000, 12_000),
]
TABLE = JointTable.measured(ROWS)
EFFICIENCY = BatchEfficiency("m", (4, 16, 64), (0.5, 0.6, 1.0), (0.0,) * 3, "test")
# milliseconds per sample times relative samples:
#          batch 4            batch 16             batch 64
#   SLOW   2.0 x 0.5 = 1.00   1.5 x 0.6 = 0.90     1.25 x 1 = 1.25
#   FAST   1.5 x 0.5 = 0.75   1.0 x 0.6 = 0.60     0.75 x 1 = 0.75
TIME, ENERGY = TrainingObjective.LEAST_TIME, TrainingObjective.LEAST_ENERGY


def found(choice: JointChoice) -> tuple[PowerMode, int | None, float]:
    return choice.chosen.mode, choice.chosen.batch, round(choice.sample_ms, 9)


@pytest.mark.parametrize(
    ("limit", "objective", "expected"),
    [
        (PowerLimit(), TIME, (FAST, 16, 0.6)),
        (PowerLimit(8_000), TIME, (FAST, 16, 0.6)),
        (PowerLimit(7_999), TIME, (FAST, 4, 0.75)),
        (PowerLimit(5_999), TIME, (SLOW, 16, 0.9)),
        (PowerLimit(4_999), TIME, (SLOW, 4, 1.0)),
        (PowerLimit(8_000, PowerFigure.PEAK), TIME, (FAST, 4, 0.75)),
        # Energies: 4.0, 4.5, 4.5, 4.8, 7.5 and 7.5.
        (PowerLimit(), ENERGY, (SLOW, 4, 1.0)),
    ],
)
def test_hand_computed_choices(
    limit: PowerLimit, objective: TrainingObjective, expected: tuple[PowerMode, int, float]
) -> None:
    assert found(choose_jointly(TABLE, EFFICIENCY, limit, objective)) == expected


def test_the_energy_is_the_time_at_the_median_power() -> None:
    assert choose_jointly(TABLE, EFFICIENCY, PowerLimit()).sample_uj == pytest.approx(0.6 * 8_000)


@examples(200)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.sampled_from([1, 2, 4, 8, 16]),
            st.integers(1, 60),
            st.integers(1, 8),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=20,
        unique_by=lambda row: row[:2],
    ),
    # Multiples of a quarter, so that times and energies are exact in binary and ties are real.
    st.lists(st.integers(1, 12), min_size=3, max_size=3),
    st.integers(1, 12),
    st.sampled_from(TrainingObjective),
    st.sampled_from(PowerFigure),
)
def test_the_choice_is_exact(
    rows: list[tuple[int, int, int, int, int]],
    quarters: list[int],
    limit_mw: int,
    objective: TrainingObjective,
    figure: PowerFigure,
) -> None:
    """Compared with all combinations in exact fractions. Batches of 1 and 4 miss the accuracy or are unknown."""
    relative = {2: Fraction(quarters[0], 4), 8: Fraction(quarters[1], 4), 16: Fraction(1)}
    efficiency = BatchEfficiency(
        "m", tuple(relative), tuple(float(each) for each in relative.values()), (0.0,) * 3, "test", unreached=(1, 4)
    )
    feasible = []
    for gpu, batch, ms, power, extra in rows:
        if batch in relative and (power if figure is PowerFigure.MEDIAN else power + extra) <= limit_mw:
            time = Fraction(ms, batch) * relative[batch]
            feasible.append((time if objective is TIME else time * power, power, gpu, batch))
    table = JointTable.measured(
        [
            JointMeasurement(PowerMode(1, 1, gpu, 1), batch, ms, power, power + extra)
            for gpu, batch, ms, power, extra in rows
        ]
    )
    if not feasible:
        with pytest.raises(InvalidInputError):
            choose_jointly(table, efficiency, PowerLimit(limit_mw, figure), objective)
        return
    choice = choose_jointly(table, efficiency, PowerLimit(limit_mw, figure), objective)
    best = min(row[:2] for row in feasible)
    winners = {(gpu, batch) for cost, power, gpu, batch in feasible if (cost, power) == best}
    assert (choice.chosen.mode.gpu_hz, choice.chosen.batch) in winners
    cost = choice.sample_ms if objective is TIME else choice.sample_uj
    assert cost == float(best[0])


def test_an_infeasible_limit_states_one_that_is_kept() -> None:
    for figure, least in ((PowerFigure.MEDIAN, "4.0 W"), (PowerFigure.PEAK, "4.8 W")):
        with pytest.raises(InfeasibleBudgetError, match=re.escape(f"at least {least}")):
            choose_jointly(TABLE, EFFICIENCY, PowerLimit(1_000, figure))
    odd = JointTable.measured([JointMeasurement(SLOW, 4, 8.0, 4_010)])
    with pytest.raises(InfeasibleBudgetError, match=r"at least 4\.1 W"):
        choose_jointly(odd, EFFICIENCY, PowerLimit(4_009))


def test_a_prediction_keeps_the_limit_with_the_probability() -> None:
    sd = np.array([0.0, 0.1])
    known = KnownModes(
        modes_to_array([SLOW, FAST]),
        np.array([24.0, 16.0]),
        np.array([5_000.0, 5_000.0]),
        sd,
        sd,
        np.array([True, False]),
        np.array([16, 16]),
    )
    table = JointTable(known, peak_mw=np.array([6_000.0, 6_000.0]))
    for figure, median_mw in ((PowerFigure.MEDIAN, 5_000), (PowerFigure.PEAK, 6_000)):
        quantile_mw = median_mw * math.exp(0.1 * NormalDist().inv_cdf(0.9))
        for limit_mw, mode in ((quantile_mw * 1.001, FAST), (quantile_mw * 0.999, SLOW), (median_mw, SLOW)):
            choice = choose_jointly(table, EFFICIENCY, PowerLimit(limit_mw, figure), probability=0.9)
            assert choice.chosen.mode == mode


def test_batches_without_an_efficiency_are_not_chosen() -> None:
    few = BatchEfficiency("m", (32, 64), (0.9, 1.0), (0.0, 0.0), "test", unreached=(16,))
    assert found(choose_jointly(TABLE, few, PowerLimit())) == (FAST, 64, 0.75)
    other = BatchEfficiency("m", (128,), (1.0,), (0.0,), "test")
    with pytest.raises(InvalidInputError, match=r"batch sizes 128, none of which is among 4, 16, 64"):
        choose_jointly(TABLE, other, PowerLimit())
    with pytest.raises(InvalidInputError, match="is not known"):
        TABLE.sample_ms(few)


def test_a_choice_by_the_proxy_is_judged_by_the_target() -> None:
    target = BatchEfficiency("m", (4, 16, 64), (0.3, 0.9, 1.0), (0.0,) * 3, "target")
    ours = choose_jointly(TABLE, EFFICIENCY, PowerLimit()).judged_by(target)
    fastest = choose_jointly(TABLE, target, PowerLimit())
    assert found(ours) == (FAST, 16, 0.9)
    assert found(fastest) == (FAST, 4, 0.45)


def test_the_safe_frequency_keeps_the_limit_with_every_model_and_batch() -> None:
    thirsty = JointTable.measured([JointMeasurement(SLOW, 8, 10.0, 7_000), JointMeasurement(FAST, 8, 10.0, 9_000)])
    assert highest_safe_gpu_hz([TABLE], PowerLimit(10_000)) == FAST.gpu_hz
    assert highest_safe_gpu_hz([TABLE], PowerLimit(9_999)) == SLOW.gpu_hz
    assert highest_safe_gpu_hz([TABLE], PowerLimit(11_999, PowerFigure.PEAK)) == SLOW.gpu_hz
    assert highest_safe_gpu_hz([TABLE, thirsty], PowerLimit(7_000)) == SLOW.gpu_hz
    with pytest.raises(InfeasibleBudgetError, match=r"at least 7\.0 W"):
        highest_safe_gpu_hz([TABLE, thirsty], PowerLimit(6_999))


def test_a_frequency_that_was_not_measured_with_every_batch_is_not_called_safe() -> None:
    # The row with the highest power is missing, so the fast mode is only known with the smaller batch sizes.
    assert highest_safe_gpu_hz([JointTable.measured(ROWS[:-1])], PowerLimit(10_000)) == SLOW.gpu_hz
    with pytest.raises(InvalidInputError, match="no GPU frequency occurs with every"):
        highest_safe_gpu_hz([JointTable.measured([ROWS[0], ROWS[3]])], PowerLimit())
    with pytest.raises(InvalidInputError, match="no tables"):
        highest_safe_gpu_hz([], PowerLimit())


def test_baselines_choose_as_the_published_work_says() -> None:
    middle = (FAST.gpu_hz + SLOW.gpu_hz) / 2
    for cap, mode, times in ((math.inf, FAST, (0.75, 0.75, 0.6)), (middle, SLOW, (1.25, 1.0, 0.9))):
        assert found(baseline_1(TABLE, EFFICIENCY, cap)) == (mode, 64, times[0])
        assert found(baseline_2(TABLE, EFFICIENCY, cap)) == (mode, 4, times[1])
        assert found(fastest_batch(TABLE, EFFICIENCY, cap)) == (mode, 16, times[2])


@pytest.mark.parametrize("baseline", [baseline_1, baseline_2, fastest_batch])
def test_a_cap_below_every_frequency_is_refused(
    baseline: Callable[[JointTable, BatchEfficiency, float], JointChoice],
) -> None:
    with pytest.raises(InvalidInputError, match="the lowest is 500 MHz"):
        baseline(TABLE, EFFICIENCY, 1e6)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=9, max_size=9),
    st.lists(st.integers(1, 20), min_size=2, max_size=2),
    st.integers(1, 60),
)
def test_no_baseline_within_the_limit_beats_the_joint_choice(
    drawn: list[tuple[int, int]], relative: list[int], limit_mw: int
) -> None:
    settings_ = [(gpu, batch) for gpu in (1, 2, 3) for batch in (4, 16, 64)]
    table = JointTable.measured(
        [
            JointMeasurement(PowerMode(1, 1, gpu, 1), batch, ms, power)
            for (gpu, batch), (ms, power) in zip(settings_, drawn, strict=True)
        ]
    )
    efficiency = BatchEfficiency("m", (4, 16, 64), (relative[0] / 10, relative[1] / 10, 1.0), (0.0,) * 3, "test")
    try:
        cap = highest_safe_gpu_hz([table], PowerLimit(limit_mw))
    except InfeasibleBudgetError:
        assert all(
            any(power > limit_mw for (hz, _), (_, power) in zip(settings_, drawn, strict=True) if hz == gpu)
            for gpu in (1, 2, 3)
        )
        return
    ours = choose_jointly(table, efficiency, PowerLimit(limit_mw))
    assert ours.chosen.power_mw <= limit_mw
    for baseline in (baseline_1, baseline_2, fastest_batch):
        theirs = baseline(table, efficiency, cap)
        assert theirs.chosen.power_mw <= limit_mw
        assert ours.sample_ms <= theirs.sample_ms


def test_tables_that_cannot_be_chosen_from_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no mode with a batch size"):
        JointTable.measured([])
    with pytest.raises(InvalidInputError, match="state no batch sizes"):
        JointTable(replace(TABLE.known, batch=None))
    for peak in (np.ones(2), np.array([1, 1, 1, 1, 1, math.nan]), np.zeros(6)):
        with pytest.raises(InvalidInputError, match="peak power: 6 modes need 6"):
            JointTable(TABLE.known, peak)


def test_a_limit_of_the_peak_needs_peaks_from_every_row() -> None:
    table = JointTable.measured([ROWS[0], JointMeasurement(FAST, 4, 6.0, 6_000)])
    with pytest.raises(InvalidInputError, match="peak power of the modes is not known"):
        choose_jointly(table, EFFICIENCY, PowerLimit(9_000, PowerFigure.PEAK))
    assert found(choose_jointly(table, EFFICIENCY, PowerLimit(9_000))) == (FAST, 4, 0.75)


@pytest.mark.parametrize("probability", [0.0, 1.0, math.nan])
def test_wrong_probabilities_are_refused(probability: float) -> None:
    with pytest.raises(InvalidInputError, match="between 0 and 1"):
        choose_jointly(TABLE, EFFICIENCY, PowerLimit(), probability=probability)


# --- Joint profiling --------------------------------------------------------------------------------------------------
# The published order of measuring modes with batch sizes, compared with measuring everything.

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


# --- Batch efficiency -------------------------------------------------------------------------------------------------
# The efficiency of batch sizes, compared with figures computed by hand and simulated gradients.

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
