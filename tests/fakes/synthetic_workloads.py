"""Workloads whose times and powers follow the physics exactly, apart from 1 % noise."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from wattfleet.modes import ModeArray, Profile, Task, WorkloadFacts, board_named
from wattfleet.prediction import Prediction, RooflinePredictor
from wattfleet.prediction.roofline import (
    Population,
    PowerParameters,
    TimeParameters,
    measured_member,
    power_mw,
    settings_of,
    step_time_ms,
)

SPACE = board_named("agx-orin").space.array()
FOUR_WORKERS = WorkloadFacts(loader_workers=4)
TIME = TimeParameters(150, 40, 30, 60, 15, 90, 2, 4, 1, 0.12, 1.2, 1.0, 5)
POWER = PowerParameters(9_000, 50, 400, 2_000, 8_000, 500, 300, 3_000, 700, 1, 1, 1, 0.5)
# The training process loads the data itself, so loading and computing add up.
WITHOUT_WORKERS = replace(TIME, workers=1.2, main_cores=0.15, loading_overlap=0.3, compute_mcycles=110)


def drawn(count: int, seed: int) -> ModeArray:
    """Different random modes of an AGX Orin."""
    return SPACE[np.random.default_rng(seed).choice(len(SPACE), count, replace=False)]


def measured(
    modes: ModeArray,
    time: TimeParameters = TIME,
    power: PowerParameters = POWER,
    batch: np.ndarray | None = None,
    noise: float = 0.01,
) -> Profile:
    """Measured rows of a workload: a training, or an inference if its batch sizes are given."""
    factors = np.exp(noise * np.random.default_rng(len(modes)).standard_normal((2, len(modes))))
    settings = settings_of(modes, batch)
    ms, mw = step_time_ms(time, settings) * factors[0], power_mw(power, time, settings) * factors[1]
    return Profile(modes, ms, mw, batch, Task.TRAINING if batch is None else Task.INFERENCE)


@cache
def reference() -> RooflinePredictor:
    """A reference with a population of two workloads: one network, and one with three times the work."""
    corpora = measured(drawn(450, 0)), measured(drawn(420, 1), scaled(3.0))
    board = board_named("agx-orin").hardware
    members = tuple(measured_member(corpus, FOUR_WORKERS, board) for corpus in corpora)
    return replace(RooflinePredictor.fit(corpora[0]), hardware=board, population=Population(members))


def scaled(factor: float, time: TimeParameters = TIME) -> TimeParameters:
    """A workload with all its work multiplied by a factor."""
    log = time.log()
    log[:7] += np.log(factor)
    return TimeParameters.from_log(log)


def errors_pct(found: Prediction, truth: Profile) -> tuple[float, float]:
    """Median absolute errors of time and power, percent."""
    time, power = found.minibatch_ms / truth.minibatch_ms, found.power_mw / truth.power_mw
    return float(100 * np.median(np.abs(time - 1))), float(100 * np.median(np.abs(power - 1)))
