"""One round's training on a device: the mode in force, what was seen, and parked afterwards, whatever happens."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edge_agent.devices.device import Conditions, ModeNotAppliedError, PowerTrace
from edge_agent.devices.physical import PhysicalBoard
from edge_agent.devices.selection import open_device
from edge_agent.devices.sysfs import SysfsDevice
from edge_agent.devices.virtual.virtual_board import VirtualBoard
from edge_agent.profiling.journal import Journal, JournalHeader
from edge_agent.profiling.productive_profiler import ProductiveProfiler
from edge_agent.runtime.readiness import parked_mode
from edge_agent.training.training import Observed, TrainingWatch
from edge_agent.training.training_power import PowerNotReadError
from edge_agent.workloads.step import StepTimes
from tests.fakes.jetson_boards import ORIN_NANO
from tests.fakes.jetson_tree import FakedJetson, open_sysfs
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, modes_to_array
from wattfleet_io.clock import VirtualClock

MODE = PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000)
NAN = float("nan")


def nothing_to_measure(power_limit_w: float) -> ProductiveProfiler:
    raise AssertionError("the app reported no minibatches")


@pytest.fixture
def board() -> VirtualBoard:
    return open_device("simulated:agx-orin", 3)


@pytest.fixture
def watch(board: VirtualBoard) -> TrainingWatch:
    return TrainingWatch(board, parked_mode(board), minibatches_per_epoch=500, productive=nothing_to_measure)


def test_what_is_observed_is_what_the_board_is(board: VirtualBoard, watch: TrainingWatch) -> None:
    watch.start(MODE, epochs=2, power_limit_w=60)
    assert board.current_mode() == MODE
    observed = watch.finish()
    true_ms, true_mw = board.truth(modes_to_array([MODE]))
    assert observed.mode == MODE
    assert observed.epoch_s == pytest.approx(true_ms[0] * 500 / 1e3, rel=0.1)
    assert observed.power_w == pytest.approx(true_mw[0] / 1e3, rel=0.1)
    assert board.current_mode() == parked_mode(board)


def test_a_failed_training_parks_and_teaches_nothing(board: VirtualBoard, watch: TrainingWatch) -> None:
    watch.start(MODE, epochs=1, power_limit_w=60)
    watch.abandon()
    assert board.current_mode() == parked_mode(board)


def test_a_reassigned_mode_is_tried_even_where_the_rounds_own_cannot_be_put_back(board: VirtualBoard) -> None:
    class Stuck:
        measuring = True

        def begin(self) -> None:
            pass

        def pause(self) -> None:
            raise ModeNotAppliedError("the own mode does not take")

    lower = MODE._replace(gpu_hz=318_750_000)
    watch = TrainingWatch(board, parked_mode(board), 100, lambda power_limit_w: Stuck())  # type: ignore[arg-type, return-value]
    watch.start(MODE, epochs=1, power_limit_w=60)
    assert watch.minibatches_ended([], paused=False)
    with pytest.raises(ModeNotAppliedError):
        watch.reassign(lower, 20)
    assert board.current_mode() == lower


def test_what_is_in_force_already_is_no_change(board: VirtualBoard, watch: TrainingWatch) -> None:
    watch.start(MODE, epochs=2, power_limit_w=60)
    watch.reassign(MODE, 60)
    observed = watch.finish()
    assert observed is not None and observed.mode == MODE
    watch.start(MODE, epochs=2, power_limit_w=60)
    watch.reassign(MODE, 50)
    assert watch.finish() is None, "other watts"


def test_the_next_round_replaces_one_that_never_ended(board: VirtualBoard, watch: TrainingWatch) -> None:
    watch.start(MODE, epochs=1, power_limit_w=60)
    board.clock.sleep_s(1000)
    slower = MODE._replace(gpu_hz=318_750_000)
    watch.start(slower, epochs=1, power_limit_w=60)
    observed = watch.finish()
    assert observed.mode == slower
    assert observed.epoch_s < 500


@pytest.mark.parametrize("epochs", [0.0, -1.0, 1e-320, 1e-4, 1e5, float("nan"), float("inf")])
def test_as_good_as_no_or_endless_epochs_are_no_training(
    board: VirtualBoard, watch: TrainingWatch, epochs: float
) -> None:
    before = board.current_mode()
    with pytest.raises(InvalidInputError, match="0.001 to 10000 epochs"):
        watch.start(MODE, epochs, power_limit_w=60)
    assert board.current_mode() == before


def test_a_mode_of_another_board_is_refused(watch: TrainingWatch) -> None:
    with pytest.raises(InvalidInputError):
        watch.start(MODE._replace(gpu_hz=1), 1, power_limit_w=60)


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
    watch.start(MODE, epochs=1, power_limit_w=60)
    with pytest.raises(PowerNotReadError):
        watch.finish()
    assert board.current_mode() == parked_mode(board)
    with pytest.raises(PowerNotReadError):
        watch.recover()


@pytest.mark.parametrize("figure", [0.0, -1.0, float("nan"), float("inf")])
def test_nothing_is_observed_that_cannot_be_learnt_from(figure: float) -> None:
    with pytest.raises(InvalidInputError, match="epoch_s"):
        Observed(MODE, figure, 12.0)
    with pytest.raises(InvalidInputError, match="power_w"):
        Observed(MODE, 60.0, figure)


@pytest.fixture
def jetson(tmp_path: Path) -> FakedJetson:
    return FakedJetson(tmp_path, ORIN_NANO)


class RailMeter:
    """Samples a Jetson's rails five times a second of its virtual time, as they answer when it is read."""

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


def test_a_knob_that_may_not_be_written_is_named_and_the_device_recovers_once_it_may(jetson: FakedJetson) -> None:
    device = opened(jetson)
    watch = TrainingWatch(device, parked_mode(device), 500, nothing_to_measure)
    gpu = f"{jetson.gpu}/max_freq"
    watch.park()
    jetson.unwritable[gpu] = errno.EACCES
    with pytest.raises(ModeNotAppliedError, match=f"{gpu}: no permission to write .*; run the agent as root"):
        watch.start(device.space.highest, epochs=1, power_limit_w=20)
    jetson.unwritable.clear()
    watch.recover()
    assert device.current_mode() == parked_mode(device)
    watch.start(device.space.highest, epochs=1, power_limit_w=20)
    device.clock.sleep_s(10)
    observed = watch.finish()
    assert observed is not None and observed.power_w == ORIN_NANO.power_mw / 1e3


def test_a_power_rail_that_is_gone_is_missing_and_no_recovery_before_it_is_back(jetson: FakedJetson) -> None:
    device = opened(jetson)
    watch = TrainingWatch(device, parked_mode(device), 500, nothing_to_measure)
    rails = jetson.glob("/sys/bus/i2c/drivers/ina3221/*/hwmon/hwmon*/in*_input")
    jetson.unreadable.update(dict.fromkeys(rails, errno.ENODEV))
    watch.start(device.space.highest, epochs=1, power_limit_w=20)
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
def test_a_rounds_power_rests_on_more_than_was_missed(
    monkeypatch: pytest.MonkeyPatch, at_s: list[float], shown_w: list[float], observed_w: float | None
) -> None:
    board = RealTimeBoard()
    watch = TrainingWatch(board, PARKED, 500, nothing_to_measure)  # type: ignore[arg-type]
    watch.park()
    monkeypatch.setattr(
        RealTimeBoard.Meter,
        "read",
        lambda meter: PowerTrace(meter.begin_s + np.array(at_s), np.array(shown_w) * 1e3),
    )
    watch.start(MODE, epochs=1, power_limit_w=30)
    board.clock.sleep_s(10)
    if observed_w is None:
        with pytest.raises(PowerNotReadError, match="in 10 s"):
            watch.finish()
    else:
        observed = watch.finish()
        assert observed is not None and observed.power_w == observed_w
    assert (board.mode, board.meters) == (PARKED, 0)


def test_a_training_too_short_for_its_power_to_be_sampled_is_no_trouble_and_teaches_nothing() -> None:
    board = RealTimeBoard()
    watch = TrainingWatch(board, PARKED, 500, nothing_to_measure)  # type: ignore[arg-type]
    watch.start(MODE, epochs=1, power_limit_w=30)
    board.clock.sleep_s(0.1)
    assert watch.finish() is None
    watch.start(MODE, epochs=1, power_limit_w=30)
    board.clock.sleep_s(0.3)
    assert watch.finish() is not None


def test_a_mode_that_somebody_changed_during_the_training_is_not_observed(
    jetson: FakedJetson, caplog: pytest.LogCaptureFixture
) -> None:
    device = opened(jetson)
    watch = TrainingWatch(device, parked_mode(device), 500, nothing_to_measure)
    watch.start(device.space.highest, epochs=1, power_limit_w=20)
    device.clock.sleep_s(10)
    jetson.put(f"{jetson.gpu}/min_freq", jetson.board.gpu_hz[0])
    assert watch.finish() is None
    assert "somebody changed: /sys/class/devfreq/17000000.gpu/min_freq: wanted" in caplog.text
    assert device.current_mode() == parked_mode(device)


class RealTimeBoard(PhysicalBoard):
    """A board that trains by itself: minibatches are over when the app says so, power is 12 W, but 9 W in `OTHER`."""

    board_kind = "orin-nano"
    provenance = "hardware"

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.modes = modes_to_array([MODE, OTHER, PARKED])
        self.mode = PARKED
        self.held = 0
        self.meters = 0

    def current_mode(self) -> PowerMode:
        return self.mode

    def apply(self, mode: PowerMode) -> None:
        self.clock.sleep_s(1.0)  # as a Jetson takes its time
        self.mode = mode

    def conditions(self) -> Conditions:
        return Conditions(None, None)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        self.held += 1
        yield
        self.held -= 1

    def differences(self, mode: PowerMode) -> list[str]:
        return [] if self.mode == mode else [f"{self.mode.label()} is in force"]

    def start_meter(self) -> RealTimeBoard.Meter:
        self.meters += 1
        return self.Meter(self)

    class Meter:
        def __init__(self, board: RealTimeBoard) -> None:
            self.board = board
            self.begin_s = board.clock.now_s()

        def read(self) -> PowerTrace:
            at_s = np.arange(self.begin_s, self.board.clock.now_s(), 0.2)
            return PowerTrace(at_s, np.full(len(at_s), 9000.0 if self.board.mode == OTHER else 12_000.0))

        def stop(self) -> PowerTrace:
            self.board.meters -= 1
            return self.read()


OTHER = PowerMode(8, 1_728_000, 624_750_000, 3_199_000_000)
PARKED = PowerMode(1, 115_200, 114_750_000, 204_000_000)
TIMES = StepTimes(fetch_stall_ms=10.0, compute_ms=90.0)


def test_reports_of_several_minibatches_are_spread_over_the_time_they_took(tmp_path: Path) -> None:
    board = RealTimeBoard()
    header = JournalHeader("bench", "orin-nano", "hardware", "resnet18-imagenet", 16)
    with Journal.open(tmp_path / "profile.jsonl", header) as journal:
        watch = TrainingWatch(
            board,  # type: ignore[arg-type]
            PARKED,
            500,
            lambda power_limit_w: ProductiveProfiler(board, [OTHER], journal),  # type: ignore[arg-type]
        )
        watch.start(MODE, epochs=1, power_limit_w=30)
        assert watch.minibatches_ended([], paused=False)
        assert (board.mode, board.held) == (OTHER, 1)
        reports, wanted = 0, True
        while wanted:
            board.clock.sleep_s(0.5)
            wanted = watch.minibatches_ended([TIMES] * 5, paused=False)
            reports += 1
        (record,) = journal.records
        assert (record.minibatch_ms, record.power_mw) == (pytest.approx(100), 9000)
        assert (record.fetch_stall_ms, record.compute_ms) == (10, 90)
        assert reports == 9, "41 minibatches are enough; those after them in the last report do not count"
        assert record.minibatches == 40
        assert (board.mode, board.held) == (MODE, 0)
        assert watch.finish() is None
    assert (board.mode, board.meters) == (PARKED, 0)


def test_a_training_given_up_while_a_mode_is_measured_gives_the_fan_back(tmp_path: Path) -> None:
    board = RealTimeBoard()
    header = JournalHeader("bench", "orin-nano", "hardware", "resnet18-imagenet", 16)
    with Journal.open(tmp_path / "profile.jsonl", header) as journal:
        watch = TrainingWatch(
            board,  # type: ignore[arg-type]
            PARKED,
            500,
            lambda power_limit_w: ProductiveProfiler(board, [OTHER], journal),  # type: ignore[arg-type]
        )
        watch.start(MODE, epochs=1, power_limit_w=30)
        watch.minibatches_ended([], paused=False)
        watch.abandon()
        assert (board.mode, board.held, board.meters) == (PARKED, 0, 0)
        assert not journal.records


@pytest.mark.parametrize("end", [TrainingWatch.abandon, TrainingWatch.finish])
@pytest.mark.parametrize("broken", ["meter", "fan"])
def test_a_training_whose_end_fails_parks_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[TrainingWatch], object], broken: str
) -> None:
    board = RealTimeBoard()
    header = JournalHeader("bench", "orin-nano", "hardware", "resnet18-imagenet", 16)

    def fails(meter: object) -> PowerTrace:
        raise ModeNotAppliedError("it is gone")

    @contextmanager
    def fan_fails() -> Iterator[None]:
        yield
        raise ModeNotAppliedError("it is gone")

    with Journal.open(tmp_path / "profile.jsonl", header) as journal:
        watch = TrainingWatch(
            board,  # type: ignore[arg-type]
            PARKED,
            500,
            lambda power_limit_w: ProductiveProfiler(board, [OTHER], journal),  # type: ignore[arg-type]
        )
        if broken == "meter":
            monkeypatch.setattr(RealTimeBoard.Meter, "stop", fails)
        else:
            monkeypatch.setattr(board, "measuring", fan_fails)
        watch.start(MODE, epochs=1, power_limit_w=30)
        watch.minibatches_ended([], paused=False)
        assert board.mode == OTHER
        with pytest.raises(ModeNotAppliedError, match="it is gone"):
            end(watch)
        assert (board.mode, board.held) == (PARKED, 0)
        monkeypatch.undo()
        watch.recover()


def test_a_full_disk_ends_the_measuring_and_not_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board, full = RealTimeBoard(), False

    def write(descriptor: int, data: bytes) -> int:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)

    header = JournalHeader("bench", "orin-nano", "hardware", "resnet18-imagenet", 16)
    with Journal.open(tmp_path / "profile.jsonl", header, write) as journal:
        watch = TrainingWatch(
            board,  # type: ignore[arg-type]
            PARKED,
            500,
            lambda power_limit_w: ProductiveProfiler(board, [OTHER], journal),  # type: ignore[arg-type]
        )
        watch.start(MODE, epochs=1, power_limit_w=30)
        assert watch.minibatches_ended([], paused=False)
        full = True
        with caplog.at_level(logging.ERROR):
            for _ in range(20):
                board.clock.sleep_s(0.5)
                wanted = watch.minibatches_ended([TIMES] * 5, paused=False)
        assert not wanted
        assert (board.mode, board.held, board.meters) == (MODE, 0, 1)
        assert not watch.minibatches_ended([], paused=False), "the next epoch measures nothing either"
        assert board.mode == MODE
        assert ["No space left" in record.message for record in caplog.records] == [True]
        assert watch.finish() is None
    assert (board.mode, board.meters) == (PARKED, 0)
