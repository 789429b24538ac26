"""Chooses mode and batch size with every method at every power limit, and judges the choices by true time and power."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.joint.boards import KINDS, Unit, limits_mw
from benchmarks.joint.promising import measure_promising
from benchmarks.joint.runs import SEEDS, TaskRuns
from benchmarks.joint.tasks import TASKS, BenchmarkTask
from wattfleet.core.choosing import (
    JointChoice,
    JointTable,
    PowerLimit,
    TrainingObjective,
    baseline_1,
    baseline_2,
    choose_jointly,
    fastest_batch,
    highest_safe_gpu_hz,
)
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError

BASELINE = "baseline 1"
OURS = "joint, GPU clock"
OURS_ALL_MODES = "joint, all modes"
ENERGY = "least energy, GPU clock"
ENERGY_ALL_MODES = "least energy, all modes"
FASTEST = "fastest, GPU clock"
FASTEST_ALL_MODES = "fastest, all modes"
THRIFTIEST = "thriftiest, GPU clock"
THRIFTIEST_ALL_MODES = "thriftiest, all modes"
PREDICTED: Mapping[str, int] = {f"joint, all modes, {count} measured": count for count in (20, 50)}
"""Methods that choose from predictions, and the number of modes with a batch size that are measured for them."""

MEASURED_MORE, MORE = "joint, all modes, 20 + 10 measured", 10
"""The method that also measures the most promising predictions, and the maximum number of these measurements."""

EXHAUSTIVE = "joint, GPU clock, everything measured"

BEST_OF: Mapping[str, str] = {
    BASELINE: FASTEST,
    "baseline 2": FASTEST,
    "fastest batch": FASTEST,
    OURS: FASTEST,
    OURS_ALL_MODES: FASTEST_ALL_MODES,
    **dict.fromkeys((*PREDICTED, MEASURED_MORE), FASTEST_ALL_MODES),
    ENERGY: THRIFTIEST,
    ENERGY_ALL_MODES: THRIFTIEST_ALL_MODES,
}
"""The methods, each with its benchmark: the best choice by the target's own samples and the true values."""


@dataclass(frozen=True)
class Case:
    """A judged choice.

    Attributes:
        kind: the kind of board.
        task: the target task's name.
        seed: index of the unit and of the training run.
        level: index of the limit in `LEVELS`.
        limit_w: the limit, W.
        method: the method that made the choice.
        mode: label of the chosen mode.
        batch: chosen batch size.
        time_s: time to the target accuracy, s.
        energy_j: energy to the target accuracy, J.
        power_w: true power, W.
        measurements: number of measured modes with a batch size; None if all are known.
    """

    kind: str
    task: str
    seed: int
    level: int
    limit_w: float
    method: str
    mode: str
    batch: int
    time_s: float
    energy_j: float
    power_w: float
    measurements: int | None = None


@dataclass(frozen=True)
class ProxyCase:
    """How much longer training takes than with the fastest choice if another task is used as the proxy.

    Attributes:
        proxy: the task on which the efficiency of batch sizes was measured.
        target: the task that the board trains.
        slower_pct: additional time compared with the fastest choice, %.
    """

    proxy: str
    target: str
    slower_pct: float


def time_energy_power(minibatch_ms: float, power_mw: float, batch: int, samples: int) -> tuple[float, float, float]:
    """Return time (s), energy (J) and power (W) of a training with a number of samples."""
    time_s = minibatch_ms / batch * samples / 1e3
    return time_s, time_s * power_mw / 1e3, power_mw / 1e3


def compare(runs: Mapping[str, TaskRuns], report: Callable[[str], None]) -> tuple[list[Case], list[ProxyCase]]:
    """Judge every method on every board, task, limit and seed, and every task as the proxy of every other.

    Args:
        runs: the runs of all tasks by name.
        report: called with a line of text when a unit begins.

    Raises:
        InvalidInputError: no task has runs of its proxy.
    """
    tasks = [task for task in TASKS if task.name in runs and task.proxy in runs]
    if not tasks:
        raise InvalidInputError("no task has runs on both of its data sets: train them with --train")
    cases: list[Case] = []
    proxies: list[ProxyCase] = []
    for kind in KINDS:
        units = [Unit(kind, seed) for seed in range(SEEDS)]
        limits = [PowerLimit(limit_mw) for limit_mw in limits_mw(units)]
        for seed, unit in enumerate(units):
            report(f"{kind}, unit {seed + 1} of {SEEDS}")
            predicted = {
                name: {method: unit.predicted(name, count) for method, count in PREDICTED.items()}
                for name in unit.trainings
            }
            for task in tasks:
                for level, limit in enumerate(limits):
                    for method, choice, measurements in _choices(unit, task, runs, limit, predicted[task.network]):
                        where = (kind, task.name, seed, level, limit.power_mw / 1e3, method)
                        cases.append(Case(*where, *_judged(unit, task, runs[task.name], seed, choice), measurements))
                    proxies += _proxy_cases(unit, task, runs, limit, seed)
    return cases, proxies


def _choices(
    unit: Unit,
    task: BenchmarkTask,
    runs: Mapping[str, TaskRuns],
    limit: PowerLimit,
    predicted: Mapping[str, JointTable],
) -> Iterator[tuple[str, JointChoice, int | None]]:
    """Yield the choice of each method, with the number of measurements."""
    training = unit.trainings[task.network]
    proxy, own = runs[task.proxy].efficiency, runs[task.name].efficiency
    clock, every = training.gpu_clock, training.all_modes
    cap_gpu_hz = highest_safe_gpu_hz([each.gpu_clock for each in unit.trainings.values()], limit)
    yield BASELINE, baseline_1(clock, proxy, cap_gpu_hz), None
    yield "baseline 2", baseline_2(clock, proxy, cap_gpu_hz), None
    yield "fastest batch", fastest_batch(clock, proxy, cap_gpu_hz), None
    profile = unit.profiled(task.network, limit)
    yield OURS, choose_jointly(JointTable.measured(profile.rows), proxy, limit), len(profile.rows)
    yield EXHAUSTIVE, choose_jointly(clock, proxy, limit), None
    yield OURS_ALL_MODES, choose_jointly(every, proxy, limit), None
    for method, table in predicted.items():
        with suppress(InfeasibleBudgetError):  # no predicted mode keeps the limit with enough certainty
            yield method, choose_jointly(table, proxy, limit), PREDICTED[method]
    few = min(PREDICTED, key=PREDICTED.__getitem__)
    with suppress(InfeasibleBudgetError):
        better, measured = measure_promising(
            predicted[few], proxy, limit, MORE, lambda mode, batch: unit.measured(task.network, mode, batch)
        )
        yield MEASURED_MORE, choose_jointly(better, proxy, limit), PREDICTED[few] + measured
    energy = TrainingObjective.LEAST_ENERGY
    yield ENERGY, choose_jointly(clock, proxy, limit, energy), None
    yield ENERGY_ALL_MODES, choose_jointly(every, proxy, limit, energy), None
    yield FASTEST, choose_jointly(clock, own, limit), None
    yield FASTEST_ALL_MODES, choose_jointly(every, own, limit), None
    yield THRIFTIEST, choose_jointly(clock, own, limit, energy), None
    yield THRIFTIEST_ALL_MODES, choose_jointly(every, own, limit, energy), None


def _judged(
    unit: Unit, task: BenchmarkTask, runs: TaskRuns, seed: int, choice: JointChoice
) -> tuple[str, int, float, float, float]:
    """Return mode, batch size, time (s), energy (J) and power (W) of a choice in the run of a seed."""
    mode, batch = choice.chosen.mode, choice.chosen.batch
    assert batch is not None, "a joint choice has a batch size"
    true = unit.truth(task.network, mode, batch)
    return mode.label(), batch, *time_energy_power(*true, batch, runs.samples[batch][seed])


def _proxy_cases(
    unit: Unit, task: BenchmarkTask, runs: Mapping[str, TaskRuns], limit: PowerLimit, seed: int
) -> Iterator[ProxyCase]:
    """Return the cases with each task as the proxy, and the GPU clock as the only knob."""
    clock = unit.trainings[task.network].gpu_clock

    def time_s(proxy: str) -> float:
        return _judged(unit, task, runs[task.name], seed, choose_jointly(clock, runs[proxy].efficiency, limit))[2]

    fastest_s = time_s(task.name)
    for proxy in runs:
        yield ProxyCase(proxy, task.name, 100 * (time_s(proxy) / fastest_s - 1))
