"""One round's training on a device: the mode in force, the observation, and parking whatever happens."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from edge_agent.devices.device import ModeNotAppliedError, PowerTrace
from edge_agent.devices.selection import open_device
from edge_agent.devices.sysfs import SysfsDevice
from edge_agent.devices.virtual.virtual_board import VirtualBoard
from edge_agent.learning.online_learner import Observed
from edge_agent.profiling.profiler import ProductiveProfiler
from edge_agent.runtime.readiness import parked_mode
from edge_agent.training.training import PowerNotReadError, TrainingWatch
from tests.fakes.jetson_boards import ORIN_NANO
from tests.fakes.jetson_tree import FakedJetson, open_sysfs
from tests.fakes.real_time_board import MODE, OTHER, PARKED, RealTimeBoard
from tests.fakes.trained import Trained
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, modes_to_array

NAN = float("nan")


def nothing_to_measure(power_limit_w: float) -> ProductiveProfiler:
    raise AssertionError("the app reported no minibatches")


TRAINED = Trained(500, nothing_to_measure)


@pytest.fixture
def board() -> VirtualBoard:
    return open_device("simulated:agx-orin", 3)


@pytest.fixture
def watch(board: VirtualBoard) -> TrainingWatch:
    return TrainingWatch(board, parked_mode(board))


def test_the_observation_matches_the_boards_true_figures(board: VirtualBoard, watch: TrainingWatch) -> None:
    watch.start(TRAINED, MODE, epochs=2, power_limit_w=60)
    assert board.current_mode() == MODE
    observed = watch.finish()
    true_ms, true_mw = board.truth(modes_to_array([MODE]))
    assert observed.mode == MODE
    assert observed.epoch_s == pytest.approx(true_ms[0] * 500 / 1e3, rel=0.1)
    assert observed.power_w == pytest.approx(true_mw[0] / 1e3, rel=0.1)
    assert board.current_mode() == parked_mode(board)


@pytest.mark.parametrize("after_minibatch", [True, False])
def test_the_time_until_the_first_minibatch_has_ended_is_no_part_of_the_pace(after_minibatch: bool) -> None:
    board = RealTimeBoard()
    watch = TrainingWatch(board, PARKED)  # type: ignore[arg-type]
    watch.start(Trained(101), MODE, epochs=1, power_limit_w=30)
    board.clock.sleep_s(8.0)  # the app prepares, and trains its first minibatch
    watch.loader_seen(changed=False, after_minibatch=after_minibatch)
    watch.loader_handled()
    board.clock.sleep_s(100 * 0.2)
    observed = watch.finish()
    assert observed is not None
    if after_minibatch:
        assert observed.epoch_s == pytest.approx(101 * 0.2)
        assert observed.first_minibatch_s == pytest.approx(8.0)
    else:
        assert observed.epoch_s == pytest.approx(28.0) and observed.first_minibatch_s is None


def test_a_failed_training_parks_without_an_observation(board: VirtualBoard, watch: TrainingWatch) -> None:
    watch.start(TRAINED, MODE, epochs=1, power_limit_w=60)
    watch.abandon()
    assert board.current_mode() == parked_mode(board)


def test_a_reassigned_mode_is_applied_even_if_restoring_the_own_mode_fails(board: VirtualBoard) -> None:
    class Stuck:
        measuring = True
        measured = discarded = 0
        is_cut_off = False

        def begin(self) -> None:
            pass

        def pause(self) -> None:
            raise ModeNotAppliedError("the own mode does not take")

    lower = MODE._replace(gpu_hz=318_750_000)
    watch = TrainingWatch(board, parked_mode(board))
    watch.start(Trained(100, lambda power_limit_w: Stuck()), MODE, epochs=1, power_limit_w=60)
    assert watch.minibatches_ended([], paused=False)
    with pytest.raises(ModeNotAppliedError):
        watch.reassign(lower, 20)
    assert board.current_mode() == lower


def test_a_repeated_order_changes_nothing(board: VirtualBoard, watch: TrainingWatch) -> None:
    watch.start(TRAINED, MODE, epochs=2, power_limit_w=60)
    watch.reassign(MODE, 60)
    observed = watch.finish()
    assert observed is not None and observed.mode == MODE
    watch.start(TRAINED, MODE, epochs=2, power_limit_w=60)
    watch.reassign(MODE, 50)
    assert watch.finish() is None, "the watts have changed"


def test_a_new_training_replaces_an_unfinished_one(board: VirtualBoard, watch: TrainingWatch) -> None:
    watch.start(TRAINED, MODE, epochs=1, power_limit_w=60)
    board.clock.sleep_s(1000)
    slower = MODE._replace(gpu_hz=318_750_000)
    watch.start(TRAINED, slower, epochs=1, power_limit_w=60)
    observed = watch.finish()
    assert observed.mode == slower
    assert observed.epoch_s < 500


@pytest.mark.parametrize("epochs", [0.0, -1.0, 1e-320, 1e-4, 1e5, float("nan"), float("inf")])
def test_numbers_of_epochs_out_of_range_are_refused(board: VirtualBoard, watch: TrainingWatch, epochs: float) -> None:
    before = board.current_mode()
    with pytest.raises(InvalidInputError, match="epochs must be 0.001 to 10000"):
        watch.start(TRAINED, MODE, epochs, power_limit_w=60)
    assert board.current_mode() == before


def test_a_mode_of_another_board_is_refused(watch: TrainingWatch) -> None:
    with pytest.raises(InvalidInputError):
        watch.start(TRAINED, MODE._replace(gpu_hz=1), 1, power_limit_w=60)


@pytest.mark.parametrize("shown_mw", [float("nan"), 0.0])
def test_power_that_cannot_be_read_is_missing_not_zero(
    board: VirtualBoard, watch: TrainingWatch, monkeypatch: pytest.MonkeyPatch, shown_mw: float
) -> None:
    class BrokenMeter:
        def read(self) -> PowerTrace:
            return self.stop()

        def stop(self) -> PowerTrace:
            at_s = board.clock.now_s() - np.arange(3.0)[::-1]
            return PowerTrace(at_s, np.full(3, shown_mw))

    monkeypatch.setattr(board, "start_meter", BrokenMeter)
    watch.start(TRAINED, MODE, epochs=1, power_limit_w=60)
    with pytest.raises(PowerNotReadError):
        watch.finish()
    assert board.current_mode() == parked_mode(board)
    with pytest.raises(PowerNotReadError):
        watch.recover()


@pytest.mark.parametrize("figure", [0.0, -1.0, float("nan"), float("inf")])
def test_observations_must_be_finite_and_positive(figure: float) -> None:
    with pytest.raises(InvalidInputError, match="epoch_s"):
        Observed(MODE, figure, 12.0)
    with pytest.raises(InvalidInputError, match="power_w"):
        Observed(MODE, 60.0, figure)


@pytest.fixture
def jetson(tmp_path: Path) -> FakedJetson:
    return FakedJetson(tmp_path, ORIN_NANO)


class RailMeter:
    """Samples a Jetson's rails five times a second of its virtual time, with the values at the time of reading."""

    def __init__(self, device: SysfsDevice) -> None:
        self.device = device
        self.begin_s = device.clock.now_s()

    def read(self) -> PowerTrace:
        at_s = np.arange(self.begin_s, self.device.clock.now_s(), 0.2)
        return PowerTrace(at_s, np.full(len(at_s), self.device.power.read_mw()))

    stop = read


def opened(jetson: FakedJetson) -> SysfsDevice:
    device = open_sysfs(jetson)
    device.start_meter = lambda: RailMeter(device)
    return device


def test_a_knob_without_permission_is_named_and_recovers_with_it(jetson: FakedJetson) -> None:
    device = opened(jetson)
    watch = TrainingWatch(device, parked_mode(device))
    gpu = f"{jetson.gpu}/max_freq"
    watch.park()
    jetson.unwritable[gpu] = errno.EACCES
    with pytest.raises(ModeNotAppliedError, match=f"{gpu}: no permission to write .*; run the agent as root"):
        watch.start(TRAINED, device.space.highest, epochs=1, power_limit_w=20)
    jetson.unwritable.clear()
    watch.recover()
    assert device.current_mode() == parked_mode(device)
    watch.start(TRAINED, device.space.highest, epochs=1, power_limit_w=20)
    device.clock.sleep_s(10)
    observed = watch.finish()
    assert observed is not None and observed.power_w == ORIN_NANO.power_mw / 1e3


def test_recovery_waits_until_a_failed_power_rail_is_back(jetson: FakedJetson) -> None:
    device = opened(jetson)
    watch = TrainingWatch(device, parked_mode(device))
    rails = jetson.glob("/sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/in*_input")
    jetson.unreadable.update(dict.fromkeys(rails, errno.ENODEV))
    watch.start(TRAINED, device.space.highest, epochs=1, power_limit_w=20)
    device.clock.sleep_s(10)
    with pytest.raises(PowerNotReadError, match="read only 0 of 50 times in 10 s, .* check the power rails"):
        watch.finish()
    assert device.current_mode() == parked_mode(device)
    with pytest.raises(PowerNotReadError):
        watch.recover()
    jetson.unreadable.clear()
    watch.recover()


@pytest.mark.parametrize(
    ("at_s", "shown_w", "observed_w"),
    [
        ([1, 4, 7, 9], [9, 12, 12, 11], 11),
        ([2, 4, 6, 8], [9, NAN, 11, NAN], 10),
        ([1, 4, 7, 9], [9, NAN, NAN, NAN], None),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [NAN, 9, NAN, NAN, 9, NAN, 0, 9, NAN], None),
        ([1, 9], [9, NAN], None),
        ([5], [9], None),
        ([5, 5, 5], [9, 9, 9], None),
        ([0.1, 0.3, 0.5], [9, 9, 9], None),
        ([], [], None),
    ],
)
def test_a_rounds_power_needs_more_read_samples_than_missing_ones(
    monkeypatch: pytest.MonkeyPatch, at_s: list[float], shown_w: list[float], observed_w: float | None
) -> None:
    board = RealTimeBoard()
    watch = TrainingWatch(board, PARKED)  # type: ignore[arg-type]
    watch.park()
    monkeypatch.setattr(
        RealTimeBoard.Meter,
        "read",
        lambda meter: PowerTrace(meter.begin_s + np.array(at_s), np.array(shown_w) * 1e3),
    )
    watch.start(TRAINED, MODE, epochs=1, power_limit_w=30)
    board.clock.sleep_s(10)
    if observed_w is None:
        with pytest.raises(PowerNotReadError, match="in 10 s"):
            watch.finish()
    else:
        observed = watch.finish()
        assert observed is not None and observed.power_w == observed_w
    assert (board.mode, board.meters) == (PARKED, 0)


def test_a_training_too_short_to_sample_power_yields_no_observation() -> None:
    board = RealTimeBoard()
    watch = TrainingWatch(board, PARKED)  # type: ignore[arg-type]
    watch.start(TRAINED, MODE, epochs=1, power_limit_w=30)
    board.clock.sleep_s(0.1)
    assert watch.finish() is None
    watch.start(TRAINED, MODE, epochs=1, power_limit_w=30)
    board.clock.sleep_s(0.3)
    assert watch.finish() is not None


def test_a_mode_changed_by_another_process_yields_no_observation(
    jetson: FakedJetson, caplog: pytest.LogCaptureFixture
) -> None:
    device = opened(jetson)
    watch = TrainingWatch(device, parked_mode(device))
    watch.start(TRAINED, device.space.highest, epochs=1, power_limit_w=20)
    device.clock.sleep_s(10)
    jetson.put(f"{jetson.gpu}/min_freq", jetson.board.gpu_hz[0])
    assert watch.finish() is None
    assert "another process changed the mode: /sys/class/devfreq/17000000.gpu/min_freq: wanted" in caplog.text
    assert device.current_mode() == parked_mode(device)


def test_the_watts_of_a_training_are_told_before_its_mode_is_applied() -> None:
    board = RealTimeBoard()
    told: list[tuple[float | None, PowerMode]] = []

    def granted(power_limit_w: float | None) -> None:
        told.append((power_limit_w, board.mode))

    watch = TrainingWatch(board, PARKED, granted=granted)  # type: ignore[arg-type]
    watch.start(TRAINED, MODE, epochs=1, power_limit_w=30)
    watch.reassign(OTHER, 20)
    board.clock.sleep_s(10)
    watch.finish()
    assert told == [(30, PARKED), (20, MODE), (None, OTHER)]
