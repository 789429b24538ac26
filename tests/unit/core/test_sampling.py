"""Selecting the power modes to measure, and the comparison of profiling methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.short_forms import examples
from wattfleet.core.choosing import (
    MEASURED_LOSSES,
    BoardFigures,
    KnownModes,
    MethodLoss,
    SamplingSettings,
    WorkloadChanges,
    descending_modes,
    fastest_within_budget,
    grid_modes,
    next_modes,
    spread_modes,
)
from wattfleet.core.choosing import compare_methods as compare
from wattfleet.core.choosing.choice import TIE
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BOARDS, ModeArray, ModeSpace, Profile, ProfilingMethod
from wattfleet.core.prediction import Prediction

# --- Sampling ---------------------------------------------------------------------------------------------------------
# Selecting the power modes to measure.


SPACE = BOARDS["orin-nano"].space
MODES = SPACE.array()


def rows(modes: ModeArray) -> set[tuple[float, ...]]:
    return {tuple(row) for row in modes.tolist()}


@given(count=st.integers(1, 80), seed=st.integers(0, 2**32 - 1))
def test_spread_modes_are_distinct_and_include_the_highest(count: int, seed: int) -> None:
    chosen = spread_modes(MODES, count, seed)
    assert chosen.shape == (count, 4)
    assert len(rows(chosen)) == count
    assert rows(chosen) <= rows(MODES)
    assert tuple(SPACE.highest) in rows(chosen)


@pytest.mark.parametrize("kind", [kind for kind in BOARDS if len(BOARDS[kind].space) > 600])
def test_a_grid_is_every_combination_of_even_values_with_the_extremes(kind: str) -> None:
    modes = BOARDS[kind].space.array()
    grid = grid_modes(modes, 600)
    values = [np.unique(knob) for knob in grid.T]
    assert 400 <= len(grid) == math.prod(map(len, values)) <= 600
    for chosen, knob in zip(values, modes.T, strict=True):
        offered = np.unique(knob)
        at = np.searchsorted(offered, chosen)
        assert (at[0], at[-1]) == (0, len(offered) - 1) and np.ptp(np.diff(at)) <= 1
        assert len(chosen) == len(offered) or len(chosen) >= max(map(len, values)) - 2
    np.testing.assert_array_equal(grid, grid_modes(modes, len(grid)))
    np.testing.assert_array_equal(grid, descending_modes(grid))


@given(count=st.integers(1, 2000))
def test_a_grid_measures_no_more_than_asked_and_the_highest_mode(count: int) -> None:
    grid = grid_modes(MODES, count)
    assert 1 <= len(grid) <= count
    assert tuple(SPACE.highest) in rows(grid) <= rows(MODES)


def test_spread_modes_depend_on_the_seed() -> None:
    np.testing.assert_array_equal(spread_modes(MODES, 20, 3), spread_modes(MODES, 20, 3))
    assert rows(spread_modes(MODES, 20, 3)) != rows(spread_modes(MODES, 20, 4))


def test_all_modes_can_be_spread() -> None:
    assert rows(spread_modes(MODES, len(MODES), 0)) == rows(MODES)


def test_modes_that_differ_in_one_knob_are_spread_evenly() -> None:
    line = MODES[(MODES[:, 0] == 4) & (MODES[:, 2] == MODES[0, 2]) & (MODES[:, 3] == MODES[0, 3])]
    clocks = np.sort(np.log(spread_modes(line, 6, 0)[:, 1]))
    assert clocks[-1] - clocks[0] > 0.6 * np.ptp(np.log(line[:, 1]))


def largest_gap(chosen: ModeArray) -> float:
    """The largest distance from any mode to the nearest chosen one, as shares of each knob's log range."""
    unit = (np.log(MODES) - np.log(MODES).min(0)) / np.ptp(np.log(MODES), axis=0)
    taken = (np.log(chosen) - np.log(MODES).min(0)) / np.ptp(np.log(MODES), axis=0)
    return float(np.linalg.norm(unit[:, None] - taken[None], axis=2).min(axis=1).max())


@pytest.mark.parametrize("count", [10, 30])
def test_spread_modes_leave_smaller_gaps_than_random_ones(count: int) -> None:
    spread = np.mean([largest_gap(spread_modes(MODES, count, seed)) for seed in range(8)])
    rng = np.random.default_rng(0)
    drawn = np.mean([largest_gap(MODES[rng.choice(len(MODES), count, replace=False)]) for _ in range(8)])
    assert spread < drawn


@pytest.mark.parametrize("count", [0, -1, len(MODES) + 1])
def test_counts_out_of_range_are_refused(count: int) -> None:
    with pytest.raises(InvalidInputError, match="cannot choose"):
        spread_modes(MODES, count, 0)


def test_spread_modes_come_in_descending_order() -> None:
    assert in_descending_order(spread_modes(MODES, 25, 0))


def in_descending_order(modes: ModeArray) -> bool:
    keys = [(cpu, gpu, mem, cores) for cores, cpu, gpu, mem in modes.tolist()]
    return keys == sorted(keys, reverse=True)


def test_descending_modes_are_the_same_modes() -> None:
    some = MODES[::7]
    assert rows(descending_modes(some)) == rows(some)


# A board on which every knob trades power for time, without equal modes.
TRUE_MS = 1e3 / (MODES / MODES.max(0) @ np.array([1.0, 2.0, 3.0, 1.5]))
TRUE_MW = 1e3 * (4 + (MODES / MODES.max(0)) ** 2 @ np.array([2.0, 5.0, 6.0, 2.0]))


def measured(modes: ModeArray) -> Profile:
    index = [MODES.tolist().index(row) for row in modes.tolist()]
    return Profile(MODES[index], TRUE_MS[index], TRUE_MW[index])


def vague(profile: Profile) -> Prediction:
    """The true values with uncertainty."""
    return Prediction(TRUE_MS, TRUE_MW, np.full(len(MODES), 0.05), np.full(len(MODES), 0.03))


def certain(profile: Profile) -> Prediction:
    return Prediction(TRUE_MS, TRUE_MW, np.zeros(len(MODES)), np.zeros(len(MODES)))


def profiled(settings: SamplingSettings, predict: Callable[[Profile], Prediction], **more: Any) -> list[ModeArray]:
    """Select batches of modes until the profile is complete."""
    batches: list[ModeArray] = []
    while True:
        profile = measured(np.concatenate([np.empty((0, 4)), *batches]))
        batch = next_modes(profile, MODES, predict, settings, **more)
        if not len(batch):
            return batches
        batches.append(batch)


@examples(15)
@given(limit=st.integers(1, 30), spread=st.integers(1, 10), batch=st.integers(1, 7), seed=st.integers(0, 99))
def test_a_profile_ends_at_its_limit_in_distinct_descending_batches(
    limit: int, spread: int, batch: int, seed: int
) -> None:
    wanted = SamplingSettings(limit, spread, batch, tolerance=0, seed=seed)
    batches = profiled(wanted, vague)
    assert all(in_descending_order(batch) for batch in batches)
    assert all(len(later) <= batch for later in batches[1:])
    assert sum(map(len, batches)) == limit == len(rows(np.concatenate(batches)))
    np.testing.assert_array_equal(batches[0], spread_modes(MODES, min(limit, spread), seed))


def test_an_interrupted_spread_is_completed() -> None:
    wanted = SamplingSettings(spread=8)
    spread = spread_modes(MODES, 8, 0)
    left = next_modes(measured(spread[[1, 4, 6]]), MODES, vague, wanted)
    assert rows(left) == rows(spread[[0, 2, 3, 5, 7]])


def test_excluded_modes_are_never_measured() -> None:
    excluded = np.concatenate([spread_modes(MODES, 5, 0), MODES[::3]])
    chosen = np.concatenate(profiled(SamplingSettings(limit=25, tolerance=0), vague, exclude=excluded))
    assert len(chosen) == 25
    assert not rows(chosen) & rows(excluded)


def test_modes_near_the_budgets_are_measured() -> None:
    budget_mw = 9e3
    chosen = profiled(SamplingSettings(limit=25, tolerance=0), vague, budgets_mw=np.array([budget_mw]))
    power = measured(np.concatenate(chosen[1:])).power_mw
    assert (np.abs(power / budget_mw - 1) < 0.1).all()
    best = TRUE_MS[budget_mw >= TRUE_MW].min()
    found = measured(np.concatenate(chosen))
    assert found.minibatch_ms[found.power_mw <= budget_mw].min() == best


def test_measuring_stops_when_the_choice_cannot_change() -> None:
    batches = profiled(SamplingSettings(limit=50), certain, budgets_mw=np.array([9e3, 14e3]))
    assert len(batches) == 1, "the spread modes and no more"
    found = measured(np.concatenate(batches))
    for budget_mw in (9e3, 14e3):
        chosen = fastest_within_budget(KnownModes.of(MODES, certain(found), found), budget_mw)
        assert chosen.minibatch_ms == pytest.approx(TRUE_MS[budget_mw >= TRUE_MW].min(), rel=TIE)


def test_a_wider_tolerance_stops_earlier() -> None:
    narrow, wide = (
        sum(map(len, profiled(SamplingSettings(40, tolerance=tolerance), vague, budgets_mw=np.array([9e3, 14e3]))))
        for tolerance in (0.0, 0.02)
    )
    assert wide < narrow == 40


def test_a_small_device_is_measured_completely() -> None:
    few = MODES[:4]
    profile = measured(few)
    assert not len(next_modes(profile, few, vague, SamplingSettings()))


@pytest.mark.parametrize("field", ["limit", "spread", "batch"])
def test_settings_out_of_range_are_refused(field: str) -> None:
    with pytest.raises(InvalidInputError, match="at least 1"):
        SamplingSettings(**{field: 0})


def test_budgets_must_be_finite_and_positive() -> None:
    with pytest.raises(InvalidInputError, match="budgets"):
        next_modes(measured(MODES[:5]), MODES, vague, SamplingSettings(), budgets_mw=np.array([-1.0]))


# Modes with batch sizes: small batches take longer per sample, and large ones draw more power.
FEW = descending_modes(MODES)[::9]
BATCHES = np.tile([1, 4, 16], len(FEW))
FEW = np.repeat(FEW, 3, axis=0)
STEP_MS = 1e3 / (FEW / MODES.max(0) @ np.array([1.0, 2.0, 3.0, 1.5])) * (0.2 + BATCHES / 16)
STEP_MW = 1e3 * (4 + (FEW / MODES.max(0)) ** 2 @ np.array([2.0, 5.0, 6.0, 2.0])) * (1 + 0.05 * np.log(BATCHES))


SETTINGS = [tuple(row) for row in np.column_stack([FEW, BATCHES]).tolist()]


def with_batches(chosen: np.ndarray) -> Profile:
    """Measurements of `[n, 5]` modes with batches."""
    index = [SETTINGS.index(tuple(row)) for row in chosen.tolist()]
    return Profile(FEW[index], STEP_MS[index], STEP_MW[index], BATCHES[index])


def vague_steps(profile: Profile) -> Prediction:
    sd = 0.03 + 0.05 * np.arange(len(FEW)) / len(FEW)
    return Prediction(STEP_MS * 1.02, STEP_MW, sd, 0.8 * sd)


def most_valuable_by_loop(chosen: np.ndarray, budgets_mw: list[float]) -> tuple[float, ...]:
    """The mode and batch with the largest constrained expected improvement of the time per sample.

    The improvement is integrated numerically, for one row and one budget at a time.
    """
    prediction = vague_steps(with_batches(chosen))
    measured = {tuple(row) for row in chosen.tolist()}
    steps = zip(SETTINGS, STEP_MS.tolist(), STEP_MW.tolist(), prediction.minibatch_ms.tolist(), strict=True)
    log_ms, power_mw = {}, {}
    for row, true_ms, true_mw, predicted_ms in steps:
        log_ms[row] = math.log((true_ms if row in measured else predicted_ms) / row[4])
        power_mw[row] = true_mw
    values = {}
    for row, time_sd, power_sd in zip(SETTINGS, prediction.time_log_sd, prediction.power_log_sd, strict=True):
        values[row] = 0.0
        for budget in budgets_mw:
            best = min([max(log_ms.values()), *(log_ms[each] for each in measured if power_mw[each] <= budget)])
            likely = NormalDist(log_ms[row], time_sd)
            lowest = min(best, log_ms[row] - 8 * time_sd)
            width = (best - lowest) / 200
            times = [lowest + (k + 0.5) * width for k in range(200)]
            gain = sum((best - time) * likely.pdf(time) for time in times) * width
            values[row] += gain * NormalDist(0, power_sd).cdf(math.log(budget / power_mw[row]))
    return max((row for row in SETTINGS if row not in measured), key=values.__getitem__)


def test_a_mode_and_a_batch_are_selected_by_their_value_per_sample() -> None:
    wanted = SamplingSettings(limit=9, spread=3, tolerance=0)
    budgets_mw = [9e3, 13e3]
    chosen = next_modes(with_batches(np.empty((0, 5))), FEW, vague_steps, wanted, batch=BATCHES)
    assert len(chosen) == 3
    for _ in range(6):
        profile = with_batches(chosen)
        found = next_modes(profile, FEW, vague_steps, wanted, np.array(budgets_mw), batch=BATCHES)
        assert [tuple(row) for row in found.tolist()] == [most_valuable_by_loop(chosen, budgets_mw)]
        chosen = np.concatenate([chosen, found])
    assert not len(next_modes(with_batches(chosen), FEW, vague_steps, wanted, batch=BATCHES))
    assert len(rows(chosen)) == 9


def test_spread_modes_with_batches_include_the_highest_with_the_largest() -> None:
    for count in (1, 12):
        chosen = spread_modes(FEW, count, 0, BATCHES)
        assert len(rows(chosen)) == count
        assert chosen[0].tolist() == [*SPACE.highest, 16]
        assert set(chosen[:, 4]) == ({16} if count == 1 else {1, 4, 16})


@pytest.mark.parametrize("measured_rows", [0, 3, 8, 25])
def test_one_stated_batch_size_changes_nothing(measured_rows: int) -> None:
    already = spread_modes(MODES, max(measured_rows, 1), 5)[:measured_rows]
    plain = measured(already)
    stated = Profile(plain.modes, plain.minibatch_ms, plain.power_mw, np.full(len(plain), 8))
    wanted = SamplingSettings(batch=4, tolerance=0)
    found = next_modes(stated, MODES, vague, wanted, batch=np.full(len(MODES), 8))
    assert (found[:, 4] == 8).all()
    np.testing.assert_array_equal(found[:, :4], next_modes(plain, MODES, vague, wanted))


def test_a_mode_is_excluded_at_all_its_batch_sizes() -> None:
    wanted = SamplingSettings(limit=60, spread=60, tolerance=0)
    excluded = FEW[:30:3]
    chosen = next_modes(with_batches(np.empty((0, 5))), FEW, vague_steps, wanted, exclude=excluded, batch=BATCHES)
    assert len(chosen) == 60
    assert not rows(chosen[:, :4]) & rows(excluded)


@pytest.mark.parametrize(
    ("profile", "batch", "message"),
    [
        (Profile(FEW[:1], STEP_MS[:1], STEP_MW[:1]), BATCHES, "do not state their batch"),
        (with_batches(np.empty((0, 5))), BATCHES[1:], "need"),
        (with_batches(np.empty((0, 5))), 0 * BATCHES, "whole number"),
    ],
)
def test_wrong_batches_are_refused(profile: Profile, batch: np.ndarray, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        next_modes(profile, FEW, vague_steps, SamplingSettings(), batch=batch)


# --- Profiling method -------------------------------------------------------------------------------------------------
# The comparison of profiling methods: costs computed by hand, and the recommendation.

LOSSES = (
    MethodLoss(ProfilingMethod.TRANSFER, 10, penalty_pct=4.0, over_1w_pct=1.0),
    MethodLoss(ProfilingMethod.TRANSFER, 50, penalty_pct=2.0, over_1w_pct=0.0),
    MethodLoss(ProfilingMethod.SCRATCH, 50, penalty_pct=1.0, over_1w_pct=25.0),
    MethodLoss(ProfilingMethod.BINARY_SEARCH, None, penalty_pct=8.0, over_1w_pct=0.0),
    MethodLoss(ProfilingMethod.BRUTE_FORCE, None, penalty_pct=0.0, over_1w_pct=0.0),
)


def board(frequencies: int, mode_s: float = 36.0) -> BoardFigures:
    """A board with 4 x `frequencies` modes, all of which take equally long to measure."""
    space = ModeSpace((1, 2, 3, 4), tuple(range(1, frequencies + 1)), (1,), (1,))
    modes = space.array()
    work = modes[:, 0] * modes[:, 1]
    sd = np.full(len(modes), 0.1)
    return BoardFigures(modes, Prediction(1e4 / work, 1e3 + work, sd, sd), np.full(len(modes), mode_s))


BOARD = board(250)


def test_the_costs_are_those_computed_by_hand() -> None:
    advice = compare(BOARD, training_h=100, changes=WorkloadChanges.RARELY, losses=LOSSES)
    found = {(cost.method, cost.modes): (cost.measuring_s, cost.total_s / 3600) for cost in advice.costs}
    # 36 s are 0.01 h, and a workload that changes rarely is measured three times.
    assert found[ProfilingMethod.TRANSFER, 10] == pytest.approx((360, 3 * 0.1 + 104))
    assert found[ProfilingMethod.TRANSFER, 50] == pytest.approx((1800, 3 * 0.5 + 102))
    assert found[ProfilingMethod.BRUTE_FORCE, 1000] == pytest.approx((36_000, 3 * 10 + 100))


@pytest.mark.parametrize(
    ("training_h", "changes", "method", "modes"),
    [
        # Measuring 50 modes instead of 10 costs 0.4 h more, which equals 2 % of 20 h.
        (19, WorkloadChanges.NEVER, ProfilingMethod.TRANSFER, 10),
        (21, WorkloadChanges.NEVER, ProfilingMethod.TRANSFER, 50),
        (59, WorkloadChanges.RARELY, ProfilingMethod.TRANSFER, 10),
        (61, WorkloadChanges.RARELY, ProfilingMethod.TRANSFER, 50),
        # Measuring all 1,000 modes costs 9.5 h more, which equals 2 % of 475 h.
        (470, WorkloadChanges.NEVER, ProfilingMethod.TRANSFER, 50),
        (480, WorkloadChanges.NEVER, ProfilingMethod.BRUTE_FORCE, 1000),
        (480, WorkloadChanges.OFTEN, ProfilingMethod.TRANSFER, 50),
    ],
)
def test_more_modes_are_recommended_once_they_save_more_than_they_cost(
    training_h: float, changes: WorkloadChanges, method: ProfilingMethod, modes: int
) -> None:
    recommended = compare(BOARD, training_h, changes, losses=LOSSES).recommended
    assert (recommended.method, recommended.modes) == (method, modes)


def test_a_method_that_breaks_budgets_is_named_but_not_recommended() -> None:
    advice = compare(BOARD, 100, WorkloadChanges.NEVER, losses=LOSSES)
    assert advice.recommended.method is ProfilingMethod.TRANSFER
    assert "scratch with 50 modes would take less, but 25 % of its choices draw over 1 W more" in advice.reason


def test_the_reason_states_the_parts_of_the_total() -> None:
    advice = compare(BOARD, 100, WorkloadChanges.NEVER, losses=LOSSES[:2])
    assert advice.reason == (
        "transfer with 50 modes takes the least time in all, 102.5 h: 0.5 h to measure, and training that is 2.0 %"
        " slower than in the best modes"
    )


def test_a_board_with_few_modes_is_measured_as_a_whole() -> None:
    advice = compare(board(10), 1000, WorkloadChanges.NEVER, losses=LOSSES)
    assert (advice.recommended.method, advice.recommended.modes) == (ProfilingMethod.BRUTE_FORCE, 40)
    assert all(cost.modes <= 40 for cost in advice.costs)


def test_binary_search_takes_log2_of_the_modes_for_each_budget() -> None:
    one, four = (
        next(
            cost
            for cost in compare(BOARD, 10, WorkloadChanges.NEVER, budgets, LOSSES).costs
            if cost.method is ProfilingMethod.BINARY_SEARCH
        )
        for budgets in (1, 4)
    )
    assert math.log2(len(BOARD.modes)) <= one.modes + 1 <= math.log2(len(BOARD.modes)) + 3
    assert one.modes < four.modes <= 4 * one.modes
    assert four.measuring_s == 36 * four.modes


def test_binary_search_is_recommended_only_for_budgets_known_beforehand() -> None:
    unknown = compare(BOARD, 0.5, WorkloadChanges.NEVER, losses=LOSSES[1:])
    assert unknown.recommended.method is ProfilingMethod.TRANSFER
    assert "binary-search with" in unknown.reason
    assert unknown.reason.endswith("would take less, but it serves only budgets that are known beforehand")
    known = compare(board(2000), 0.5, WorkloadChanges.NEVER, budgets=1, losses=LOSSES[1:])
    assert known.recommended.method is ProfilingMethod.BINARY_SEARCH


@pytest.mark.parametrize("changes", WorkloadChanges)
def test_longer_training_never_recommends_fewer_modes(changes: WorkloadChanges) -> None:
    modes = [compare(BOARD, training_h, changes).recommended.modes for training_h in np.geomspace(0.1, 1e5, 40)]
    assert modes == sorted(modes) and modes[0] < modes[-1]


def test_the_figures_are_complete_and_brute_force_loses_nothing() -> None:
    # A grid is measured for a reference, not for the choices of its device.
    assert {loss.method for loss in MEASURED_LOSSES} == set(ProfilingMethod) - {ProfilingMethod.GRID}
    transfer = {loss.limit for loss in MEASURED_LOSSES if loss.method is ProfilingMethod.TRANSFER}
    assert transfer == {0, 5, 10, 20, 50}
    (brute,) = (loss for loss in MEASURED_LOSSES if loss.method is ProfilingMethod.BRUTE_FORCE)
    assert (brute.penalty_pct, brute.over_1w_pct) == (0, 0)


@pytest.mark.parametrize("training_h", [0.0, -1.0, math.nan, math.inf])
def test_hours_that_are_none_are_refused(training_h: float) -> None:
    with pytest.raises(InvalidInputError, match="hours of training must be finite and above 0"):
        compare(BOARD, training_h, WorkloadChanges.NEVER)


def test_no_budget_and_no_modes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="number of budgets must be at least 1, not 0"):
        compare(BOARD, 1, WorkloadChanges.NEVER, budgets=0)
    with pytest.raises(InvalidInputError, match="no modes to measure"):
        BoardFigures(BOARD.modes[:0], BOARD.predicted, BOARD.mode_s[:0])
    with pytest.raises(InvalidInputError, match="seconds to measure a mode must be finite"):
        BoardFigures(BOARD.modes, BOARD.predicted, 0 * BOARD.mode_s)
