"""Selecting the modes to measure: first spread over the mode space, then where they affect the choice of a mode.

The best of thousands of predicted modes is likely one whose power was underestimated. Therefore the modes that would be
chosen are measured first. The value of a measurement is its expected gain, summed over the budgets
(`wattfleet/core/choosing/sampling.py`).

If there are several batch sizes to choose from, modes with batches are selected in the same way. What counts is then
the time per sample, which can be compared between batch sizes. For inference, what counts is the goal's objective,
within its latencies and budgets.

Modes are returned by descending frequency, because Jetsons apply downward sweeps more reliably than upward ones
(PowerTrain, doi:10.1016/j.future.2024.07.001, footnote to section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.choosing.choice import PROBABILITY, KnownModes, WorkloadChanges, setting_numbers, stated_batches
from wattfleet.core.choosing.front import pareto_front
from wattfleet.core.choosing.joint_choice import Objective, ServingGoal
from wattfleet.core.choosing.joint_profiling import search_within_budgets
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    BatchArray,
    ModeArray,
    PowerMode,
    Profile,
    ProfilingMethod,
    array_to_modes,
    whole_batches,
)
from wattfleet.core.prediction import Prediction

# --- Expected gain ----------------------------------------------------------------------------------------------------
# The expected gain of measuring a mode: how much the measurement is expected to improve the choice within all limits.
#
# The gain is the constrained expected improvement (Gardner et al., "Bayesian Optimization with Inequality
# Constraints", ICML 2014). Costs are logarithms, so a gain is relative to the cost. The gain is computed separately
# for each of `b` limits, such as power budgets.


Values = NDArray[np.float64]
Mask = NDArray[np.bool_]

_MIN_SD = 1e-9
# A gain is not computed where the limits are kept with less than this probability, or where the cost would have to be
# so many standard deviations below its median: of thousands of modes under each limit, few are left.
_UNLIKELY, _FAR_SD = 1e-12, 8.0
# A batch that cannot be collected within the latency has no time left. Its logarithm must be finite.
_NO_TIME_MS = 1e-9


@dataclass(frozen=True)
class Prospects:
    """The costs of `n` modes, and the probabilities that they keep each of `b` limits.

    Attributes:
        log_cost: `[n]` logarithm of the measured or median predicted cost, which the choice minimizes.
        log_sd: `[n, 1]` standard deviation of `log_cost`.
        log_limit: `[n or 1, b or 1]` logarithm of the highest cost that the limits allow; infinite without one.
        others_kept: `[n, b]` probability that all limits of other quantities are kept.
        kept: `[n, b]` whether the measured or median predicted values keep all limits.
        safe: `[n, b]` whether all limits are kept with `PROBABILITY`, each.
    """

    log_cost: Values
    log_sd: Values
    log_limit: Values
    others_kept: Values
    kept: Mask
    safe: Mask

    @classmethod
    def of_training(cls, known: KnownModes, budgets_mw: Values) -> Prospects:
        """The prospects of modes for training, with `[b]` power budgets as limits. The cost is the time per sample."""
        return cls(
            np.log(sample_ms(known.minibatch_ms, known)),
            _column(known.time_log_sd),
            np.full((1, 1), np.inf),
            _probability(known.power_margin(budgets_mw)),
            known.power_mw[:, None] <= budgets_mw,
            known.safe_power_mw(PROBABILITY)[:, None] <= budgets_mw,
        )

    @classmethod
    def of_serving(cls, known: KnownModes, goal: ServingGoal) -> Prospects:
        """The prospects of modes and batches for inference: the goal's `b` limits, and its objective as the cost."""
        batch = known.stated_batch()
        longest_ms = np.column_stack([limits.longest_ms(batch) for limits in goal.limits])
        budgets_mw = np.array([limits.budget_mw for limits in goal.limits])
        log_longest = np.log(np.maximum(longest_ms, _NO_TIME_MS))
        kept = (known.minibatch_ms[:, None] <= longest_ms) & (known.power_mw[:, None] <= budgets_mw)
        safe_ms, safe_mw = known.safe_minibatch_ms(PROBABILITY)[:, None], known.safe_power_mw(PROBABILITY)[:, None]
        safe = (safe_ms <= longest_ms) & (safe_mw <= budgets_mw)
        log_cost = np.log(goal.objective.cost(known.minibatch_ms, known.power_mw, batch))
        time_sd, power_sd = _column(known.time_log_sd), _column(known.power_log_sd)
        if goal.objective is Objective.LEAST_POWER:
            in_time = _probability((log_longest - np.log(known.minibatch_ms)[:, None]) / time_sd)
            return cls(log_cost, power_sd, np.log(budgets_mw)[None], in_time, kept, safe)
        within = _probability(known.power_margin(budgets_mw))
        return cls(log_cost, time_sd, log_longest - np.log(batch)[:, None], within, kept, safe)

    def promising(self, best: Values) -> Promising:
        """The modes and limits with a chance to improve on `[b]` log costs, or on lower ones."""
        bound = np.minimum(best, self.log_limit)
        mode, limit = np.nonzero(
            (self.others_kept > _UNLIKELY) & (bound + _FAR_SD * self.log_sd > self.log_cost[:, None])
        )
        shape = self.others_kept.shape
        return Promising(
            mode,
            limit,
            self.log_cost[mode],
            self.log_sd[mode, 0],
            np.broadcast_to(self.log_limit, shape)[mode, limit],
            self.others_kept[mode, limit],
        )


@dataclass(frozen=True)
class Promising:
    """The `k` pairs of a mode and a limit for which a measurement may gain something: few of all.

    Attributes:
        mode: `[k]` index of the mode.
        limit: `[k]` index of the limit.
        log_cost: `[k]` as in `Prospects`, and likewise the others.
        log_sd: `[k]`.
        log_limit: `[k]`.
        others_kept: `[k]`.
    """

    mode: NDArray[np.intp]
    limit: NDArray[np.intp]
    log_cost: Values
    log_sd: Values
    log_limit: Values
    others_kept: Values

    def gain(self, best: Values, cap: float | None = None) -> Values:
        """`[k]` the expected improvement on `[b]` log costs, counted only if all limits are kept.

        Args:
            best: the log costs to improve on, at most those for which the pairs are promising.
            cap: largest improvement that counts; None for no cap.
        """
        best = best[self.limit]
        gain = self._uncapped(best)
        if cap is not None:
            gain -= self._uncapped(best - cap)
        return np.asarray(gain * self.others_kept)

    def _uncapped(self, best: Values) -> Values:
        # The improvement is counted up to the lower of the best cost and the limit. A cost below a limit that lies
        # under the best cost also saves the difference of the two.
        bound = np.minimum(best, self.log_limit)
        margin = bound - self.log_cost
        z = margin / self.log_sd
        below = _probability(z)
        return np.asarray((best - bound + margin) * below + self.log_sd * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi))


def sample_ms(minibatch_ms: Values, known: KnownModes) -> Values:
    """Comparable times, `[n]` ms: per sample, or per step if all steps have the same batch size."""
    batch = known.batch
    return minibatch_ms if batch is None or (batch == batch[0]).all() else np.asarray(minibatch_ms / batch)


def _column(log_sd: Values) -> Values:
    return np.maximum(log_sd, _MIN_SD)[:, None]


def _probability(deviations: Values) -> Values:
    from scipy.special import ndtr  # imported here to keep scipy out of processes that never sample

    return np.asarray(ndtr(deviations))


# --- Sampling ---------------------------------------------------------------------------------------------------------

Predict = Callable[[Profile], Prediction]
"""Fits a predictor to measured modes, and predicts all modes that can be chosen, each at its batch size."""

Settings = NDArray[np.float64]
"""`[n, 4]` modes, or `[n, 5]` modes with their batch sizes."""

# The roots of x^(d + 1) = x + 1, which generalise the golden ratio. Multiples of a root's first d negative powers,
# modulo 1, fill the d-dimensional unit cube evenly for every number of points.
_ROOTS = {4: 1.1673039782614187, 5: 1.1347241384015194}

# Number of budgets assumed evenly along the predicted front when no budgets are in force.
_FRONT_BUDGETS = 32
# Gains are capped once this many modes are measured. Otherwise the slow end of the front, where predictions are least
# certain, would take most measurements although little remains to be gained there.
_CAPPED_FROM = 20
_GAIN_CAP = 0.03


@dataclass(frozen=True)
class SamplingSettings:
    """Settings for selecting the modes to measure.

    Attributes:
        limit: maximum number of modes to measure in all.
        spread: modes to spread over the space before predictions are used; the highest mode is the first.
            Every kind of predictor can be fitted to five; one that transfers a reference may need fewer.
        batch: maximum number of modes to select between two fits; 1 selects best, more modes need fewer fits.
        tolerance: stop when no measurement is expected to shorten the chosen step by more than this share under any
            budget; 0 continues to the limit.
        seed: seed for drawing the spread modes.

    Raises:
        InvalidInputError: a number is out of range.
    """

    limit: int = 50
    spread: int = 5
    batch: int = 1
    tolerance: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.limit, self.spread, self.batch) < 1 or not 0 <= self.tolerance < 1:
            raise InvalidInputError(
                "limit, spread and batch must be at least 1 mode, and tolerance from 0 to below 1, not"
                f" {self.limit}, {self.spread}, {self.batch} and {self.tolerance}"
            )


def next_modes(
    profile: Profile,
    modes: ModeArray,
    predict: Predict,
    settings: SamplingSettings,
    budgets_mw: Values | None = None,
    exclude: ModeArray | None = None,
    batch: BatchArray | None = None,
    serving: ServingGoal | None = None,
) -> Settings:
    """The modes to measure next, or the modes with batch sizes.

    The same arguments give the same modes, so that an interrupted profile can continue from its measurements alone.

    Args:
        profile: the modes measured so far; may be empty.
        modes: `[n, 4]` modes that can be chosen.
        predict: predicts `modes`; called once `settings.spread` modes have been measured.
        settings: how many modes to measure, and when to stop. A mode counts once for each of its batch sizes.
        budgets_mw: `[b]` budgets in force, mW; None assumes budgets evenly along the predicted front.
        exclude: `[k, 4]` modes never to measure, such as those that the device refused.
        batch: `[n]` samples in the batch of each of `modes`; a mode then occurs once for each of its batch sizes, and
            the profile states its batches. None if there is only one batch size.
        serving: the limits and the objective of a choice for inference. Only batches that can be collected within a
            latency are measured. None for training.

    Returns:
        `[m, 4]` distinct unmeasured modes in descending order; with `batch`, `[m, 5]` modes and their batch sizes. None
        are returned when the profile is complete: the limit is reached, no mode is left, or the choice can no longer
        improve by more than the tolerance.

    Raises:
        InvalidInputError: a budget is not above zero, a batch size is wrong, the profile does not state its batches, or
            a goal for inference is given without batches or with further budgets.
    """
    if serving is not None and (batch is None or budgets_mw is not None):
        raise InvalidInputError("a goal for inference states its budgets itself and needs the batch of each mode")
    if budgets_mw is not None and not (np.isfinite(budgets_mw) & (budgets_mw > 0)).all():
        raise InvalidInputError("budgets must be finite and above zero")
    rows = _settings(modes, batch)
    already = profile.modes if batch is None else _settings(profile.modes, stated_batches(profile))
    allowed = np.ones(len(modes), dtype=bool) if exclude is None else ~_among(modes, exclude)
    if serving is not None and batch is not None:
        allowed &= serving.collectable(batch)
    free = allowed & ~_among(rows, already)
    left = min(settings.limit - len(profile), int(free.sum()))
    if left < 1:
        return rows[:0]
    missing = min(settings.spread - len(profile), left)
    if missing > 0:
        return _missing_spread(rows[allowed], already, missing, settings)
    prediction = predict(profile)
    known = KnownModes.of(modes, prediction, profile, batch)
    if serving is not None:
        prospects = Prospects.of_serving(known, serving)
    elif budgets_mw is not None:
        prospects = Prospects.of_training(known, budgets_mw)
    else:
        front = pareto_front(sample_ms(prediction.minibatch_ms, known), prediction.power_mw)
        front_mw = prediction.power_mw[front]
        prospects = Prospects.of_training(known, np.linspace(front_mw.min(), front_mw.max(), _FRONT_BUDGETS))
    chosen = _most_valuable(prospects, known.measured, free, min(settings.batch, left), settings.tolerance)
    return descending_modes(rows[chosen])


def _settings(modes: ModeArray, batch: BatchArray | None) -> Settings:
    return modes if batch is None else np.column_stack([modes, whole_batches(batch, len(modes))])


def _missing_spread(rows: Settings, already: Settings, count: int, settings: SamplingSettings) -> Settings:
    """Select `count` unmeasured spread modes, in descending order."""
    # A larger total keeps the earlier modes, so it can be raised until enough are unmeasured.
    for total in range(count, len(rows) + 1):
        spread = _spread(rows, total, settings.seed)
        fresh = spread[~_among(spread, already)]
        if len(fresh) == count:
            return fresh
    return rows[:0]


def _most_valuable(prospects: Prospects, measured: Mask, free: Mask, count: int, tolerance: float) -> NDArray[np.intp]:
    """Indices of up to `count` free modes with the largest expected gain.

    Each is selected as if the predictions for the previous ones were confirmed.
    """
    log_cost, kept = prospects.log_cost, prospects.kept
    # Where no measured mode keeps the limits, a measurement improves on the worst predicted mode.
    costs = np.where(kept[measured], log_cost[measured, None], np.inf)
    best = np.minimum(costs.min(axis=0, initial=np.inf), log_cost.max())
    # The current choice, measured or not. Measuring stops when no mode is expected to be much better.
    chosen = np.minimum(best, np.where(prospects.safe, log_cost[:, None], np.inf).min(axis=0))
    free, picks = free.copy(), []
    cap = _GAIN_CAP if measured.sum() >= _CAPPED_FROM else None
    promising = prospects.promising(best)
    for _ in range(count):
        if tolerance and not promising.gain(chosen)[free[promising.mode]].max(initial=0.0) > tolerance:
            break
        of_mode = np.bincount(promising.mode, promising.gain(best, cap), len(free))
        pick = int(np.where(free, of_mode, -1.0).argmax())
        picks.append(pick)
        free[pick] = False
        best = np.where(kept[pick], np.minimum(best, log_cost[pick]), best)
        chosen = np.where(kept[pick], np.minimum(chosen, log_cost[pick]), chosen)
    return np.array(picks, dtype=np.intp)


def spread_modes(modes: ModeArray, count: int, seed: int, batch: BatchArray | None = None) -> Settings:
    """Select modes that fill the space evenly in the logarithms of the knobs, including the highest mode.

    Args:
        modes: `[n, 4]` modes to choose from.
        count: number of modes, from 1 to n.
        seed: seed of the selection.
        batch: `[n]` samples in the batch of each of them, which is then spread, too; None if there is only one size.

    Returns:
        `[count, 4]` distinct modes in descending order; with `batch`, `[count, 5]` modes and their batch sizes,
        including the highest mode with its largest batch.

    Raises:
        InvalidInputError: the count is out of range, or a batch size is wrong.
    """
    if not 1 <= count <= len(modes):
        raise InvalidInputError(f"cannot choose {count} modes: give a number from 1 to {len(modes)}")
    return _spread(_settings(modes, batch), count, seed)


def _spread(rows: Settings, count: int, seed: int) -> Settings:
    """Select `count` of `[n, 4]` or `[n, 5]` rows, in descending order."""
    # A single batch size is not a dimension to fill.
    knobs = rows if (rows[:, 4:] != rows[0, 4:]).any() else rows[:, :4]
    k = knobs.shape[1]
    logs = np.log(knobs)
    low, span = logs.min(axis=0), np.ptp(logs, axis=0)
    unit = (logs - low) / np.where(span > 0, span, 1.0)
    strides = _ROOTS[k] ** -np.arange(1, k + 1)
    points = (np.random.default_rng(seed).random(k) + np.arange(1, count)[:, None] * strides) % 1.0
    free = np.ones(len(rows), dtype=bool)
    for point in (np.ones(k), *points):
        distance = ((unit - point) ** 2).sum(axis=1)
        free[np.where(free, distance, np.inf).argmin()] = False
    return descending_modes(rows[~free])


def grid_modes(modes: ModeArray, count: int) -> ModeArray:
    """Select a uniform grid: all modes at evenly spaced values of each knob, the highest and the lowest among them.

    Knobs get equally many values, as far as they have them and the count allows.

    Args:
        modes: `[n, 4]` modes to choose from.
        count: maximum number of modes, at least 1.

    Returns:
        `[m, 4]` modes, at most `count`, in descending order. The same grid results from the count `m`.

    Raises:
        InvalidInputError: the count is below 1.
    """
    if count < 1:
        raise InvalidInputError(f"cannot choose {count} modes: give 1 or more")
    values = [np.unique(knob) for knob in modes.T]

    def grid(numbers: Sequence[int]) -> ModeArray:
        chosen = [
            each[np.linspace(len(each) - 1, 0, number).round().astype(int)]
            for each, number in zip(values, numbers, strict=True)
        ]
        return modes[np.all([np.isin(knob, each) for knob, each in zip(modes.T, chosen, strict=True)], axis=0)]

    numbers = [1] * len(values)
    while True:
        # The knob with the fewest values gets the next one; of several, the one that has the most.
        for k in sorted(range(len(values)), key=lambda k: (numbers[k], -len(values[k]))):
            more = [number + (k == j) for j, number in enumerate(numbers)]
            if numbers[k] < len(values[k]) and len(grid(more)) <= count:
                numbers = more
                break
        else:
            return descending_modes(grid(numbers))


def descending_modes(modes: Settings) -> Settings:
    """Sort `[n, 4]` modes from high to low: by CPU, then GPU, then memory frequency, then cores.

    `[n, 5]` modes with batch sizes are sorted by their batch size last, the largest first.
    """
    cores, cpu, gpu, mem, *batch = modes.T
    order: NDArray[np.intp] = np.lexsort((*batch, cores, mem, gpu, cpu))[::-1]
    return np.asarray(modes[order])


def _among(rows: Settings, others: Settings) -> Mask:
    """`[n]` whether each of `n` modes is among `k` others; likewise with batch sizes."""
    return np.isin(*setting_numbers(rows, others))


# --- Profiling method -------------------------------------------------------------------------------------------------
# Compares profiling methods by the time that each takes to measure, and the training time that it loses.
#
# The question is that of PowerTrain's table 1 (doi:10.1016/j.future.2024.07.001, section 1.5). Here a method is
# judged by the total time of measuring and of all training in the modes that it then chooses.

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
