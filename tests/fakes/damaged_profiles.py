"""Profiles with wrong rows, for tests of the audit and of fits."""

from __future__ import annotations

from functools import cache

import numpy as np

import reference_models
from wattfleet.modes import Profile, board_named
from wattfleet.prediction import RooflinePredictor, SuspectRow, restore_predictor

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
