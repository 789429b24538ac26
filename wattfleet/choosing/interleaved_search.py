"""Selects the next measurement for training beside inference: training in a mode, or inference in a mode with a batch.

A mode and batch can be chosen without any risk once both are measured. The value of a measurement is the constrained
expected improvement on the best such choice (Gardner et al., "Bayesian Optimization with Inequality Constraints", ICML
2014), divided by the number of measurements that are still missing for the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattfleet.choosing.interleaving import InterleavingObjective, PairedModes
from wattfleet.choosing.serving import ServiceLimits
from wattfleet.modes import Task

Values = NDArray[np.float64]
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
