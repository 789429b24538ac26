"""Choosing mode and batch size for training, compared with loops over all of them and with cases computed by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattfleet.choosing import (
    BatchEfficiency,
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
    highest_safe_gpu_hz,
)
from wattfleet.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.modes import PowerMode, modes_to_array

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


@settings(max_examples=200)
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
