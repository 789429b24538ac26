import itertools
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import reference_models
from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.learning.fitting import FittingHere
from edge_agent.learning.profiling_plan import profile_device
from edge_agent.learning.transfer import Transfer
from edge_agent.profiling.journal import Journal, JournalHeader
from edge_agent.profiling.mode_measurement import MeasurementError, ProfilerSettings
from edge_agent.profiling.profiler import Profiler
from edge_agent.workloads.loading import StepTimes
from tests.fakes.jetson_boards import CAP_6, ORIN_NANO
from tests.fakes.jetson_tree import CPU, LOCK, FakedJetson, open_sysfs
from tests.fakes.scripted_device import MODE, OTHER, ScriptedDevice
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, array_to_modes, modes_to_array
from wattfleet.prediction import read_artefact

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
    record = Profiler(device).measure(MODE, device.step)
    assert record.minibatches == pytest.approx(used, abs=1)
    assert record.minibatch_ms == pytest.approx(1000, rel=swing / 4)


def test_forty_minibatches_count_and_the_first_does_not():
    device = ScriptedDevice()
    record = Profiler(device, ProfilerSettings(fewest_minibatches=40)).measure(MODE, device.step)
    assert record.mode == MODE == device.current_mode()
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
    record = Profiler(device, ProfilerSettings(power_samples=6)).measure(MODE, device.step)
    assert record.power_samples >= 6
    # Six samples exist at 14 s; the profiler checks twice a second.
    assert record.seconds == pytest.approx(14, abs=0.6)
    assert record.minibatches == device.steps - 1 > 300
    assert record.minibatch_ms == pytest.approx(20)


def test_a_rail_that_cannot_be_read_at_times_leaves_gaps_not_zeros():
    device = ScriptedDevice(power_at=lambda at_s: np.nan if at_s % 2 else 13_000.0)
    record = Profiler(device).measure(MODE, device.step)
    assert record.power_mw == 13_000
    assert record.power_samples >= 5


def test_an_unreadable_rail_fails_the_measurement_within_the_timeout():
    device = ScriptedDevice(power_at=lambda at_s: np.nan)
    with pytest.raises(MeasurementError, match="0 settled power samples.*at least 5 are required"):
        Profiler(device, ProfilerSettings(patience_s=30)).measure(MODE, device.step)
    assert device.clock.now_s() == pytest.approx(38.5, abs=1)
    assert device.running_meters == 0


def test_power_that_never_settles_fails_the_measurement():
    device = ScriptedDevice(power_at=lambda at_s: 5000 * 1.2**at_s)
    with pytest.raises(MeasurementError, match="0 settled"):
        Profiler(device, ProfilerSettings(patience_s=20)).measure(MODE, device.step)


def test_a_mode_that_did_not_apply_is_an_error_and_nothing_is_trained():
    device = ScriptedDevice()
    device.applied_as[MODE] = OTHER
    with pytest.raises(ModeNotAppliedError, match="4c.*was set, but 2c.*is in force"):
        Profiler(device).measure(MODE, device.step)
    assert device.steps == 0


def test_a_mode_that_somebody_changed_meanwhile_is_an_error():
    device = ScriptedDevice()

    def step():
        device.step()
        if device.steps == 20:
            device.in_force = OTHER

    with pytest.raises(ModeNotAppliedError):
        Profiler(device).measure(MODE, step)


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


def test_the_meter_is_stopped_when_the_workload_fails():
    device = ScriptedDevice()

    def step():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Profiler(device).measure(MODE, step)
    assert device.running_meters == 0


def test_idling_is_measured_after_the_board_has_come_to_rest():
    device = ScriptedDevice(power_at=lambda at_s: 13_000 if at_s < 3 else 7000)
    assert Profiler(device).measure_idle(MODE, seconds=10) == 7000
    assert (device.steps, device.running_meters) == (0, 0)
    device.power_at = lambda at_s: np.nan
    with pytest.raises(
        MeasurementError, match="10 idle seconds: run `wattfleet agent doctor`.*real-time, which needs no meter"
    ):
        Profiler(device).measure_idle(MODE, seconds=10)


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
        device.applied_as[MODE] = PowerMode(1, 1, 1, 1)
    else:
        device.power_at = no_power_at(MODE, device)
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        records = list(Profiler(device).profile([MODE, OTHER], device.step, journal))
        assert [one.mode for one in records] == [OTHER]
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        (discarded,) = journal.discarded
    assert discarded.mode == MODE
    if trouble == "not applied":
        assert (discarded.minibatches, discarded.seconds) == (0, 0)
        assert "is in force" in discarded.reason
    else:
        assert discarded.minibatches > 40 and discarded.seconds == pytest.approx(68.5, abs=1)
        assert "settled power samples" in discarded.reason
    assert (device.running_meters, device.held) == (0, 0)


def test_three_different_failing_modes_in_a_row_end_the_profile(tmp_path):
    device = ScriptedDevice(power_at=lambda at_s: np.nan)
    modes = [MODE._replace(cores=cores) for cores in (4, 3, 2, 1)]
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
    modes = [MODE._replace(cores=cores) for cores in (5, 4, 3, 2, 1)]
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
    device.modes = modes_to_array([MODE])

    def profile():
        with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
            profile_seven(device, journal)
            return [record.mode for record in journal.records]

    for _ in range(4):
        with pytest.raises(MeasurementError):
            profile()
    device.power_at = lambda at_s: 13_000.0
    assert profile() == [MODE]


def test_where_the_time_of_a_minibatch_went_is_recorded_where_the_workload_says(tmp_path):
    device = ScriptedDevice()

    def step():
        first = device.steps == 0
        device.step()
        return StepTimes(5000.0, 1000.0) if first else StepTimes(fetch_stall_ms=30.0, compute_ms=220.0)

    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        list(Profiler(device).profile([MODE], step, journal))
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        assert (journal.records[0].fetch_stall_ms, journal.records[0].compute_ms) == (30.0, 220.0)
    record = Profiler(device).measure(MODE, device.step)
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
