"""Profiles of a board: which modes are measured, disturbances, and modes that overload the board."""

from __future__ import annotations

import itertools
import json
import shutil
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import reference_models
from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.sysfs import mode_argument
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.learning.fitting import FittingHere
from edge_agent.learning.profiling_plan import profile_device
from edge_agent.learning.transfer import Transfer
from edge_agent.paths import PROFILE_FILE
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.mode_measurement import (
    DEFAULT_LIMITS,
    DisturbedError,
    ExcludedModes,
    Limits,
    MeasurementError,
    ProfilerSettings,
    TooHotError,
)
from edge_agent.profiling.profiler import Profiler
from edge_agent.profiling.stored_profile import read_fitted
from edge_agent.workloads.loading import StepTimes
from tests.fakes.agent_settings import only_workload
from tests.fakes.boards import OTHER_SCRIPTED_MODE, SCRIPTED_MODE, ScriptedDevice
from tests.fakes.faked_jetson import CAP_6, CPU, LOCK, ORIN_NANO, FakedJetson, open_sysfs
from tests.fixtures.edge_agent import PROFILED
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    Discarded,
    JournalHeader,
    ModeRecord,
    PowerMode,
    Renewal,
    array_to_modes,
    modes_to_array,
)
from wattfleet.core.prediction import read_artefact
from wattfleet_proto.device_state import BoardSample

# --- Profiler ---------------------------------------------------------------------------------------------------------


REFERENCE = read_artefact(Path(reference_models.__file__).parent / "agx_orin_resnet18")
HEADER = JournalHeader("bench", "scripted", "hardware", "resnet18-imagenet", 16)


def profile_seven(device, journal):
    fitting = FittingHere(Transfer((REFERENCE,), HEADER, 100), device.modes)
    profile_device(device, lambda: nullcontext(device.step), journal, fitting, 7, 0, lambda progress: None)


class UnsteadyDevice(ScriptedDevice):
    """A board whose minibatches take 1 s, in turn shorter by a share of it, exactly that long, and longer."""

    def __init__(self, swing: float) -> None:
        super().__init__()
        self._swing = swing

    def step(self) -> None:
        self.step_s = 1.0 + self._swing * (self.steps % 3 - 1)
        super().step()


@pytest.mark.parametrize(
    ("swing", "used"),
    [
        (0.0, 10),  # the fewest
        (0.01, 10),
        (0.03, 31),  # 1.2533 * 1.4826 * 0.03 / sqrt(31) = 0.01
        (0.2, 40),  # the most
    ],
)
def test_minibatches_are_timed_until_their_median_is_known_within_one_percent(swing, used):
    device = UnsteadyDevice(swing)
    record = Profiler(device).measure(SCRIPTED_MODE, device.step)
    assert record.minibatches == pytest.approx(used, abs=1)
    assert record.minibatch_ms == pytest.approx(1000, rel=swing / 4)


def test_forty_minibatches_count_and_the_first_does_not():
    device = ScriptedDevice()
    record = Profiler(device, ProfilerSettings(fewest_minibatches=40)).measure(SCRIPTED_MODE, device.step)
    assert record.mode == SCRIPTED_MODE == device.current_mode()
    assert (record.minibatches, device.steps) == (40, 41)
    assert record.minibatch_ms == pytest.approx(250)
    assert record.minibatch_spread == pytest.approx(0, abs=1e-9)
    assert (record.power_mw, record.power_spread) == (13_000, 0)
    # Training lasts from 6 s to 16 s. Samples count from 2 s after its beginning: at 9, 10, ... 16 s.
    assert record.power_samples == 8
    assert record.seconds == pytest.approx(16)
    assert record.measurement.minibatch_ms == record.minibatch_ms


def test_a_fast_mode_goes_on_until_there_are_enough_power_samples():
    device = ScriptedDevice(step_s=0.02)
    record = Profiler(device, ProfilerSettings(power_samples=6)).measure(SCRIPTED_MODE, device.step)
    assert record.power_samples >= 6
    # Six samples exist at 14 s; the profiler checks twice a second.
    assert record.seconds == pytest.approx(14, abs=0.6)
    assert record.minibatches == device.steps - 1 > 300
    assert record.minibatch_ms == pytest.approx(20)


def test_a_rail_that_cannot_be_read_at_times_leaves_gaps_not_zeros():
    device = ScriptedDevice(power_at=lambda at_s: np.nan if at_s % 2 else 13_000.0)
    record = Profiler(device).measure(SCRIPTED_MODE, device.step)
    assert record.power_mw == 13_000
    assert record.power_samples >= 5


def test_an_unreadable_rail_fails_the_measurement_within_the_timeout():
    device = ScriptedDevice(power_at=lambda at_s: np.nan)
    with pytest.raises(MeasurementError, match="0 settled power samples.*at least 5 are required"):
        Profiler(device, ProfilerSettings(patience_s=30)).measure(SCRIPTED_MODE, device.step)
    assert device.clock.now_s() == pytest.approx(38.5, abs=1)
    assert device.running_meters == 0


def test_power_that_never_settles_fails_the_measurement():
    device = ScriptedDevice(power_at=lambda at_s: 5000 * 1.2**at_s)
    with pytest.raises(MeasurementError, match="0 settled"):
        Profiler(device, ProfilerSettings(patience_s=20)).measure(SCRIPTED_MODE, device.step)


def test_a_mode_that_did_not_apply_is_an_error_and_nothing_is_trained():
    device = ScriptedDevice()
    device.applied_as[SCRIPTED_MODE] = OTHER_SCRIPTED_MODE
    with pytest.raises(ModeNotAppliedError, match="4c.*was set, but 2c.*is in force"):
        Profiler(device).measure(SCRIPTED_MODE, device.step)
    assert device.steps == 0


def test_a_mode_that_somebody_changed_meanwhile_is_an_error():
    device = ScriptedDevice()

    def step():
        device.step()
        if device.steps == 20:
            device.in_force = OTHER_SCRIPTED_MODE

    with pytest.raises(ModeNotAppliedError):
        Profiler(device).measure(SCRIPTED_MODE, step)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        (f"{CPU}/cpufreq/policy0/scaling_min_freq", 115_200),
        (f"{CPU}/cpufreq/policy4/scaling_max_freq", 115_200),
        (f"{CPU}/cpu3/online", 0),
        ("/sys/class/devfreq/17000000.gpu/min_freq", 306_000_000),
        (f"{LOCK}/mrq_rate_locked", 0),
        (CAP_6, 204_000_000),
    ],
)
def test_a_knob_that_somebody_turned_meanwhile_is_an_error_that_names_it(tmp_path, knob, value):
    jetson = FakedJetson(tmp_path, ORIN_NANO)
    device = open_sysfs(jetson)
    mode = device.space.highest
    scripted = ScriptedDevice()
    scripted.clock = device.clock
    device.start_meter = scripted.start_meter
    Profiler(device).measure(mode, scripted.step)

    def step():
        scripted.step()
        jetson.put(knob, value)

    with pytest.raises(ModeNotAppliedError, match=f"{knob}: wanted .*, found {value}"):
        Profiler(device).measure(mode, step)
    assert scripted.running_meters == 0


class CappedJetson(FakedJetson):
    """A board that lists GPU frequencies which it does not reach, as was reported of Super modes."""

    REACHED_HZ = 510_000_000

    def write(self, path, text):
        is_clipped = path == f"{self.gpu}/max_freq" and int(text) > self.REACHED_HZ
        super().write(path, str(self.REACHED_HZ) if is_clipped else text)


@pytest.fixture
def capped(tmp_path):
    """The capped board, with a workload and a meter in virtual time."""
    scripted = ScriptedDevice()
    device = open_sysfs(CappedJetson(tmp_path / "root", ORIN_NANO))
    scripted.clock = device.clock
    device.start_meter, device.step = scripted.start_meter, scripted.step
    return device


def of_gpu(device, *gpu_hz):
    return [device.space.lowest._replace(cores=cores, gpu_hz=hz) for hz in gpu_hz for cores in (6, 5, 4)]


def test_a_value_that_a_knob_does_not_reach_is_learned_for_all_modes(capped, tmp_path):
    top, good = capped.space.gpu_hz[-1], 408_000_000
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        for attempt in (1, 2, 3):
            assert [each for each in journal.discarded if each.unreached != "gpu_hz"] == []
            assert list(Profiler(capped).profile(of_gpu(capped, top), capped.step, journal)) == []
            assert len(journal.discarded) == attempt, "the other modes with this value are not tried"
        allowed = ExcludedModes.of(journal).allows(capped.modes)
        assert set(capped.modes[~allowed, 2]) == {top} and allowed.sum() == len(capped.modes) * 4 / 5
        assert (ExcludedModes.of(journal).not_tried(capped.modes)[:, 2] == top).all()
        assert len(list(Profiler(capped).profile(of_gpu(capped, good), capped.step, journal))) == 3
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        assert not ExcludedModes.of(journal).allows(modes_to_array(of_gpu(capped, top, good))).all(), "after a restart"


def test_a_board_is_profiled_although_a_knob_does_not_reach_its_highest_values(capped, tmp_path):
    header = replace(HEADER, board_kind="orin-nano")
    with Journal.open(tmp_path / "profile.jsonl", header) as journal:
        fitting = FittingHere(Transfer((REFERENCE,), header, 100), capped.modes)
        profile_device(capped, lambda: nullcontext(capped.step), journal, fitting, 12, 0, lambda progress: None, 0.0)
        assert len(journal.records) == 12 and journal.discarded
        assert all(record.mode.gpu_hz <= CappedJetson.REACHED_HZ for record in journal.records)
        values = {each.unreached_value for each in journal.discarded}
        assert values <= {("gpu_hz", hz) for hz in capped.space.gpu_hz[3:]}
        assert len(journal.discarded) <= 3 * len(values)


def test_a_value_that_was_measured_later_counts_as_reached(tmp_path):
    mode = SCRIPTED_MODE
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        for _ in range(3):
            journal.append(Discarded(mode, "reason", 0, 1.0, unreached="gpu_hz"))
        assert journal.unreached_values(3) == [("gpu_hz", mode.gpu_hz)] and journal.unreached_values(4) == []
        journal.append(ModeRecord(mode._replace(cores=1), 12.5, 18_000.0, 0.1, 0.1, 40, 20, 31.0))
        assert journal.unreached_values(3) == []
    with pytest.raises(InvalidInputError, match="unreached must be one of cores, cpu_khz, gpu_hz, mem_hz"):
        Discarded(mode, "reason", 0, 1.0, unreached="fan")


def test_the_meter_is_stopped_when_the_workload_fails():
    device = ScriptedDevice()

    def step():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Profiler(device).measure(SCRIPTED_MODE, step)
    assert device.running_meters == 0


def test_idling_is_measured_after_the_board_has_come_to_rest():
    device = ScriptedDevice(power_at=lambda at_s: 13_000 if at_s < 3 else 7000)
    assert Profiler(device).measure_idle(SCRIPTED_MODE, seconds=10) == 7000
    assert (device.steps, device.running_meters) == (0, 0)
    device.power_at = lambda at_s: np.nan
    with pytest.raises(
        MeasurementError, match="10 idle seconds: run `wattfleet agent doctor`.*real-time, which needs no meter"
    ):
        Profiler(device).measure_idle(SCRIPTED_MODE, seconds=10)


@pytest.mark.parametrize(
    "wrong", [{"minibatches": 0}, {"power_samples": 2}, {"patience_s": -1}, {"patience_s": float("nan")}]
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(InvalidInputError):
        ProfilerSettings(**wrong)


def test_a_profile_that_was_interrupted_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "profile.jsonl"
    device = ScriptedDevice()
    modes = array_to_modes(device.modes)
    with Journal.open(path, HEADER) as journal:
        first = next(iter(Profiler(device).profile(modes, device.step, journal)))
        assert [one.mode for one in journal.records] == [modes[0]] == [first.mode]
    again = ScriptedDevice()
    with Journal.open(path, HEADER) as journal:
        rest = list(Profiler(again).profile(modes, again.step, journal))
        assert [one.mode for one in rest] == modes[1:]
        assert [one.mode for one in journal.records] == modes
        assert list(Profiler(again).profile(modes, again.step, journal)) == []


def no_power_at(mode, device):
    return lambda at_s: np.nan if device.in_force == mode else 13_000.0


@pytest.mark.parametrize("trouble", ["not applied", "no power"])
def test_a_mode_that_fails_is_discarded_and_the_next_one_is_measured(tmp_path, trouble):
    device = ScriptedDevice()
    if trouble == "not applied":
        device.applied_as[SCRIPTED_MODE] = PowerMode(1, 1, 1, 1)
    else:
        device.power_at = no_power_at(SCRIPTED_MODE, device)
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        records = list(Profiler(device).profile([SCRIPTED_MODE, OTHER_SCRIPTED_MODE], device.step, journal))
        assert [one.mode for one in records] == [OTHER_SCRIPTED_MODE]
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        (discarded,) = journal.discarded
    assert discarded.mode == SCRIPTED_MODE
    if trouble == "not applied":
        assert (discarded.minibatches, discarded.seconds) == (0, 0)
        assert "is in force" in discarded.reason
    else:
        assert discarded.minibatches > 40 and discarded.seconds == pytest.approx(68.5, abs=1)
        assert "settled power samples" in discarded.reason
    assert (device.running_meters, device.held) == (0, 0)


def test_three_different_failing_modes_in_a_row_end_the_profile(tmp_path):
    device = ScriptedDevice(power_at=lambda at_s: np.nan)
    modes = [SCRIPTED_MODE._replace(cores=cores) for cores in (4, 3, 2, 1)]
    device.modes = modes_to_array(modes)
    profiler = Profiler(device, ProfilerSettings(patience_s=5))
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        for _ in range(3):
            assert list(profiler.profile(modes[:1], device.step, journal)) == []
        assert list(profiler.profile(modes[1:2], device.step, journal)) == []
        with pytest.raises(MeasurementError, match="^2c"):
            list(profiler.profile(modes[2:], device.step, journal))
        assert [one.mode.cores for one in journal.discarded] == [4, 4, 4, 3, 2]
        assert journal.discarded_modes(3) == modes[:1]


def test_a_mode_that_is_measured_ends_a_row_of_failures(tmp_path):
    device = ScriptedDevice()
    modes = [SCRIPTED_MODE._replace(cores=cores) for cores in (5, 4, 3, 2, 1)]
    device.modes = modes_to_array(modes)
    device.power_at = lambda at_s: 13_000.0 if device.in_force.cores == 3 else np.nan
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        assert [one.mode for one in Profiler(device).profile(modes, device.step, journal)] == [modes[2]]
        assert len(journal.discarded) == 4


def test_a_refused_highest_mode_is_left_out_across_restarts(tmp_path):
    device = SimulatedDevice("orin-nano", 0)
    highest, apply = device.current_mode(), device.apply
    refused = []

    def refuses_highest(mode):
        if mode == highest:
            refused.append(mode)
            raise ModeNotAppliedError("gpu_hz reads back 306000000")
        apply(mode)

    device.apply = refuses_highest
    for _ in range(2):
        with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
            profile_seven(device, journal)
            assert len(journal.records) == 7
            assert journal.discarded_modes(3) == [highest]
    assert len(refused) == 3


def test_a_board_on_which_no_mode_could_be_measured_begins_anew_once_it_can(tmp_path):
    device = ScriptedDevice(power_at=lambda at_s: np.nan)
    device.modes = modes_to_array([SCRIPTED_MODE])

    def profile():
        with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
            profile_seven(device, journal)
            return [record.mode for record in journal.records]

    for _ in range(4):
        with pytest.raises(MeasurementError):
            profile()
    device.power_at = lambda at_s: 13_000.0
    assert profile() == [SCRIPTED_MODE]


def test_where_the_time_of_a_minibatch_went_is_recorded_where_the_workload_says(tmp_path):
    device = ScriptedDevice()

    def step():
        first = device.steps == 0
        device.step()
        return StepTimes(5000.0, 1000.0) if first else StepTimes(fetch_stall_ms=30.0, compute_ms=220.0)

    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        list(Profiler(device).profile([SCRIPTED_MODE], step, journal))
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        assert (journal.records[0].fetch_stall_ms, journal.records[0].compute_ms) == (30.0, 220.0)
    record = Profiler(device).measure(SCRIPTED_MODE, device.step)
    assert (record.fetch_stall_ms, record.compute_ms) == (None, None)


@pytest.mark.parametrize("kind", ["agx-orin", "orin-nano", "orin-nx", "xavier-agx"])
def test_fifty_modes_of_a_simulated_board_are_measured_to_within_two_percent(kind):
    device = SimulatedDevice(kind, 0)
    rows = np.random.default_rng(0).choice(len(device.modes), 50, replace=False)
    profiler = Profiler(device)
    records = [profiler.measure(mode, device.step) for mode in array_to_modes(device.modes[rows])]
    minibatch_ms, power_mw = device.truth(device.modes[rows])
    for measured, truth in (
        ([r.minibatch_ms for r in records], minibatch_ms),
        ([r.power_mw for r in records], power_mw),
    ):
        off = np.abs(np.array(measured) / truth - 1)
        assert off.mean() < 0.02 and np.median(off) < 0.01
        assert off.max() > 0


def test_a_profile_of_a_simulated_board_is_the_same_every_time():
    def profile():
        device = SimulatedDevice("orin-nx", 7)
        modes = array_to_modes(device.modes[::500])
        return [Profiler(device).measure(mode, device.step) for mode in itertools.islice(modes, 10)]

    assert profile() == profile()


# --- Profiler disturbances --------------------------------------------------------------------------------------------
# A profile of a board that overheats, throttles or stops reporting.


def hot_between(begin_s, end_s):
    return lambda at_s: BoardSample(temperature_c=92.0 if begin_s <= at_s < end_s else 60.0)


def test_a_board_that_gets_too_hot_rests_and_the_mode_is_measured_again(tmp_path):
    device = ScriptedDevice()
    device.conditions_at = hot_between(10, 300)
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        (record,) = Profiler(device).profile([SCRIPTED_MODE], device.step, journal)
    assert record.minibatches >= 10 and record.power_mw == 13_000
    assert device.clock.now_s() > 300
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        assert list(journal.records) == [record]
        (discarded,) = journal.discarded
    assert discarded.mode == SCRIPTED_MODE and "92 degrees" in discarded.reason
    # It stopped within half a second and then rested instead of continuing to train.
    assert discarded.seconds == pytest.approx(10, abs=0.6)
    assert device.steps == discarded.minibatches + record.minibatches + 1
    assert (device.running_meters, device.held) == (0, 0)


def test_a_warm_board_below_its_limit_is_not_made_to_wait():
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: BoardSample(temperature_c=80.0, throttle_events=0)
    assert Profiler(device).measure(SCRIPTED_MODE, device.step).seconds == pytest.approx(13)


def test_a_board_that_stays_hot_ends_the_profile_within_the_patience(tmp_path):
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: BoardSample(temperature_c=92.0)
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        settings = ProfilerSettings(limits=Limits(cooling_patience_s=60))
        with pytest.raises(TooHotError, match="still at 92 degrees after resting 60 s"):
            list(Profiler(device, settings).profile([SCRIPTED_MODE], device.step, journal))
    assert device.clock.now_s() < 75
    assert (device.running_meters, device.held) == (0, 0)


def test_what_a_throttling_board_shows_is_discarded():
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: BoardSample(throttle_events=7 if at_s < 12 else 9)
    with pytest.raises(DisturbedError, match="throttled 2 times"):
        Profiler(device).measure(SCRIPTED_MODE, device.step)
    # Events before the measurement do not count.
    assert Profiler(device).measure(SCRIPTED_MODE, device.step).power_mw == 13_000


def test_a_mode_that_always_throttles_is_excluded_and_each_attempt_recorded(tmp_path):
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: BoardSample(
        throttle_events=int(at_s) if device.in_force == SCRIPTED_MODE else 0
    )
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        (record,) = Profiler(device).profile([SCRIPTED_MODE, OTHER_SCRIPTED_MODE], device.step, journal)
        assert record.mode == OTHER_SCRIPTED_MODE
        assert len(journal.discarded) == 3
        assert (journal.discarded_modes(3), journal.discarded_modes(4)) == ([SCRIPTED_MODE], [])


def test_a_profile_ends_on_a_board_that_does_not_bear_its_highest_mode(tmp_path):
    device = SimulatedDevice("orin-nano", 0)
    highest = device.current_mode()
    device.conditions = lambda: BoardSample(
        throttle_events=int(device.clock.now_s()) if device.current_mode() == highest else 0
    )
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        profile_seven(device, journal)
        assert len(journal.records) == 7
        assert journal.discarded_modes(3) == [highest]
        assert highest not in [record.mode for record in journal.records]


def test_the_fan_is_held_from_the_first_mode_to_the_last_and_given_back(tmp_path):
    device = ScriptedDevice()
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        with closing(Profiler(device).profile(array_to_modes(device.modes), device.step, journal)) as records:
            next(records)
            assert device.held == 1
        assert device.held == 0


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        (BoardSample(throttle_events=0), "temperature sensor can no longer be read"),
        (BoardSample(temperature_c=60.0), "throttle counter can no longer be read"),
    ],
)
def test_a_sensor_that_is_gone_during_a_measurement_disturbs_it(gone, reason):
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: BoardSample(temperature_c=60.0, throttle_events=0) if at_s < 10 else gone
    with pytest.raises(DisturbedError, match=reason):
        Profiler(device).measure(SCRIPTED_MODE, device.step)
    assert device.clock.now_s() == pytest.approx(11.5, abs=0.6)
    # A value that was missing from the beginning is not treated as a failure.
    assert Profiler(device).measure(SCRIPTED_MODE, device.step).power_mw == 13_000


def test_a_sensor_that_cannot_be_read_now_and_then_disturbs_nothing():
    device = ScriptedDevice()
    looks = itertools.count()
    device.conditions_at = lambda at_s: (
        BoardSample() if next(looks) % 3 else BoardSample(temperature_c=60.0, throttle_events=0)
    )
    assert Profiler(device).measure(SCRIPTED_MODE, device.step).power_mw == 13_000


def test_a_board_is_not_cool_while_its_temperature_cannot_be_read_any_more(tmp_path):
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: BoardSample(temperature_c=None if 10 <= at_s < 300 else 60.0)
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        list(Profiler(device).profile([SCRIPTED_MODE], device.step, journal))
        assert len(journal.discarded) == 1
    assert device.clock.now_s() > 300


def test_a_temperature_that_never_comes_back_ends_the_profile_within_the_patience(tmp_path):
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: BoardSample(temperature_c=92.0 if at_s < 20 else None)
    settings = ProfilerSettings(limits=Limits(cooling_patience_s=60))
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        with pytest.raises(TooHotError, match="the temperature cannot be read after resting 60 s"):
            list(Profiler(device, settings).profile([SCRIPTED_MODE], device.step, journal))
    assert device.clock.now_s() < 75


def test_the_mode_after_one_that_is_left_out_begins_cool(tmp_path):
    device = ScriptedDevice()
    apply, hot_until_s, began_at_c = device.apply, 0.0, []
    device.conditions_at = lambda at_s: BoardSample(temperature_c=92.0 if at_s < hot_until_s else 60.0)

    def noted(mode):
        began_at_c.append((mode, device.conditions().temperature_c))
        apply(mode)

    def step():
        nonlocal hot_until_s
        device.step()
        if device.in_force == SCRIPTED_MODE:
            hot_until_s = device.clock.now_s() + 100

    device.apply = noted
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        (record,) = Profiler(device).profile([SCRIPTED_MODE, OTHER_SCRIPTED_MODE], step, journal)
        assert record.mode == OTHER_SCRIPTED_MODE
        assert [one.mode for one in journal.discarded] == [SCRIPTED_MODE] * 3
    assert began_at_c == [(SCRIPTED_MODE, 60.0)] * 3 + [(OTHER_SCRIPTED_MODE, 60.0)]


@pytest.mark.parametrize(
    "wrong", [{"cool_c": 85}, {"cool_c": float("nan")}, {"cooling_patience_s": -1}, {"attempts": 0}]
)
def test_limits_out_of_range_are_refused(wrong):
    with pytest.raises(InvalidInputError):
        Limits(**wrong)


# --- Excluded modes ---------------------------------------------------------------------------------------------------
# A mode that overloads the board is excluded from training, and so are all higher modes.

SIMULATED_HEADER = JournalHeader("bench", "orin-nano", "simulated", "resnet18-imagenet", 16)
HIGHER = SCRIPTED_MODE._replace(cores=6, gpu_hz=624_750_000)
LESS_CPU = HIGHER._replace(cpu_khz=115_200)
LOWER = SCRIPTED_MODE._replace(mem_hz=204_000_000)
MODES = [HIGHER, LESS_CPU, SCRIPTED_MODE, LOWER]


@pytest.fixture
def journal(tmp_path):
    with Journal.open(tmp_path / PROFILE_FILE, SIMULATED_HEADER) as journal:
        yield journal


def measured(journal, mode):
    journal.append(ModeRecord(mode, 100.0, 9000.0, 0.0, 0.0, 40, 5, 10.0))


def given_up(journal, mode, overloaded=True, times=DEFAULT_LIMITS.attempts):
    for _ in range(times):
        journal.append(Discarded(mode, "the board throttled 2 times", 12, 5.0, overloaded))


def borne(journal, modes=MODES):
    return array_to_modes(modes_to_array(modes)[ExcludedModes.of(journal).allows(modes_to_array(modes))])


def test_a_board_that_was_never_overloaded_bears_all(journal):
    measured(journal, LOWER)
    assert borne(journal) == MODES


def test_a_mode_that_always_throttles_is_excluded_with_all_higher_modes(journal):
    given_up(journal, SCRIPTED_MODE)
    assert borne(journal) == [LESS_CPU, LOWER]


def test_what_was_disturbed_once_or_twice_is_borne(journal):
    given_up(journal, SCRIPTED_MODE, times=DEFAULT_LIMITS.attempts - 1)
    assert borne(journal) == MODES


def test_what_failed_without_overload_leaves_out_itself_alone(journal):
    given_up(journal, SCRIPTED_MODE, overloaded=False)
    given_up(journal, LESS_CPU, times=1)
    given_up(journal, LESS_CPU, overloaded=False, times=2)
    assert borne(journal) == [HIGHER, LOWER]


def test_a_higher_mode_that_was_measured_shows_that_it_was_not_the_modes_fault(journal):
    given_up(journal, SCRIPTED_MODE)
    highest = HIGHER._replace(cpu_khz=1_510_400)
    measured(journal, HIGHER)
    assert borne(journal, [highest, *MODES]) == [highest, HIGHER, LESS_CPU, LOWER]


def test_a_mode_that_was_measured_after_all_is_borne(journal):
    given_up(journal, SCRIPTED_MODE)
    measured(journal, SCRIPTED_MODE)
    assert borne(journal) == MODES


def test_what_was_before_a_renewal_does_not_count(journal):
    given_up(journal, SCRIPTED_MODE)
    journal.append(Renewal("power fell", 8))
    assert borne(journal) == MODES


def test_a_device_is_never_left_without_any_mode(journal):
    given_up(journal, LOWER)
    assert borne(journal, [HIGHER, SCRIPTED_MODE, LOWER]) == [HIGHER, SCRIPTED_MODE, LOWER]


def test_no_front_shows_and_no_budget_buys_what_the_board_does_not_bear(tmp_path, agent, profiled_state):
    state = shutil.copytree(profiled_state, tmp_path / "copied", ignore=shutil.ignore_patterns("*.sock"))
    device = SimulatedDevice("orin-nano", 0)
    fitted = read_fitted(state, device)
    hopeless = array_to_modes(fitted.front.modes)[len(fitted.front) // 2]

    def is_hopeless(mode):
        return all(knob >= low for knob, low in zip(mode, hopeless, strict=True))

    path = only_workload(state) / PROFILE_FILE
    header, *lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not is_hopeless(json.loads(line)["mode"])]
    path.write_text("".join([header, *kept]))
    with Journal.open(path, fitted.measured.header) as journal:
        given_up(journal, hopeless)

    def shown(*arguments):
        return agent(*arguments, "--device", PROFILED, "--state-dir", state, "--json").content

    assert any(map(is_hopeless, array_to_modes(fitted.front.modes)))
    front = [PowerMode(**point["mode"]) for point in shown("front")["front"]]
    assert front and not any(map(is_hopeless, front))
    chosen = PowerMode(**shown("choose", "--budget-w", 1000)["mode"])
    assert chosen in array_to_modes(device.modes) and not is_hopeless(chosen)
    assert shown("explain", mode_argument(hopeless))["measured"] is False
