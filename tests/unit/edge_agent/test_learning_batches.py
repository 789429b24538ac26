"""Learning a workload when the app's batch size or measurements of other devices become known later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edge_agent.learning.fitting import Fitting
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.profiling.journal import Journal, JournalHeader
from edge_agent.profiling.known_workload import KnownWorkload
from tests.fakes.batch_fitting import BatchFitting
from tests.fakes.scripted_device import ScriptedDevice
from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeArray, Profile, Workload, WorkloadFacts, array_to_modes

W_PER_SAMPLE = 0.6


def hungry_for_large_batches(known: KnownWorkload, modes: ModeArray) -> Fitting:
    """A fitting that predicts power in proportion to the batch size, in any mode."""
    watts = W_PER_SAMPLE * 1e3 * (known.workload.facts.batch or 0)
    return BatchFitting(modes, np.full(len(modes), watts), np.full(len(modes), 100.0))


def test_modes_are_measured_within_the_watts_of_the_batch_that_is_trained_now(tmp_path: Path) -> None:
    device = ScriptedDevice()
    known = KnownWorkload(Workload("app", WorkloadFacts(batch=16)), 500)

    @contextmanager
    def open_fitting(known: KnownWorkload) -> Iterator[Fitting]:
        yield hungry_for_large_batches(known, device.modes)

    with Journal.open(tmp_path / "profile.jsonl", JournalHeader("orin", "scripted", "hardware", "app", 16)) as journal:
        with open_fitting(known) as fitting:
            fitted = fitting.fit(Profile.of(()), 0)
        learner = OnlineLearner(device, None, journal, open_fitting, fitted, 2, known, 0, lambda kept: None)
        limit_w = 1.2 * 16 * W_PER_SAMPLE
        assert learner.productive(limit_w).measuring
        learner.loader_seen(32, 2, 250)
        assert not learner.productive(limit_w).measuring, "twice the watts are more than the round has"
        assert learner.productive(2 * limit_w).measuring


def test_a_granted_mode_is_lowered_if_other_devices_show_more_watts(tmp_path: Path) -> None:
    device = ScriptedDevice()
    known = KnownWorkload(Workload("app", WorkloadFacts(batch=16)), 500)
    power_mw = np.full(len(device.modes), 10e3)

    @contextmanager
    def open_fitting(known: KnownWorkload) -> Iterator[Fitting]:
        yield BatchFitting(device.modes, power_mw.copy(), np.linspace(100.0, 200.0, len(device.modes)))

    with Journal.open(tmp_path / "profile.jsonl", JournalHeader("orin", "scripted", "hardware", "app", 16)) as journal:
        with open_fitting(known) as fitting:
            fitted = fitting.fit(Profile.of(()), 0)
        learner = OnlineLearner(device, None, journal, open_fitting, fitted, 2, known, 0, lambda kept: None)
        granted, lower = array_to_modes(device.modes)[0], array_to_modes(device.modes)[-1]
        assert learner.granted_mode(granted, 15.0) == granted
        power_mw[:-1] = 30e3
        learner.refit()
        with pytest.raises(InvalidInputError, match="use the same front"):
            learner.granted_mode(granted, 15.0)
        learner.others_measured()
        learner.learn_from_others()
        assert learner.granted_mode(granted, 15.0) == lower
        assert learner.granted_mode(lower, 15.0) == lower
        with pytest.raises(InvalidInputError, match="use the same front"):
            learner.granted_mode(granted, 5.0)
