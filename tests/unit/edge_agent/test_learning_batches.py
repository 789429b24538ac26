"""Learning a workload whose app comes with another batch than before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edge_agent.learning.fitting import Fitted, Fitting
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.profiling.journal import Journal, JournalHeader
from edge_agent.profiling.known_workload import KnownWorkload
from tests.fakes.scripted_device import ScriptedDevice
from wattfleet.choosing import SamplingSettings
from wattfleet.modes import ModeArray, Profile, Workload, WorkloadFacts, array_to_modes, modes_to_array
from wattfleet.prediction import Prediction

W_PER_SAMPLE = 0.6


class HungryForLargeBatches:
    """A fitting that predicts watts in proportion to the batch (a `Fitting`)."""

    def __init__(self, known: KnownWorkload, modes: ModeArray) -> None:
        self.power_mw = W_PER_SAMPLE * 1e3 * (known.workload.facts.batch or 0)
        self.modes = modes

    def fit(self, profile: Profile, measured_modes: int) -> Fitted:
        k = len(self.modes)
        predicted = Prediction(np.full(k, 100.0), np.full(k, self.power_mw), np.full(k, 0.01), np.full(k, 0.01))
        return Fitted(None, predicted)  # type: ignore[arg-type] # nobody stores it

    def next_modes(self, profile: Profile, settings: SamplingSettings, exclude: ModeArray) -> ModeArray:
        excluded = set(array_to_modes(exclude))
        return modes_to_array([mode for mode in array_to_modes(self.modes) if mode not in excluded])


def test_modes_are_measured_within_the_watts_of_the_batch_that_is_trained_now(tmp_path: Path) -> None:
    device = ScriptedDevice()
    known = KnownWorkload(Workload("app", WorkloadFacts(batch=16)), 500)

    @contextmanager
    def open_fitting(known: KnownWorkload) -> Iterator[Fitting]:
        yield HungryForLargeBatches(known, device.modes)

    with Journal.open(tmp_path / "profile.jsonl", JournalHeader("orin", "scripted", "hardware", "app", 16)) as journal:
        with open_fitting(known) as fitting:
            fitted = fitting.fit(Profile.of(()), 0)
        learner = OnlineLearner(device, None, journal, open_fitting, fitted, 2, known, 0, lambda kept: None)
        limit_w = 1.2 * 16 * W_PER_SAMPLE
        assert learner.productive(limit_w).measuring
        learner.loader_seen(32, 2, 250)
        assert not learner.productive(limit_w).measuring, "twice the watts are more than the round has"
        assert learner.productive(2 * limit_w).measuring
