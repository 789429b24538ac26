"""Trainings with interleaved requests: reported to the coordinator, but not learned as times of a training alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_agent.learning.online_learner import Observed
from edge_agent.profiling.profiler import ProductiveProfiler
from edge_agent.training.training import TrainingWatch
from edge_agent.workloads.loading import StepTimes
from tests.fakes.real_time_board import MODE, PARKED, RealTimeBoard
from tests.fakes.trained import Trained
from tests.integration.edge_agent.test_learning import Bench
from wattfleet.modes import array_to_modes


class SharedBoard:
    """A board whose trainings take twice as long while it is shared."""

    def __init__(self) -> None:
        self.shared_with: str | None = None
        self.board = RealTimeBoard()
        self.watch = TrainingWatch(self.board, PARKED, sharing=lambda: self.shared_with)

    def start(self) -> None:
        self.watch.start(Trained(500, self.measures), MODE, epochs=1, power_limit_w=60)

    def measures(self, power_limit_w: float) -> ProductiveProfiler:
        raise AssertionError("the app's times contain the waiting for requests")

    def finish(self) -> Observed | None:
        self.board.clock.sleep_s(60.0 if self.shared_with is None else 120.0)
        return self.watch.finish()


@pytest.fixture
def shared() -> SharedBoard:
    return SharedBoard()


@pytest.mark.parametrize(("whom", "epoch_s"), [(None, 60.0), ("camera", 120.0)])
def test_an_observation_says_whether_it_was_beside_requests(
    shared: SharedBoard, whom: str | None, epoch_s: float
) -> None:
    shared.shared_with = whom
    shared.start()
    observed = shared.finish()
    assert observed is not None
    assert (observed.is_shared, observed.epoch_s) == (whom is not None, pytest.approx(epoch_s, rel=0.05))


@pytest.mark.parametrize(("before", "after"), [(None, "camera"), ("camera", None), ("camera", "radar")])
def test_a_duty_that_changes_during_a_training_leaves_no_observation(
    shared: SharedBoard, before: str | None, after: str | None
) -> None:
    shared.shared_with = before
    shared.start()
    shared.shared_with = after
    assert shared.finish() is None


def test_no_modes_are_measured_during_a_training_beside_requests(shared: SharedBoard) -> None:
    shared.shared_with = "camera"
    shared.start()
    assert not shared.watch.minibatches_ended([], paused=False)
    shared.shared_with = None
    shared.start()
    shared.shared_with = "camera"
    assert not shared.watch.minibatches_ended([StepTimes(1.0, 1.0)], paused=False)


def test_a_board_does_not_seem_slower_after_rounds_beside_requests(tmp_path: Path) -> None:
    """Each round takes three times as long as alone, which would otherwise count as drift after a few rounds."""
    bench = Bench(tmp_path / "profile.jsonl")
    mode = array_to_modes(bench.device.modes)[1234]
    alone = bench.learner._fitted.at(mode, bench.learner.known).minibatch_ms[0]  # noqa: SLF001 - before any round
    records, front = len(bench.journal.measurements), bench.learner.predicted_front()[0]
    per_epoch = bench.learner.minibatches_per_epoch
    for _ in range(6):
        observed = Observed(mode, 3 * float(alone) * per_epoch / 1e3, 9.0, is_shared=True)
        assert bench.learner.observe(observed) is None
    assert len(bench.journal.measurements) == records
    assert np.array_equal(bench.learner.predicted_front()[0].epoch_s, front.epoch_s)
    reasons = [bench.learner.observe(Observed(mode, observed.epoch_s, 9.0)) for _ in range(6)]
    assert any(reasons), "without requests, the same observations show a board that has become slower"
    bench.learner.close()
