"""One round's training on a device: the mode in force, what was seen, and parked afterwards, whatever happens."""

from __future__ import annotations

import numpy as np
import pytest

from edge_agent.agent import parked_mode
from edge_agent.devices.device import PowerTrace
from edge_agent.devices.selection import open_device
from edge_agent.devices.soft_board import SoftBoard
from edge_agent.productive import ProductiveProfiler
from edge_agent.training import PowerNotReadError, TrainingWatch
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, as_array

MODE = PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000)


def nothing_to_measure(power_limit_w: float) -> ProductiveProfiler:
    raise AssertionError("the app reported no minibatches")


@pytest.fixture
def board() -> SoftBoard:
    return open_device("simulated:agx-orin", 3)


@pytest.fixture
def watch(board: SoftBoard) -> TrainingWatch:
    return TrainingWatch(board, parked_mode(board), minibatches_per_epoch=500, productive=nothing_to_measure)


def test_what_is_observed_is_what_the_board_is(board: SoftBoard, watch: TrainingWatch) -> None:
    watch.start(MODE, epochs=2, power_limit_w=60)
    assert board.current_mode() == MODE
    observed = watch.finish()
    true_ms, true_mw = board.truth(as_array([MODE]))
    assert observed.mode == MODE
    assert observed.epoch_s == pytest.approx(true_ms[0] * 500 / 1e3, rel=0.1)
    assert observed.power_w == pytest.approx(true_mw[0] / 1e3, rel=0.1)
    assert board.current_mode() == parked_mode(board)


def test_a_failed_training_parks_and_teaches_nothing(board: SoftBoard, watch: TrainingWatch) -> None:
    watch.start(MODE, epochs=1, power_limit_w=60)
    watch.abandon()
    assert board.current_mode() == parked_mode(board)


def test_the_next_round_replaces_one_that_never_ended(board: SoftBoard, watch: TrainingWatch) -> None:
    watch.start(MODE, epochs=1, power_limit_w=60)
    board.clock.sleep_s(1000)
    slower = MODE._replace(gpu_hz=318_750_000)
    watch.start(slower, epochs=1, power_limit_w=60)
    observed = watch.finish()
    assert observed.mode == slower
    assert observed.epoch_s < 500


@pytest.mark.parametrize("epochs", [0.0, -1.0, float("nan"), float("inf")])
def test_no_epochs_are_no_training(board: SoftBoard, watch: TrainingWatch, epochs: float) -> None:
    before = board.current_mode()
    with pytest.raises(InvalidInputError, match="epochs"):
        watch.start(MODE, epochs, power_limit_w=60)
    assert board.current_mode() == before


def test_a_mode_of_another_board_is_refused(watch: TrainingWatch) -> None:
    with pytest.raises(InvalidInputError):
        watch.start(MODE._replace(gpu_hz=1), 1, power_limit_w=60)


def test_power_that_cannot_be_read_is_missing_not_zero(
    board: SoftBoard, watch: TrainingWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenMeter:
        def read(self) -> PowerTrace:
            return self.stop()

        def stop(self) -> PowerTrace:
            at_s = board.clock.now_s() - np.arange(3.0)[::-1]
            return PowerTrace(at_s, np.full(3, np.nan))

    monkeypatch.setattr(board, "start_meter", BrokenMeter)
    watch.start(MODE, epochs=1, power_limit_w=60)
    with pytest.raises(PowerNotReadError):
        watch.finish()
    assert board.current_mode() == parked_mode(board)
