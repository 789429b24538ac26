"""Selecting the modes to measure: first spread over the mode space, then where they affect the choice of a mode.

The best of thousands of predicted modes is likely one whose power was underestimated. Therefore the modes that would be
chosen are measured first. The value of a measurement is its expected gain, summed over the budgets
(`wattfleet/choosing/expected_gain.py`).

If there are several batch sizes to choose from, modes with batches are selected in the same way. What counts is then
the time per sample, which can be compared between batch sizes. For inference, what counts is the goal's objective,
within its latencies and budgets.

Modes are returned by descending frequency, because Jetsons apply downward sweeps more reliably than upward ones
(PowerTrain, doi:10.1016/j.future.2024.07.001, footnote to section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattfleet.choosing.choice import KnownModes, stated_batches
from wattfleet.choosing.expected_gain import Prospects, sample_ms
from wattfleet.choosing.front import pareto_front
from wattfleet.choosing.serving import ServingGoal
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BatchArray, ModeArray, Profile, whole_batches
from wattfleet.prediction import Prediction

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]
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
    costs = np.where(measured[:, None] & kept, log_cost[:, None], np.inf)
    best = np.minimum(costs.min(axis=0), log_cost.max())
    # The current choice, measured or not. Measuring stops when no mode is expected to be much better.
    chosen = np.minimum(best, np.where(prospects.safe, log_cost[:, None], np.inf).min(axis=0))
    free, picks = free.copy(), []
    cap = _GAIN_CAP if measured.sum() >= _CAPPED_FROM else None
    for _ in range(count):
        if not prospects.gain(chosen)[free].max(initial=0.0) > tolerance:
            break
        pick = int(np.where(free, prospects.gain(best, cap).sum(axis=1), -1.0).argmax())
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


def descending_modes(modes: Settings) -> Settings:
    """Sort `[n, 4]` modes from high to low: by CPU, then GPU, then memory frequency, then cores.

    `[n, 5]` modes with batch sizes are sorted by their batch size last, the largest first.
    """
    cores, cpu, gpu, mem, *batch = modes.T
    order: NDArray[np.intp] = np.lexsort((*batch, cores, mem, gpu, cpu))[::-1]
    return np.asarray(modes[order])


def _among(rows: Settings, others: Settings) -> Mask:
    """`[n]` whether each of `n` modes is among `k` others; likewise with batch sizes."""
    listed = {tuple(row) for row in others.tolist()}
    return np.array([tuple(row) in listed for row in rows.tolist()], dtype=bool)
