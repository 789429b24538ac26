"""Computes figures from rounds: time to an accuracy, energy, participation, and use of the site's budget."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.federated.jobs import OVERHEAD_S
from benchmarks.federated.rounds import Round

OVERHEADS_S = (0.0, 10.0, 30.0)
"""Additional overheads per round, in seconds, for which the time to an accuracy is reported."""

Figures = dict[str, Any]


def seconds(rounds: Sequence[Round], overhead_s: float | None = OVERHEAD_S, steady: bool = False) -> np.ndarray:
    """Return `[r]` seconds from the start to the end of each round; `steady` leaves first minibatches out.

    Args:
        rounds: the rounds.
        overhead_s: seconds of a round in addition to its training; None for server steps, whose seconds include it.
        steady: see above.
    """
    each_s = [(one.steady_s if steady else one.training_s) + (overhead_s or 0.0) for one in rounds]
    return np.cumsum(each_s)


def run_figures(
    rounds: Sequence[Round],
    devices: int,
    idle_w: float,
    budget_w: float,
    overhead_s: float | None = OVERHEAD_S,
    targets: Sequence[float] = (0.90, 0.93),
) -> Figures:
    """Return all figures of one run.

    Args:
        rounds: the run's rounds or server steps.
        devices: number of devices of the fleet.
        idle_w: watts of all devices while none trains.
        budget_w: watts of the site.
        overhead_s: seconds of a round in addition to its training; None for server steps, whose times with other
            overheads or without first minibatches are unknown.
        targets: the accuracies to reach.
    """
    at_s = seconds(rounds, overhead_s)
    energy_kj = np.cumsum([one.training_kj for one in rounds]) + at_s * idle_w / 1e3
    accuracy = [one.accuracy for one in rounds]
    excess = [one.observed_w / budget_w - 1 for one in rounds]
    times = np.bincount([k for one in rounds for k in one.chosen], minlength=devices)
    first = {f"{target:g}": reached(accuracy, target) for target in targets}

    def at_target(values: np.ndarray) -> dict[str, float | None]:
        return {target: None if k is None else float(values[k]) for target, k in first.items()}

    return {
        "rounds": {target: None if k is None else k + 1 for target, k in first.items()},
        "time_s": at_target(at_s),
        "time_s_by_overhead": {}
        if overhead_s is None
        else {f"{over:g}": at_target(seconds(rounds, over)) for over in OVERHEADS_S},
        "time_s_without_first_minibatches": {}
        if overhead_s is None
        else at_target(seconds(rounds, overhead_s, steady=True)),
        "energy_kj": at_target(energy_kj),
        "final_accuracy": float(np.mean(accuracy[-10:])),
        "training_s": statistics.median(one.training_s for one in rounds),
        "devices": statistics.mean(len(one.chosen) for one in rounds),
        "epochs": statistics.mean(one.epochs for one in rounds),
        "batch": statistics.mean(one.batch for one in rounds),
        "participation": float((times > 0).mean()),
        "fairness": float(times.sum() ** 2 / (devices * (times**2).sum())),
        "used_share": statistics.mean(one.true_w / budget_w for one in rounds),
        "worst_excess": max(excess),
        "rounds_over_1pct": sum(share > 0.01 for share in excess),
        "rounds_run": len(rounds),
    }


def series(rounds: Sequence[Round], overhead_s: float | None = OVERHEAD_S) -> Figures:
    """Return the values of a run's plots, round by round."""
    return {
        "at_s": [round(float(value), 2) for value in seconds(rounds, overhead_s)],
        "accuracy": [round(one.accuracy, 5) for one in rounds],
        "observed_w": [round(one.observed_w, 2) for one in rounds],
        "true_w": [round(one.true_w, 2) for one in rounds],
        "planned_w": [round(one.planned_w, 2) for one in rounds],
    }


def median_figures(runs: Sequence[Figures]) -> Figures:
    """Return the medians of the runs' figures. A target counts as reached if more than half of the runs reached it."""
    first = runs[0]
    if any(isinstance(value, Mapping) for value in first.values()):
        return {
            name: median_figures([run[name] for run in runs])
            if isinstance(value, Mapping)
            else _median([run[name] for run in runs])
            for name, value in first.items()
        }
    return {name: _median([run[name] for run in runs]) for name in first}


def _median(values: Sequence[float | None]) -> float | None:
    # A target that was never reached counts as later than all that were.
    middle = statistics.median(float("inf") if value is None else value for value in values)
    return None if middle == float("inf") else middle


def reached(accuracy: Sequence[float], target: float) -> int | None:
    """Return the first round at which the mean accuracy of the last three rounds is high enough."""
    if len(accuracy) < 3:
        return None
    smooth = np.convolve(accuracy, np.ones(3) / 3, mode="valid")
    at = np.flatnonzero(smooth >= target)
    return int(at[0]) + 2 if len(at) else None
