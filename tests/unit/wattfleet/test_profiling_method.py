"""The comparison of profiling methods: costs computed by hand, and the recommendation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from wattfleet.choosing import MEASURED_LOSSES, BoardFigures, MethodLoss, ProfilingMethod, WorkloadChanges
from wattfleet.choosing import compare_methods as compare
from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeSpace
from wattfleet.prediction import Prediction

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
    assert {loss.method for loss in MEASURED_LOSSES} == set(ProfilingMethod)
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
