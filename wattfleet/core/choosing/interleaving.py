"""Choosing the power mode and the inference batch for training and inference that share a board.

A window lasts while one batch of requests is collected. In each window, the inference of one batch runs, and training
minibatches fill the rest. The conditions are those of the published work on training beside inference, as in
`wattfleet.core.choosing.joint_choice`, and the power of the pair is the larger of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.choosing.choice import PROBABILITY, KnownModes
from wattfleet.core.choosing.joint_choice import InfeasibleServiceError, ServiceLimits
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode, Task, array_to_modes

Values = NDArray[np.float64]
Rows = NDArray[np.intp]

_DRAWS = 64
_GOLDEN = (np.sqrt(5) - 1) / 2


class InterleavingObjective(str, Enum):
    """What the choice of a mode and an inference batch maximizes."""

    MOST_PER_WINDOW = "most-per-window"
    MOST_PER_SECOND = "most-per-second"

    def __str__(self) -> str:
        return self.value

    def worth(self, minibatches: Values, collect_ms: Values) -> Values:
        """The value to maximize: minibatches per window, or per second.

        Args:
            minibatches: minibatches in a window.
            collect_ms: the length of the window.
        """
        return (
            minibatches if self is InterleavingObjective.MOST_PER_WINDOW else np.asarray(1e3 * minibatches / collect_ms)
        )


@dataclass(frozen=True)
class InterleavedChoice:
    """A chosen mode and inference batch.

    Attributes:
        mode: the power mode.
        batch: requests in a batch of inference.
        inference_ms: measured or median predicted time of the batch, ms.
        minibatch_ms: measured or median predicted time of a training minibatch, ms.
        power_mw: measured or median predicted power, of training or of inference, whichever is larger, mW.
        window_ms: the time in which one batch of requests is collected, ms.
        minibatches: training minibatches in a window.
        row: index of the mode with the batch among those chosen from.
    """

    mode: PowerMode
    batch: int
    inference_ms: float
    minibatch_ms: float
    power_mw: float
    window_ms: float
    minibatches: int
    row: int


@dataclass(frozen=True)
class PairedModes:
    """Time and power of training and of inference in the same modes, measured or predicted.

    Attributes:
        training: `n` modes.
        inference: `m` modes with batches.
        mode_of: `[m]` index in `training` of the mode of each row of `inference`.
    """

    training: KnownModes
    inference: KnownModes
    mode_of: Rows

    @classmethod
    def of(cls, training: KnownModes, inference: KnownModes) -> PairedModes:
        """Match the modes of training and inference; a mode that occurs in only one of them is left out.

        Raises:
            InvalidInputError: they have no mode in common, or the inference states no batches.
        """
        inference.stated_batch()
        index = {tuple(mode): row for row, mode in enumerate(training.modes.tolist())}
        found = np.array([index.get(tuple(mode), -1) for mode in inference.modes.tolist()], dtype=np.intp)
        if not (found >= 0).any():
            raise InvalidInputError(
                "training and inference have no power mode in common: give measurements of the same board, in the same"
                " modes"
            )
        return cls(training, inference.among(found >= 0), found[found >= 0])

    def minibatches(self, limits: ServiceLimits) -> Values:
        """`[m]` whole minibatches that fit into a window beside the inference, by the measured or median values.

        Below 0 if the inference alone takes longer than the window.
        """
        left_ms = limits.collect_ms(self.inference.stated_batch()) - self.inference.minibatch_ms
        return np.asarray(np.floor(left_ms / self.training.minibatch_ms[self.mode_of]))

    def power_mw(self, probability: float = 0.5) -> Values:
        """`[m]` mW that the pair does not exceed: each of its two powers with the probability."""
        of_training = self.training.safe_power_mw(probability)[self.mode_of]
        return np.asarray(np.maximum(of_training, self.inference.safe_power_mw(probability)))

    def keeps(self, limits: ServiceLimits, probability: float = 0.5) -> NDArray[np.bool_]:
        """`[m]` whether each mode and batch keeps the latency and the budget, each value with the probability."""
        in_time = self.inference.safe_minibatch_ms(probability) <= limits.longest_ms(self.inference.stated_batch())
        return np.asarray(in_time & (self.power_mw(probability) <= limits.budget_mw))

    def sampled_worth(self, limits: ServiceLimits, objective: InterleavingObjective, rows: Rows) -> Values:
        """The worth of `k` rows for `d` evenly spread draws of their times, `[k, d]`; NaN where inference is late.

        All draws of a measured time are equal.
        """
        batches, modes = self.inference.stated_batch()[rows], self.mode_of[rows]
        for_inference, for_training = _draws()
        inference_ms = self.inference.minibatch_ms[rows, None] * np.exp(
            self.inference.time_log_sd[rows, None] * for_inference
        )
        minibatch_ms = self.training.minibatch_ms[modes, None] * np.exp(
            self.training.time_log_sd[modes, None] * for_training
        )
        window_ms = limits.collect_ms(batches)[:, None]
        worth = objective.worth(np.floor((window_ms - inference_ms) / minibatch_ms), window_ms)
        return np.asarray(np.where(inference_ms <= limits.longest_ms(batches)[:, None], worth, np.nan))

    @property
    def measured(self) -> NDArray[np.bool_]:
        """`[m]` whether both training and inference were measured."""
        return np.asarray(self.inference.measured & self.training.measured[self.mode_of])

    def among(self, kept: NDArray[np.bool_]) -> PairedModes:
        """Select rows of inference by an `[m]` mask."""
        return PairedModes(self.training, self.inference.among(kept), self.mode_of[kept])


def choose_interleaved(
    pair: PairedModes,
    limits: ServiceLimits,
    objective: InterleavingObjective = InterleavingObjective.MOST_PER_SECOND,
    probability: float = PROBABILITY,
) -> InterleavedChoice:
    """The mode and inference batch with the most training beside an inference that keeps its limits.

    Unmeasured rows are compared by their expected worth, because the best of many predicted medians is likely to be an
    underestimated time. A tie goes to the lower power.

    Args:
        pair: training and inference, measured or predicted.
        limits: latency, arrival rate and power budget to keep.
        objective: what to maximize.
        probability: probability with which each unmeasured time and power must keep its limit.

    Raises:
        InfeasibleServiceError: nothing keeps the limits with that probability.
        InvalidInputError: the probability is not between 0 and 1.
    """
    kept = np.flatnonzero(pair.keeps(limits, probability))
    if not len(kept):
        raise InfeasibleServiceError(
            f"no mode and batch size answers within {limits.latency_ms:g} ms at {limits.arrival_per_s:g} requests a"
            f" second and draws at most {limits.budget_mw / 1e3:g} W, with a probability of {probability:g}: allow a"
            " higher latency, fewer requests a second or more watts"
        )
    batches = pair.inference.stated_batch()
    window_ms, minibatches = limits.collect_ms(batches), pair.minibatches(limits)
    worth, power_mw = np.nan_to_num(pair.sampled_worth(limits, objective, kept)).mean(axis=1), pair.power_mw()
    row = int(kept[np.lexsort((power_mw[kept], -worth))[0]])
    (mode,) = array_to_modes(pair.inference.modes[row : row + 1])
    return InterleavedChoice(
        mode,
        int(batches[row]),
        float(pair.inference.minibatch_ms[row]),
        float(pair.training.minibatch_ms[pair.mode_of[row]]),
        float(power_mw[row]),
        float(window_ms[row]),
        int(minibatches[row]),
        row,
    )


@cache
def _draws() -> tuple[Values, Values]:
    """Evenly spread pairs of standard normal values, from a golden-ratio lattice."""
    from scipy.special import ndtri  # imported here to keep scipy out of processes that never choose

    numbers = np.arange(_DRAWS)
    return np.asarray(ndtri((numbers + 0.5) / _DRAWS)), np.asarray(ndtri((numbers * _GOLDEN + 0.5) % 1.0))


# --- Interleaved search -----------------------------------------------------------------------------------------------
# Selects the next measurement for training beside inference: training in a mode, or inference in a mode with a batch.
#
# A mode and batch can be chosen without any risk once both are measured. The value of a measurement is the
# constrained expected improvement on the best such choice (Gardner et al., "Bayesian Optimization with Inequality
# Constraints", ICML 2014), divided by the number of measurements that are still missing for the choice.

Mask = NDArray[np.bool_]

# Share of the best choice's worth below which a further improvement is not worth a measurement.
_TOLERANCE = 0.001
# Worth of a choice that keeps the limits but leaves no time for training, in minibatches per window.
_KEPT = 0.5
# Modes and batches that keep the budget with a lower probability are not considered.
_MIN_PROBABILITY = 1e-3


@dataclass(frozen=True)
class Proposal:
    """A proposed measurement.

    Attributes:
        task: training or inference.
        row: index among the modes for training, or among the modes with batches for inference.
    """

    task: Task
    row: int


@dataclass(frozen=True)
class _Gains:
    """Expected improvements of the choice.

    Attributes:
        gain: `[m]` of each mode and batch, as a share of the best choice's worth.
        in_time: `[m]` probability that the inference keeps the latency.
    """

    gain: Values
    in_time: Values


def next_measurement(
    pair: PairedModes, problems: Sequence[ServiceLimits], objective: InterleavingObjective
) -> Proposal | None:
    """The measurement that is most likely to improve the choices.

    Args:
        pair: all modes and batches, each measured or predicted.
        problems: the limits to choose for, each separately.
        objective: what the choice maximizes.

    Returns:
        The measurement; None if no further one is expected to improve the choices noticeably.
    """
    lacking = 2 - pair.training.measured[pair.mode_of].astype(int) - pair.inference.measured
    if not (lacking > 0).any():
        return None
    gains = [_gains(pair, limits, objective, lacking > 0) for limits in problems]
    total = np.sum([each.gain for each in gains], axis=0)
    row = int((total / np.maximum(lacking, 1)).argmax())
    if total[row] <= _TOLERANCE * len(problems):
        return None
    mode = int(pair.mode_of[row])
    if pair.training.measured[mode]:
        return Proposal(Task.INFERENCE, row)
    if pair.inference.measured[row]:
        return Proposal(Task.TRAINING, mode)
    uncertainty = sum(
        np.array(_uncertainties(pair, row, limits, each.in_time[row]))
        for limits, each in zip(problems, gains, strict=True)
    )
    of_training, of_inference = np.asarray(uncertainty).tolist()
    return Proposal(Task.TRAINING, mode) if of_training > of_inference else Proposal(Task.INFERENCE, row)


def _gains(pair: PairedModes, limits: ServiceLimits, objective: InterleavingObjective, open_: Mask) -> _Gains:
    """The expected improvement of each mode and batch on the best measured choice, under one problem's limits."""
    training, inference = pair.training, pair.inference
    batches = inference.stated_batch()
    window_ms, longest_ms = limits.collect_ms(batches), limits.longest_ms(batches)
    # A choice without training is worth as little as it is in the window of the largest batch.
    unit = float(objective.worth(np.array([_KEPT]), window_ms.max())[0])
    known = pair.measured & pair.keeps(limits)
    worth = objective.worth(np.maximum(pair.minibatches(limits), 0.0), window_ms) + unit
    best = float(worth[known].max()) if known.any() else 0.0

    within = _within(training.power_margin(np.array([limits.budget_mw])))[pair.mode_of]
    within = within * _within(inference.power_margin(np.array([limits.budget_mw])))
    gain, in_time = np.zeros(len(batches)), np.zeros(len(batches))
    rows = np.flatnonzero(open_ & (longest_ms > 0) & (within > _MIN_PROBABILITY))
    drawn = pair.sampled_worth(limits, objective, rows)
    gain[rows] = within[rows] * np.fmax(drawn + unit - best, 0.0).mean(axis=1)
    in_time[rows] = np.isfinite(drawn).mean(axis=1)
    return _Gains(gain / max(best, unit), in_time)


def _uncertainties(pair: PairedModes, row: int, limits: ServiceLimits, in_time: float) -> tuple[float, float]:
    """The uncertainty of a mode and batch due to its training and due to its inference; without a unit."""
    training, inference, mode = pair.training, pair.inference, pair.mode_of[row]
    budget_mw = np.array([limits.budget_mw])
    training_within = _within(training.power_margin(budget_mw)[mode : mode + 1])[0]
    inference_within = _within(inference.power_margin(budget_mw)[row : row + 1])[0]
    inference_ms = inference.minibatch_ms[row]
    left_ms = max(float(limits.collect_ms(inference.stated_batch()[row : row + 1])[0] - inference_ms), 1.0)
    of_training = 1 - training_within + training.time_log_sd[mode]
    of_inference = 1 - inference_within * in_time + inference.time_log_sd[row] * inference_ms / left_ms
    return float(of_training), float(of_inference)


def _within(margins: Values) -> Values:
    """The normal probabilities, `[n]`, of keeping a limit by `[n, 1]` margins in standard deviations."""
    from scipy.special import ndtr  # imported here to keep scipy out of processes that never search

    return np.asarray(ndtr(margins[:, 0]))
