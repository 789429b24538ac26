"""Profiles for tests of predictors: measured ones with wrong rows, and ones that follow the physics exactly."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

import reference_models
from wattfleet.core.modes import ModeArray, Profile, Task, WorkloadFacts, board_named
from wattfleet.core.prediction import Prediction, RooflinePredictor, SuspectRow, restore_predictor
from wattfleet.core.prediction.roofline import (
    Population,
    PowerParameters,
    TimeParameters,
    measured_member,
    power_mw,
    settings_of,
    step_time_ms,
)

# --- Damaged profiles -------------------------------------------------------------------------------------------------
# Profiles with wrong rows, for tests of the audit and of fits.


SPACE = board_named("agx-orin").space.array()


@cache
def shipped_reference() -> RooflinePredictor:
    found = restore_predictor(reference_models.load("agx_orin_resnet18"), board_named("agx-orin"))
    assert isinstance(found, RooflinePredictor)
    return found


def measured_profile(count: int, seed: int) -> Profile:
    """The reference's own board and workload, 1.5 times slower, with 1.5 % noise."""
    rng = np.random.default_rng(seed)
    modes = SPACE[rng.choice(len(SPACE), count, replace=False)]
    truth = shipped_reference().predict(modes)
    noise = np.exp(0.015 * rng.standard_normal((2, count)))
    return Profile(modes, 1.5 * truth.minibatch_ms * noise[0], truth.power_mw * noise[1])


def with_wrong_rows(profile: Profile, share: float, seed: int, one_knob: bool) -> tuple[Profile, list[int]]:
    """Give some rows the time and power of another row; with `one_knob`, of one whose mode differs in one knob."""
    rng = np.random.default_rng(seed)
    rows = rng.choice(len(profile), round(share * len(profile)), replace=False)
    time, power = profile.minibatch_ms.copy(), profile.power_mw.copy()
    for row in rows:
        differing = (profile.modes != profile.modes[row]).sum(1)
        others = np.flatnonzero(differing == 1) if one_knob else np.empty(0)
        other = rng.choice(others if len(others) else np.flatnonzero(differing))
        time[row], power[row] = profile.minibatch_ms[other], profile.power_mw[other]
    return Profile(profile.modes, time, power), [int(row) for row in rows]


def clearly_wrong_rows(profile: Profile, damaged: Profile, rows: list[int]) -> set[int]:
    """The wrong rows whose values differ enough to matter."""
    time = np.abs(np.log(damaged.minibatch_ms / profile.minibatch_ms))
    power = np.abs(np.log(damaged.power_mw / profile.power_mw))
    return {row for row in rows if time[row] > 0.2 or power[row] > 0.12}


def suspect_indices(suspects: list[SuspectRow]) -> set[int]:
    return {suspect.row for suspect in suspects}


def six_rows_with_two_wrong() -> Profile:
    """Six rows, two of them wrong. The other four are too few for a fit without a reference."""
    correct = measured_profile(6, 6)
    wrong = np.array([[2.0, 1.6], [0.5, 0.6], [1, 1], [1, 1], [1, 1], [1, 1]])
    return Profile(correct.modes, correct.minibatch_ms * wrong[:, 0], correct.power_mw * wrong[:, 1])


# --- Synthetic workloads ----------------------------------------------------------------------------------------------
# Workloads whose times and powers follow the physics exactly, apart from 1 % noise.

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
