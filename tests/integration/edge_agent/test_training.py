"""One round's training on a device: the mode in force, the observation, measured modes, and parking at its end."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edge_agent.devices.device import KnobNotReachedError, ModeNotAppliedError, PowerTrace
from edge_agent.devices.selection import open_device
from edge_agent.devices.sysfs import SysfsDevice
from edge_agent.devices.virtual.virtual_board import VirtualBoard
from edge_agent.learning.online_learner import Observed
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.profiler import ProductiveProfiler
from edge_agent.runtime.readiness import parked_mode
from edge_agent.training.training import PowerNotReadError, TrainingRunner
from edge_agent.workloads.loading import StepTimes
from tests.fakes.boards import MODE, OTHER, PARKED, RealTimeBoard, Trained
from tests.fakes.faked_jetson import ORIN_NANO, FakedJetson, open_sysfs
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import JournalHeader, PowerMode, modes_to_array

# --- Training ---------------------------------------------------------------------------------------------------------
# One round's training on a device: the mode in force, the observation, and parking whatever happens.


NAN = float("nan")


def nothing_to_measure(power_limit_w: float) -> ProductiveProfiler:
    raise AssertionError("the app reported no minibatches")


TRAINED = Trained(500, nothing_to_measure)


@pytest.fixture
def board() -> VirtualBoard:
    return open_device("simulated:agx-orin", 3)


@pytest.fixture
def watch(board: VirtualBoard) -> TrainingRunner:
    return TrainingRunner(board, parked_mode(board))


def test_the_observation_matches_the_boards_true_figures(board: VirtualBoard, watch: TrainingRunner) -> None:
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
    watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
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


def test_a_knob_that_a_granted_mode_does_not_reach_is_noted(board: VirtualBoard, watch: TrainingRunner) -> None:
    trained, apply = Trained(), board.apply

    def apply_other_than_granted(mode: PowerMode) -> None:
        if mode in (MODE, OTHER):
            raise KnobNotReachedError("the memory stands at 2133 MHz", "mem_hz")
        apply(mode)

    board.apply = apply_other_than_granted  # type: ignore[method-assign]
    with pytest.raises(KnobNotReachedError):
        watch.start(trained, MODE, epochs=1, power_limit_w=60)
    board.apply = apply  # type: ignore[method-assign]
    watch.start(trained, MODE, epochs=1, power_limit_w=60)
    board.apply = apply_other_than_granted  # type: ignore[method-assign]
    with pytest.raises(KnobNotReachedError):
        watch.reassign(OTHER, 40)
    assert trained.unreached == [("mem_hz", MODE), ("mem_hz", OTHER)]


def test_a_failed_training_parks_without_an_observation(board: VirtualBoard, watch: TrainingRunner) -> None:
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
    watch = TrainingRunner(board, parked_mode(board))
    watch.start(Trained(100, lambda power_limit_w: Stuck()), MODE, epochs=1, power_limit_w=60)
    assert watch.minibatches_ended([], paused=False)
    with pytest.raises(ModeNotAppliedError):
        watch.reassign(lower, 20)
    assert board.current_mode() == lower


def test_a_repeated_order_changes_nothing(board: VirtualBoard, watch: TrainingRunner) -> None:
    watch.start(TRAINED, MODE, epochs=2, power_limit_w=60)
    watch.reassign(MODE, 60)
    observed = watch.finish()
    assert observed is not None and observed.mode == MODE
    watch.start(TRAINED, MODE, epochs=2, power_limit_w=60)
    watch.reassign(MODE, 50)
    assert watch.finish() is None, "the watts have changed"


def test_a_new_training_replaces_an_unfinished_one(board: VirtualBoard, watch: TrainingRunner) -> None:
    watch.start(TRAINED, MODE, epochs=1, power_limit_w=60)
    board.clock.sleep_s(1000)
    slower = MODE._replace(gpu_hz=318_750_000)
    watch.start(TRAINED, slower, epochs=1, power_limit_w=60)
    observed = watch.finish()
    assert observed.mode == slower
    assert observed.epoch_s < 500


@pytest.mark.parametrize("epochs", [0.0, -1.0, 1e-320, 1e-4, 1e5, float("nan"), float("inf")])
def test_numbers_of_epochs_out_of_range_are_refused(board: VirtualBoard, watch: TrainingRunner, epochs: float) -> None:
    before = board.current_mode()
    with pytest.raises(InvalidInputError, match="epochs must be 0.001 to 10000"):
        watch.start(TRAINED, MODE, epochs, power_limit_w=60)
    assert board.current_mode() == before


def test_a_mode_of_another_board_is_refused(watch: TrainingRunner) -> None:
    with pytest.raises(InvalidInputError):
        watch.start(TRAINED, MODE._replace(gpu_hz=1), 1, power_limit_w=60)


@pytest.mark.parametrize("shown_mw", [float("nan"), 0.0])
def test_power_that_cannot_be_read_is_missing_not_zero(
    board: VirtualBoard, watch: TrainingRunner, monkeypatch: pytest.MonkeyPatch, shown_mw: float
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
    watch = TrainingRunner(device, parked_mode(device))
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
    watch = TrainingRunner(device, parked_mode(device))
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
    watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
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
    watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
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
    watch = TrainingRunner(device, parked_mode(device))
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

    watch = TrainingRunner(board, PARKED, granted=granted)  # type: ignore[arg-type]
    watch.start(TRAINED, MODE, epochs=1, power_limit_w=30)
    watch.reassign(OTHER, 20)
    board.clock.sleep_s(10)
    watch.finish()
    assert told == [(30, PARKED), (20, MODE), (None, OTHER)]


@pytest.mark.parametrize("end", [TrainingRunner.abandon, TrainingRunner.finish])
def test_the_energy_counts_from_the_set_mode_until_the_board_is_parked(
    end: Callable[[TrainingRunner], object],
) -> None:
    board = RealTimeBoard()
    watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
    watch.start(TRAINED, MODE, epochs=1, power_limit_w=30)
    assert watch.drawn is None
    board.clock.sleep_s(10)
    end(watch)
    assert watch.drawn is not None
    assert watch.drawn.lasted_s == pytest.approx(11.0), "a change of the mode takes a second"
    assert watch.drawn.energy_j == pytest.approx(132.0)


def test_the_energy_is_unknown_if_the_board_was_not_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    board = RealTimeBoard()
    watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
    watch.start(TRAINED, MODE, epochs=1, power_limit_w=30)
    board.clock.sleep_s(10)

    def stuck(mode: PowerMode) -> None:
        raise ModeNotAppliedError("the mode does not take")

    monkeypatch.setattr(board, "apply", stuck)
    with pytest.raises(ModeNotAppliedError):
        watch.finish()
    assert watch.drawn is None and board.meters == 0


def test_a_mode_that_is_not_applied_leaves_no_meter_running(monkeypatch: pytest.MonkeyPatch) -> None:
    board = RealTimeBoard()
    watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]

    def stuck(mode: PowerMode) -> None:
        raise ModeNotAppliedError("the mode does not take")

    monkeypatch.setattr(board, "apply", stuck)
    with pytest.raises(ModeNotAppliedError):
        watch.start(TRAINED, MODE, epochs=1, power_limit_w=30)
    assert watch.drawn is None and board.meters == 0


# --- Training measurements --------------------------------------------------------------------------------------------
# Measuring modes during an app's training: reports of minibatches, interruptions and faults.

HEADER = JournalHeader("bench", "orin-nano", "hardware", "resnet18-imagenet", 16)
TIMES = StepTimes(fetch_stall_ms=10.0, compute_ms=90.0)


def measured_with(board: RealTimeBoard, journal: Journal) -> Trained:
    """A workload whose other mode is measured during its trainings."""
    return Trained(500, lambda power_limit_w: ProductiveProfiler(board, [OTHER], journal))  # type: ignore[arg-type]


def measured_in_time(board: RealTimeBoard, journal: Journal, extra_s: float) -> Trained:
    """A workload whose other mode is expected to take so many seconds more than the training's own."""
    trained = Trained(500, minibatch_s=0.1)
    trained.profiler = lambda power_limit_w: ProductiveProfiler(
        board,  # type: ignore[arg-type]
        [OTHER],
        journal,
        fits=lambda mode: extra_s <= trained.spare_s(),
    )
    return trained


def test_minibatches_of_one_report_are_spread_over_their_time(tmp_path: Path) -> None:
    board = RealTimeBoard()
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
        watch.start(measured_with(board, journal), MODE, epochs=1, power_limit_w=30)
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
        assert reports == 7
        assert record.minibatches == 30, "those after them in the last report do not count"
        assert (board.mode, board.held) == (MODE, 0)
        assert watch.finish() is None
    assert (board.mode, board.meters) == (PARKED, 0)


def test_epochs_of_few_minibatches_are_measured_together(tmp_path: Path) -> None:
    board = RealTimeBoard()
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
        watch.start(measured_with(board, journal), MODE, epochs=5, power_limit_w=30)
        epochs = 0
        while watch.minibatches_ended([], paused=False):
            assert board.mode == OTHER, "the measurement lasts"
            board.clock.sleep_s(1.5)
            watch.minibatches_ended([TIMES] * 15, paused=True, is_pass_over=True)
            epochs += 1
        (record,) = journal.records
        assert (record.minibatch_ms, record.power_mw, epochs) == (pytest.approx(100), 9000, 3)
        assert (board.mode, board.held) == (MODE, 0)


@pytest.mark.parametrize("epochs", [1, 2])
def test_after_the_last_epoch_the_assigned_mode_is_in_force(tmp_path: Path, epochs: int) -> None:
    board = RealTimeBoard()
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
        watch.start(measured_with(board, journal), MODE, epochs=epochs, power_limit_w=30)
        modes = []
        for _ in range(epochs):
            watch.minibatches_ended([], paused=False)
            board.clock.sleep_s(1.5)
            watch.minibatches_ended([TIMES] * 15, paused=True, is_pass_over=True)
            modes.append(board.mode)
        assert modes == [OTHER] * (epochs - 1) + [MODE]


def test_epochs_too_short_for_power_discard_no_mode(tmp_path: Path) -> None:
    board = RealTimeBoard()
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        watch, trained = TrainingRunner(board, PARKED), measured_with(board, journal)  # type: ignore[arg-type]
        trained.minibatches_per_epoch = 15
        watch.start(trained, MODE, epochs=20, power_limit_w=30)
        for _ in range(20):
            watch.minibatches_ended([], paused=False)
            board.clock.sleep_s(1.5)
            watch.minibatches_ended([TIMES] * 15, paused=True, is_pass_over=True)
            board.clock.sleep_s(20)
        watch.finish()
        assert (len(journal.records), len(journal.discarded), trained.too_short) == (0, 0, 300)


@pytest.mark.parametrize(("minibatches", "too_short"), [(30, 30), (50, 0)])
def test_a_training_that_was_too_short_to_measure_a_mode_is_noted(
    tmp_path: Path, minibatches: int, too_short: int
) -> None:
    board = RealTimeBoard()
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        watch, trained = TrainingRunner(board, PARKED), measured_with(board, journal)  # type: ignore[arg-type]
        trained.minibatches_per_epoch = minibatches
        watch.start(trained, MODE, epochs=1, power_limit_w=30)
        watch.minibatches_ended([], paused=False)
        board.clock.sleep_s(minibatches / 10)
        watch.minibatches_ended([TIMES] * minibatches, paused=True, is_pass_over=True)
        watch.finish()
        assert (trained.too_short, len(journal.records)) == (too_short, int(not too_short))


def test_an_abandoned_training_releases_the_fan(tmp_path: Path) -> None:
    board = RealTimeBoard()
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
        watch.start(measured_with(board, journal), MODE, epochs=1, power_limit_w=30)
        watch.minibatches_ended([], paused=False)
        watch.abandon()
        assert (board.mode, board.held, board.meters) == (PARKED, 0, 0)
        assert not journal.records


@pytest.mark.parametrize("end", [TrainingRunner.abandon, TrainingRunner.finish])
@pytest.mark.parametrize("broken", ["meter", "fan"])
def test_a_training_whose_end_fails_parks_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[TrainingRunner], object], broken: str
) -> None:
    board = RealTimeBoard()

    def fails(meter: object) -> PowerTrace:
        raise ModeNotAppliedError("it is gone")

    @contextmanager
    def fan_fails() -> Iterator[None]:
        yield
        raise ModeNotAppliedError("it is gone")

    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
        if broken == "meter":
            monkeypatch.setattr(RealTimeBoard.Meter, "stop", fails)
        else:
            monkeypatch.setattr(board, "measuring", fan_fails)
        watch.start(measured_with(board, journal), MODE, epochs=1, power_limit_w=30)
        watch.minibatches_ended([], paused=False)
        assert board.mode == OTHER
        with pytest.raises(ModeNotAppliedError, match="it is gone"):
            end(watch)
        assert (board.mode, board.held) == (PARKED, 0)
        monkeypatch.undo()
        watch.recover()


def test_a_full_disk_ends_measuring_but_not_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board, full = RealTimeBoard(), False

    def write(descriptor: int, data: bytes) -> int:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)

    with Journal.open(tmp_path / "profile.jsonl", HEADER, write) as journal:
        watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
        watch.start(measured_with(board, journal), MODE, epochs=1, power_limit_w=30)
        assert watch.minibatches_ended([], paused=False)
        full = True
        reported, wanted = 0, True
        with caplog.at_level(logging.ERROR):
            while wanted:
                board.clock.sleep_s(0.5)
                wanted = watch.minibatches_ended([TIMES] * 5, paused=False)
                reported += 5
        assert (board.mode, board.held, board.meters) == (MODE, 0, 1)
        assert not watch.minibatches_ended([], paused=False), "the next epoch measures nothing either"
        assert board.mode == MODE
        assert ["No space left" in record.message for record in caplog.records] == [True]
        board.clock.sleep_s(0.1 * (500 - reported))
        observed = watch.finish()
        assert observed is not None and observed.epoch_s == pytest.approx(50)
    assert (board.mode, board.meters) == (PARKED, 0)


@pytest.mark.parametrize(("left", "is_length_known"), [(39, True), (400, False)])
def test_a_short_rest_or_one_of_unknown_length_is_no_observation(
    tmp_path: Path, left: int, is_length_known: bool
) -> None:
    board = RealTimeBoard()
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
        trained = measured_with(board, journal)
        trained.minibatches_per_epoch, trained.is_length_known = 35 + left, is_length_known
        watch.start(trained, MODE, epochs=1, power_limit_w=30)
        reported, wanted = 0, watch.minibatches_ended([], paused=False)
        while wanted:
            board.clock.sleep_s(0.5)
            wanted = watch.minibatches_ended([TIMES] * 5, paused=False)
            reported += 5
        assert reported == 35 and len(journal.records) == 1
        board.clock.sleep_s(0.1 * left)
        assert watch.finish() is None


def test_the_rest_of_a_training_after_measurements_is_observed_in_its_own_mode(tmp_path: Path) -> None:
    board = RealTimeBoard()
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
        trained = measured_with(board, journal)
        trained.profiler = lambda power_limit_w: ProductiveProfiler(board, [OTHER, PARKED], journal)  # type: ignore[arg-type]
        trained.minibatches_per_epoch = 100
        watch.start(trained, MODE, epochs=1, power_limit_w=30)
        reported, wanted = 0, watch.minibatches_ended([], paused=False)
        while wanted:
            board.clock.sleep_s(0.5)
            wanted = watch.minibatches_ended([TIMES] * 5, paused=False)
            reported += 5
        assert [record.mode for record in journal.records] == [OTHER]
        assert reported == 50, "the second half of the training belongs to its own mode"
        assert board.mode == MODE
        board.clock.sleep_s(0.08 * (100 - reported))  # faster than in the measured mode
        observed = watch.finish()
        assert observed is not None and observed.mode == MODE
        assert observed.epoch_s == pytest.approx(8) and observed.power_w == pytest.approx(12)


@pytest.mark.parametrize(("trained_meanwhile_s", "epoch_s"), [(0.0, 10.0), (60.0, 80.0)])
def test_time_in_which_the_app_waits_for_the_agent_is_no_part_of_an_epoch(
    tmp_path: Path, trained_meanwhile_s: float, epoch_s: float
) -> None:
    board = RealTimeBoard()
    watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        complete = Trained(100, lambda power_limit_w: ProductiveProfiler(board, [], journal))  # type: ignore[arg-type]
    watch.start(complete, MODE, epochs=1, power_limit_w=30)
    watch.loader_seen(changed=True)
    board.clock.sleep_s(10.0)  # the predictor is fitted to another batch size
    watch.loader_handled()
    board.clock.sleep_s(trained_meanwhile_s)
    assert not watch.minibatches_ended([], paused=False)
    board.clock.sleep_s(10.0)
    observed = watch.finish()
    assert observed is not None and observed.epoch_s == pytest.approx(epoch_s)


def test_a_training_that_ended_during_a_fit_gives_no_observation() -> None:
    board = RealTimeBoard()
    watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
    watch.start(Trained(100), MODE, epochs=1, power_limit_w=30)
    watch.loader_seen(changed=True)
    board.clock.sleep_s(10.0)
    watch.loader_handled(app_has_finished=True)
    assert watch.finish() is None, "nobody knows when it ended"


def test_nothing_more_is_measured_once_the_batch_changes_in_the_midst_of_a_training(tmp_path: Path) -> None:
    board = RealTimeBoard()
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
        watch.start(measured_with(board, journal), MODE, epochs=1, power_limit_w=30)
        watch.loader_seen(changed=True)
        watch.loader_handled()
        assert watch.minibatches_ended([], paused=False)
        assert board.mode == OTHER
        watch.loader_seen(changed=True)
        assert board.mode == MODE
        watch.loader_handled()
        assert not watch.minibatches_ended([TIMES] * 5, paused=False)
        board.clock.sleep_s(50.0)
        assert watch.finish() is None, "it trained minibatches of two kinds"
    assert journal.records == ()


@pytest.mark.parametrize(
    ("planned_s", "profiled_modes", "measures"),
    [
        (60.0, 5, True),  # 500 minibatches of 0.1 s leave 10 s
        (51.0, 5, False),
        (51.0, 4, True),  # too little is known: the round may become a quarter longer
        (40.0, 4, False),
        (0.0, 5, True),  # it is not known
    ],
)
def test_measuring_takes_only_the_time_that_the_round_leaves(
    tmp_path: Path, planned_s: float, profiled_modes: int, measures: bool
) -> None:
    board = RealTimeBoard()
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
        trained = measured_in_time(board, journal, extra_s=4.0)
        trained.profiled_modes = profiled_modes
        watch.start(trained, MODE, epochs=1, power_limit_w=30, planned_s=planned_s)
        assert watch.minibatches_ended([], paused=False) is measures
        assert board.mode == (OTHER if measures else MODE)


def test_a_measurement_that_takes_unexpectedly_long_ends_before_the_round_does(tmp_path: Path) -> None:
    board = RealTimeBoard()
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        watch = TrainingRunner(board, PARKED)  # type: ignore[arg-type]
        watch.start(measured_in_time(board, journal, extra_s=4.0), MODE, epochs=1, power_limit_w=30, planned_s=60.0)
        reported, wanted = 0, watch.minibatches_ended([], paused=False)
        while wanted:
            board.clock.sleep_s(2.0)  # 20 times as long as in the training's own mode
            wanted = watch.minibatches_ended([TIMES], paused=False)
            reported += 1
        assert board.mode == MODE and not journal.records
        left_s = 0.1 * (500 - reported)
        # It ends once 5 % more are expected, after the minibatch in progress. Each change of the mode takes 1 s.
        assert 60.0 < board.clock.now_s() + left_s < 1.05 * 60.0 + 2.0 + 2.0
