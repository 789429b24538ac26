"""Learning a workload whose app comes with another batch than before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edge_agent.learning.fitting import Fitting
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.profiling.journal import Journal, JournalHeader
from edge_agent.profiling.known_workload import KnownWorkload
from tests.fakes.batch_fitting import BatchFitting
from tests.fakes.scripted_device import ScriptedDevice
from wattfleet.modes import ModeArray, Profile, Workload, WorkloadFacts

W_PER_SAMPLE = 0.6


def hungry_for_large_batches(known: KnownWorkload, modes: ModeArray) -> Fitting:
    """Watts in proportion to the batch, in any mode."""
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
