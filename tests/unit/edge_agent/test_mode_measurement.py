"""The measurement of one mode: when a board has settled, and modes measured during an app's own training."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import numpy as np
import pandas as pd
import pytest

from edge_agent.devices.device import ModeNotAppliedError, PowerTrace
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.mode_measurement import (
    Limits,
    ProfilerSettings,
    level_mw,
    settled_minibatch_ms,
    settled_power_mw,
)
from edge_agent.profiling.profiler import ProductiveProfiler, Profiler
from edge_agent.workloads.loading import StepTimes
from reference_models.logs import read_run_logs
from wattfleet.common.clock import VirtualClock
from wattfleet.core.modes import JournalHeader, Profile, array_to_modes
from wattfleet_proto.device_state import BoardSample

# --- Settling ---------------------------------------------------------------------------------------------------------


def trace(*samples):
    at_s, power_mw = np.array(samples, dtype=float).T
    return PowerTrace(at_s, power_mw)


# The first minibatch ends at 10 s, the last at 24 s.
ENDS = np.arange(10.0, 24.1, 0.35)
IDLE = [(0, 7000), (0, 7000), (0.7, 7100), (2, 7050), (5, 7000), (9.5, 7100)]


def test_the_first_minibatch_does_not_count():
    time = settled_minibatch_ms(np.array([7068.0, 351.0, 353.0, 352.0, 360.0]))
    assert (time.median, time.count) == (352.5, 4)
    # The absolute deviations from 352.5 are 1.5, 0.5, 0.5 and 7.5, so their median is 1.
    assert time.spread == pytest.approx(1.4826 * 1.0 / 352.5)


@pytest.mark.parametrize("times_ms", [[], [7068.0]])
def test_a_single_minibatch_tells_nothing(times_ms):
    with pytest.raises(ValueError, match="at least 2"):
        settled_minibatch_ms(np.array(times_ms))


def test_idling_the_rise_and_what_follows_the_training_do_not_count():
    rise = [(10.7, 10_000), (11.9, 12_500)]
    level = [(13.1, 12_900), (14.3, 13_100), (15.5, 13_000), (16.7, 13_050)]
    after = [(25.0, 9000), (26.2, 7000)]
    power = settled_power_mw(trace(*IDLE, *rise, *level, *after), ENDS)
    assert (power.median, power.count) == (13_025, 4)


def test_a_slow_rise_is_waited_for():
    rise = [(12.1 + k, 8000 + 1000 * k) for k in range(5)]
    level = [(17.1 + k, 13_000 + 10 * k) for k in range(6)]
    power = settled_power_mw(trace(*IDLE, *rise, *level), ENDS)
    # The sample of 12,000 is within the tolerance of the level; the samples before it are not.
    assert power.count == 7 and 13_000 <= power.median <= 13_050


def test_a_missing_sample_is_missing_and_never_zero():
    level = [(12.5 + k, 13_000) for k in range(10)]
    with_gaps = [(at, np.nan if k % 3 == 0 else mw) for k, (at, mw) in enumerate(level)]
    power = settled_power_mw(trace(*IDLE, *with_gaps), ENDS)
    assert (power.median, power.count) == (13_000, 6)
    assert settled_power_mw(trace(*[(at, np.nan) for at, _ in level]), ENDS) is None


def test_a_repeated_sample_counts_once():
    power = settled_power_mw(trace((13, 13_000), (13, 13_000), (14, 13_000), (14, 13_000), (15, 13_000)), ENDS)
    assert power.count == 3


def test_single_dips_do_not_move_the_level():
    level = [(12.5 + k, 9500 if k in (3, 7) else 13_000) for k in range(11)]
    power = settled_power_mw(trace(*level), ENDS)
    assert (power.median, power.count) == (13_000, 11)


@pytest.mark.parametrize(
    "samples",
    [
        [(13, 13_000), (14, 13_000)],
        [(12.5 + k, 8000 * 1.3**k) for k in range(8)],
    ],
    ids=["too few", "still rising"],
)
def test_what_has_not_settled_is_not_reported(samples):
    assert settled_power_mw(trace(*samples), ENDS) is None


def test_a_level_needs_three_samples_that_could_be_read():
    assert level_mw(trace((0, 7000), (0, 7000), (1, np.nan), (2, 7200))) is None
    level = level_mw(trace((0, 7000), (0, 7000), (1, np.nan), (2, 7200), (3, 7100)))
    assert (level.median, level.count) == (7100, 3)


@pytest.mark.data
def test_it_finds_the_values_that_the_raw_logs_were_condensed_to(corpora):
    table = pd.read_csv(corpora / "orin_nano_resnet18.csv").set_index(["cores", "cpu_khz", "gpu_hz", "mem_hz"])
    runs = sorted((corpora / "orin_nano_resnet18_telemetry").iterdir())
    assert len(runs) == 26
    for run in runs:
        minibatches, samples = pd.read_csv(run / "minibatch.csv"), pd.read_csv(run / "jtop.csv")
        recorded = table.loc[tuple(int(knob) for knob in run.name.split("_")[1:])]
        time = settled_minibatch_ms(minibatches["epochtime_ms"].to_numpy())
        power = settled_power_mw(
            PowerTrace(samples["log_time"].to_numpy(), samples["power cur"].to_numpy(dtype=float)),
            minibatches["log_time"].to_numpy(),
        )
        assert time.median == pytest.approx(recorded.minibatch_ms, rel=0.01), run.name
        assert power.median == pytest.approx(recorded.power_mw, rel=0.02), run.name


class LoggedDevice:
    """A board that replays one logged run, minibatch by minibatch."""

    def __init__(self, log):
        self.log = log
        self.clock = VirtualClock()
        self.begin_s = log.end_s - log.minibatch_ms / 1e3
        self.trained = 0

    def apply(self, mode):
        self.clock.sleep_s(max(0.0, self.begin_s[0]))

    def differences(self, mode):
        return [] if self.log.mode == mode else [f"{self.log.mode.label()} is in force"]

    def conditions(self):
        return BoardSample()

    def start_meter(self):
        return self

    def read(self):
        seen = self.log.sample_s <= self.clock.now_s()
        return PowerTrace(self.log.sample_s[seen], self.log.sample_mw[seen])

    def stop(self):
        return self.read()

    def step(self):
        self.clock.sleep_s(max(0.0, self.log.end_s[self.trained] - self.clock.now_s()))
        self.trained += 1


@pytest.mark.data
def test_the_profiler_reproduces_the_tables_from_the_logged_runs(corpora):
    table = pd.read_csv(corpora / "orin_nano_resnet18.csv").set_index(["cores", "cpu_khz", "gpu_hz", "mem_hz"])
    logs = read_run_logs(corpora / "orin_nano_resnet18_telemetry")
    assert len(logs) == 26
    for log in logs:
        device = LoggedDevice(log)
        used = len(log.minibatch_ms) - 1
        settings = ProfilerSettings(minibatches=used, fewest_minibatches=used, power_samples=3)
        record = Profiler(device, settings).measure(log.mode, device.step)
        recorded = table.loc[tuple(log.mode)]
        # The logger wrote its files between two minibatches. That time is in this loop, but not in the table's times.
        between_ends_ms = np.diff(log.end_s) * 1e3
        assert record.minibatch_ms == pytest.approx(np.median(between_ends_ms), rel=0.001), log.mode.label()
        assert record.power_mw == pytest.approx(recorded.power_mw, rel=0.02), log.mode.label()


# --- Productive profiler ----------------------------------------------------------------------------------------------
# Measuring modes during an app's own training.

HEADER = JournalHeader("bench", "orin-nano", "simulated", "resnet18-imagenet", 16)
ENOUGH = 20_000


@pytest.fixture
def board():
    return SimulatedDevice("orin-nano", 2)


@pytest.fixture
def modes(board):
    return [mode for mode in array_to_modes(board.modes) if mode.cores == 4 and mode.cpu_khz == 729_600][:8:2]


@pytest.fixture
def journal(tmp_path):
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as opened:
        yield opened


def test_the_app_gets_every_batch_once_and_in_order_while_modes_are_measured(board, modes, journal):
    own = board.current_mode()
    profiler = ProductiveProfiler(board, modes, journal)
    used = list(profiler.profiled(range(ENOUGH), board.step))
    assert used == list(range(ENOUGH))
    assert [record.mode for record in journal.records] == modes
    assert not profiler.measuring
    assert board.current_mode() == own


def test_what_is_measured_is_what_the_board_is(board, modes, journal):
    for _ in ProductiveProfiler(board, modes, journal).profiled(range(ENOUGH), board.step):
        pass
    profile = Profile.of(journal.measurements)
    minibatch_ms, power_mw = board.truth(profile.modes)
    assert profile.minibatch_ms == pytest.approx(minibatch_ms, rel=0.05)
    assert profile.power_mw == pytest.approx(power_mw, rel=0.05)
    # The app's process had begun earlier, so the time of a start is unknown.
    assert {record.first_minibatch_ms for record in journal.records} == {None}


def test_waiting_for_data_is_told_from_computing(board, modes, journal):
    def slow_loader():
        for number in range(ENOUGH):
            board.clock.sleep_s(0.025)
            yield number

    for _ in ProductiveProfiler(board, modes[:1], journal).profiled(slow_loader(), board.step):
        pass
    (record,) = journal.records
    assert record.fetch_stall_ms == pytest.approx(25)
    assert record.compute_ms + record.fetch_stall_ms == pytest.approx(record.minibatch_ms, rel=0.01)


def test_a_fan_that_cannot_be_given_back_leaves_no_board_in_a_measured_mode(board, modes, journal, monkeypatch):
    @contextmanager
    def stuck_fan():
        yield
        raise ModeNotAppliedError("the fan stays")

    monkeypatch.setattr(board, "measuring", stuck_fan)
    own = board.current_mode()
    profiler = ProductiveProfiler(board, modes, journal)
    profiler.begin()
    assert board.current_mode() == modes[0]
    with pytest.raises(ModeNotAppliedError, match="fan"):
        profiler.pause()
    assert board.current_mode() == own


def test_every_mode_is_journalled_before_the_next_begins(board, modes, journal):
    seen = set()
    for _ in ProductiveProfiler(board, modes, journal).profiled(range(ENOUGH), board.step):
        seen.add((board.current_mode(), len(journal.records)))
    assert {(mode, done) for done, mode in enumerate(modes)} <= seen


def test_a_measurement_cut_off_by_the_end_of_an_epoch_is_begun_again_in_the_next(board, modes, journal):
    own = board.current_mode()
    profiler = ProductiveProfiler(board, modes, journal)
    epochs = 0
    while profiler.measuring:
        for _ in profiler.profiled(range(30), board.step):
            pass
        epochs += 1
        assert board.current_mode() == own, "evaluation between epochs runs in the training's own mode"
    assert epochs > 1
    assert [record.mode for record in journal.records] == modes


def train_pass(board, profiler, minibatches):
    profiler.begin()
    for _ in range(minibatches):
        began_s = board.clock.now_s()
        board.step()
        profiler.minibatch_ended(StepTimes(0.0, (board.clock.now_s() - began_s) * 1e3))
    return profiler.pass_ended()


@pytest.mark.parametrize(("minibatches", "pause_s"), [(4, 0.02), (20, 0.5), (20, 30.0)])
def test_a_mode_is_measured_over_several_short_passes(board, modes, journal, minibatches, pause_s):
    own = board.current_mode()
    profiler = ProductiveProfiler(board, modes[:2], journal)
    passes = 0
    while profiler.measuring and passes < 1000:
        train_pass(board, profiler, minibatches)
        board.clock.sleep_s(pause_s)
        passes += 1
    assert passes > 1
    profile = Profile.of(journal.measurements)
    minibatch_ms, power_mw = board.truth(profile.modes)
    assert profile.minibatch_ms == pytest.approx(minibatch_ms, rel=0.05), "a pause is no part of a minibatch"
    assert profile.power_mw == pytest.approx(power_mw, rel=0.05)
    assert board.current_mode() == own


def test_a_measurement_that_a_long_pass_interrupts_ends_with_it(board, modes, journal):
    own = board.current_mode()
    profiler = ProductiveProfiler(board, modes[:2], journal)
    assert not train_pass(board, profiler, 5), "nothing was measured yet: it goes on in the next pass"
    assert board.current_mode() == modes[0]
    profiler.pause()
    profiler.begin()
    while not profiler.measured:
        began_s = board.clock.now_s()
        board.step()
        profiler.minibatch_ended(StepTimes(0.0, (board.clock.now_s() - began_s) * 1e3))
    assert board.current_mode() == modes[1]
    assert profiler.pass_ended()
    assert board.current_mode() == own


def test_known_modes_are_not_measured_again(board, modes, journal):
    for _ in ProductiveProfiler(board, modes[:2], journal).profiled(range(ENOUGH), board.step):
        pass
    for _ in ProductiveProfiler(board, modes, journal).profiled(range(ENOUGH), board.step):
        pass
    assert [record.mode for record in journal.records] == modes


@pytest.mark.parametrize("leave", ["break", "raise"])
def test_an_app_that_leaves_early_gets_its_mode_back(board, modes, journal, leave):
    own = board.current_mode()
    batches = ProductiveProfiler(board, modes, journal).profiled(range(ENOUGH), board.step)
    with pytest.raises(ZeroDivisionError) if leave == "raise" else nullcontext():
        for number in batches:
            if number == 5:
                assert board.current_mode() == modes[0] != own
                if leave == "break":
                    break
                raise ZeroDivisionError
    batches.close()
    assert board.current_mode() == own
    assert not journal.records


def test_a_hot_board_goes_on_training_in_its_own_mode_and_measures_once_it_is_cool(board, modes, journal):
    own, clock = board.current_mode(), board.clock
    board.conditions = lambda: BoardSample(temperature_c=90.0 if 5 <= clock.now_s() < 200 else 60.0)
    in_own_mode = 0
    for _ in ProductiveProfiler(board, modes, journal).profiled(range(ENOUGH), board.step):
        if clock.now_s() < 200 and journal.discarded:
            assert board.current_mode() == own
            in_own_mode += 1
    assert in_own_mode > 100
    assert [record.mode for record in journal.records] == modes
    assert [one.mode for one in journal.discarded] == modes[:1]


def test_a_mode_that_throttles_every_time_is_left_out_and_the_training_goes_on(board, modes, journal):
    board.conditions = lambda: BoardSample(
        throttle_events=int(board.clock.now_s()) if board.current_mode() == modes[1] else 0
    )
    settings = ProfilerSettings(limits=Limits(attempts=2))
    used = list(ProductiveProfiler(board, modes, journal, settings).profiled(range(ENOUGH), board.step))
    assert len(used) == ENOUGH
    assert [record.mode for record in journal.records] == [modes[0], *modes[2:]]
    assert [one.mode for one in journal.discarded] == [modes[1]] * 2


@pytest.mark.parametrize("refused", [0, 1])
def test_a_mode_that_does_not_apply_is_left_out_and_the_training_goes_on(board, modes, journal, monkeypatch, refused):
    own, apply = board.current_mode(), board.apply

    def refuses_one(mode):
        if mode == modes[refused]:
            raise ModeNotAppliedError("gpu_hz reads back 306000000")
        apply(mode)

    monkeypatch.setattr(board, "apply", refuses_one)
    trained_in = [
        board.current_mode() for _ in ProductiveProfiler(board, modes, journal).profiled(range(ENOUGH), board.step)
    ]
    assert len(trained_in) == ENOUGH and own in trained_in
    assert board.current_mode() == own
    assert [record.mode for record in journal.records] == [mode for mode in modes if mode != modes[refused]]
    assert [one.mode for one in journal.discarded] == [modes[refused]] * 3


def test_a_measurement_is_discarded_if_another_program_changed_the_mode(board, modes, journal):
    own = board.current_mode()
    changed = []
    for number in ProductiveProfiler(board, modes[:1], journal).profiled(range(ENOUGH), board.step):
        if number == 5:
            board.apply(modes[1])
        if journal.discarded and not changed:
            changed.append(board.current_mode())
    assert changed == [own]
    assert [one.mode for one in journal.discarded] == modes[:1] == [one.mode for one in journal.records]


def test_a_board_whose_own_mode_cannot_be_put_back_is_an_error(board, modes, journal, monkeypatch):
    def refuses_all(mode):
        raise ModeNotAppliedError("gpu_hz reads back 306000000")

    monkeypatch.setattr(board, "apply", refuses_all)
    with pytest.raises(ModeNotAppliedError):
        list(ProductiveProfiler(board, modes, journal).profiled(range(ENOUGH), board.step))


def test_a_board_that_no_longer_tells_its_temperature_is_measured_once_it_does(board, modes, journal):
    own, clock = board.current_mode(), board.clock
    board.conditions = lambda: BoardSample(temperature_c=None if 5 <= clock.now_s() < 200 else 60.0)
    in_own_mode = 0
    for _ in ProductiveProfiler(board, modes[:1], journal).profiled(range(ENOUGH), board.step):
        if clock.now_s() < 200 and journal.discarded:
            assert board.current_mode() == own
            in_own_mode += 1
    assert in_own_mode > 100
    assert "temperature sensor can no longer be read" in journal.discarded[0].reason
    assert [record.mode for record in journal.records] == modes[:1]
