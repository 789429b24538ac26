"""Compares profiling methods by the time that each takes to measure, and the training time that it loses.

The question is that of PowerTrain's table 1 (doi:10.1016/j.future.2024.07.001, section 1.5). Here a method is judged by
the total time of measuring and of all training in the modes that it then chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattfleet.choosing.budget_search import search_within_budgets
from wattfleet.choosing.front import pareto_front
from wattfleet.choosing.method_names import ProfilingMethod, WorkloadChanges
from wattfleet.choosing.sampling import SamplingSettings, spread_modes
from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeArray, PowerMode, array_to_modes
from wattfleet.prediction import Prediction

Values = NDArray[np.float64]

_MAX_OVER_1W_PCT = 5.0
"""A method is not recommended if a larger share of its choices, %, exceeds the budget by more than 1 W."""

_HOUR_S = 3600.0


@dataclass(frozen=True)
class MethodLoss:
    """The time that a method lost on measured corpora, and how often it exceeded the budget.

    Attributes:
        method: the method.
        limit: maximum number of modes that it measures; None if the method stops on its own.
        penalty_pct: how much longer a training step takes than in the best mode within the budget: mean, %.
        over_1w_pct: share of choices that exceed the budget by more than 1 W, %.
    """

    method: ProfilingMethod
    limit: int | None
    penalty_pct: float
    over_1w_pct: float


MEASURED_LOSSES: Sequence[MethodLoss] = (
    MethodLoss(ProfilingMethod.TRANSFER, 0, 50.4, 0.0),
    MethodLoss(ProfilingMethod.TRANSFER, 5, 6.7, 0.8),
    MethodLoss(ProfilingMethod.TRANSFER, 10, 4.5, 0.7),
    MethodLoss(ProfilingMethod.TRANSFER, 20, 3.3, 0.2),
    MethodLoss(ProfilingMethod.TRANSFER, 50, 2.1, 0.0),
    MethodLoss(ProfilingMethod.SCRATCH, 10, 4.7, 2.7),
    MethodLoss(ProfilingMethod.SCRATCH, 20, 3.5, 0.7),
    MethodLoss(ProfilingMethod.SCRATCH, 50, 2.2, 0.0),
    MethodLoss(ProfilingMethod.BINARY_SEARCH, None, 8.3, 0.0),
    MethodLoss(ProfilingMethod.BRUTE_FORCE, None, 0.0, 0.0),
)
"""Means over the corpora that `benchmarks/profiling_methods.py` evaluates. Brute force loses nothing by definition."""

LOSS_SOURCE = "mean of four measured workloads (docs/choosing.md)"


@dataclass(frozen=True)
class MethodCost:
    """The cost of a method on one board.

    Attributes:
        method: the method.
        modes: number of modes to measure for one workload.
        measuring_s: seconds to measure them.
        penalty_pct: how much longer a training step is expected to take than in the best mode within the budget, %.
        over_1w_pct: share of choices expected to exceed the budget by more than 1 W, %.
        total_s: seconds of measuring all workloads, and of all training.
        obstacle: why the method is not recommended, regardless of its cost; None if it may be recommended.
    """

    method: ProfilingMethod
    modes: int
    measuring_s: float
    penalty_pct: float
    over_1w_pct: float
    total_s: float
    obstacle: str | None = None


@dataclass(frozen=True)
class Advice:
    """A comparison of profiling methods.

    Attributes:
        costs: the cost of each method and number of modes.
        recommended: the cost with the shortest total time among those without an obstacle.
        reason: why, in a sentence.
    """

    costs: tuple[MethodCost, ...]
    recommended: MethodCost
    reason: str


@dataclass(frozen=True)
class BoardFigures:
    """The known figures of a board and a workload before anything is measured.

    Attributes:
        modes: `[n, 4]` modes of the board.
        predicted: the reference's prediction of each mode.
        mode_s: `[n]` seconds to measure each mode.

    Raises:
        InvalidInputError: there are no modes, or a time is not finite and above 0.
    """

    modes: ModeArray
    predicted: Prediction
    mode_s: Values

    def __post_init__(self) -> None:
        if not len(self.modes):
            raise InvalidInputError("the board has no modes to measure: give at least one")
        if not (np.isfinite(self.mode_s) & (self.mode_s > 0)).all():
            raise InvalidInputError("the seconds to measure a mode must be finite and above 0")


def compare_methods(
    board: BoardFigures,
    training_h: float,
    changes: WorkloadChanges,
    budgets: int | None = None,
    losses: Sequence[MethodLoss] = MEASURED_LOSSES,
) -> Advice:
    """Compare the profiling methods for a board, and recommend one.

    Args:
        board: the board's modes, with predictions.
        training_h: hours of all training planned, in the best modes within the budgets.
        changes: how often the workload changes during these hours.
        budgets: number of different power budgets; binary search measures more modes for each. None if the budgets are
            not known beforehand, as in a fleet. Binary search then counts one, and is not recommended.
        losses: the loss of each method. Methods that need as many modes as the board has are left out.

    Raises:
        InvalidInputError: a number is out of range.
    """
    if not 0 < training_h < math.inf:
        raise InvalidInputError(f"the hours of training must be finite and above 0, not {training_h:g}")
    if budgets is not None and budgets < 1:
        raise InvalidInputError(f"the number of budgets must be at least 1, not {budgets}")
    costs = []
    for loss in losses:
        if loss.limit is None or loss.limit < len(board.modes):
            count, measuring_s = _MEASURED[loss.method](board, loss.limit or 0, budgets or 1)
            total_s = changes.workloads * measuring_s + training_h * _HOUR_S * (1 + loss.penalty_pct / 100)
            obstacle = _obstacle(loss, budgets is not None)
            costs.append(
                MethodCost(loss.method, count, measuring_s, loss.penalty_pct, loss.over_1w_pct, total_s, obstacle)
            )
    recommended = min((cost for cost in costs if cost.obstacle is None), key=lambda cost: (cost.total_s, cost.modes))
    return Advice(tuple(costs), recommended, _reason(recommended, costs, changes))


def _spread_then_front(board: BoardFigures, limit: int, budgets: int) -> tuple[int, float]:
    """Modes spread over the space, then modes along the predicted front, as `next_modes` selects them."""
    spread = min(limit, SamplingSettings.spread)
    if not spread:
        return 0, 0.0
    first = spread_modes(board.modes, spread, seed=0)
    is_first = (board.modes[:, None] == first).all(axis=2).any(axis=1)
    front = pareto_front(board.predicted.minibatch_ms, board.predicted.power_mw)
    return limit, float(board.mode_s[is_first].sum() + (limit - spread) * board.mode_s[front].mean())


def _searched(board: BoardFigures, limit: int, budgets: int) -> tuple[int, float]:
    """A search on the predicted powers, with budgets evenly along the predicted front."""
    rows = {mode: row for row, mode in enumerate(array_to_modes(board.modes))}
    power_mw = board.predicted.power_mw
    front_mw = power_mw[pareto_front(board.predicted.minibatch_ms, power_mw)]
    searched: set[int] = set()

    def power_of(mode: PowerMode) -> float:
        searched.add(rows[mode])
        return float(power_mw[rows[mode]])

    search_within_budgets(
        board.modes, np.linspace(front_mw.min(), front_mw.max(), budgets + 2)[1:-1].tolist(), power_of
    )
    return len(searched), float(board.mode_s[sorted(searched)].sum())


def _all(board: BoardFigures, limit: int, budgets: int) -> tuple[int, float]:
    return len(board.modes), float(board.mode_s.sum())


_MEASURED: Mapping[ProfilingMethod, Callable[[BoardFigures, int, int], tuple[int, float]]] = {
    ProfilingMethod.TRANSFER: _spread_then_front,
    ProfilingMethod.SCRATCH: _spread_then_front,
    ProfilingMethod.BINARY_SEARCH: _searched,
    ProfilingMethod.BRUTE_FORCE: _all,
}
"""Returns the number of modes and the seconds of measuring, for a limit of modes and a number of budgets."""


def _reason(recommended: MethodCost, costs: Sequence[MethodCost], changes: WorkloadChanges) -> str:
    measuring_h = changes.workloads * recommended.measuring_s / _HOUR_S
    text = (
        f"{recommended.method} with {recommended.modes:,} modes takes the least time in all,"
        f" {recommended.total_s / _HOUR_S:,.1f} h: {measuring_h:,.1f} h to measure, and training that is"
        f" {recommended.penalty_pct:.1f} % slower than in the best modes"
    )
    shorter = [cost for cost in costs if cost.total_s < recommended.total_s]
    if not shorter:
        return text
    refused = min(shorter, key=lambda cost: cost.total_s)
    return f"{text}; {refused.method} with {refused.modes:,} modes would take less, but {refused.obstacle}"


def _obstacle(loss: MethodLoss, budgets_known: bool) -> str | None:
    if loss.over_1w_pct > _MAX_OVER_1W_PCT:
        return f"{loss.over_1w_pct:.0f} % of its choices draw over 1 W more than the budget"
    if loss.method is ProfilingMethod.BINARY_SEARCH and not budgets_known:
        return "it serves only budgets that are known beforehand"
    return None
