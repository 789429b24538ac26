"""A profile of a board that overheats, throttles or stops reporting."""

import itertools
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

import reference_models
from edge_agent.devices.device import Conditions
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.learning.fitting import FittingHere
from edge_agent.learning.profiling_plan import profile_device
from edge_agent.learning.transfer import Transfer
from edge_agent.profiling.journal import Journal, JournalHeader
from edge_agent.profiling.mode_measurement import DisturbedError, Limits, ProfilerSettings, TooHotError
from edge_agent.profiling.profiler import Profiler
from tests.fakes.scripted_device import MODE, OTHER, ScriptedDevice
from wattfleet.errors import InvalidInputError
from wattfleet.modes import array_to_modes
from wattfleet.prediction import read_artefact

REFERENCE = read_artefact(Path(reference_models.__file__).parent / "agx_orin_resnet18")
HEADER = JournalHeader("bench", "scripted", "hardware", "resnet18-imagenet", 16)


def profile_seven(device, journal):
    fitting = FittingHere(Transfer((REFERENCE,), HEADER, 100), device.modes)
    profile_device(device, lambda: nullcontext(device.step), journal, fitting, 7, 0, lambda progress: None)


def hot_between(begin_s, end_s):
    return lambda at_s: Conditions(92.0 if begin_s <= at_s < end_s else 60.0, None)


def test_a_board_that_gets_too_hot_rests_and_the_mode_is_measured_again(tmp_path):
    device = ScriptedDevice()
    device.conditions_at = hot_between(10, 300)
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        (record,) = Profiler(device).profile([MODE], device.step, journal)
    assert record.minibatches >= 10 and record.power_mw == 13_000
    assert device.clock.now_s() > 300
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        assert list(journal.records) == [record]
        (discarded,) = journal.discarded
    assert discarded.mode == MODE and "92 degrees" in discarded.reason
    # It stopped within half a second and then rested instead of continuing to train.
    assert discarded.seconds == pytest.approx(10, abs=0.6)
    assert device.steps == discarded.minibatches + record.minibatches + 1
    assert (device.running_meters, device.held) == (0, 0)


def test_a_warm_board_below_its_limit_is_not_made_to_wait():
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: Conditions(80.0, 0)
    assert Profiler(device).measure(MODE, device.step).seconds == pytest.approx(13)


def test_a_board_that_stays_hot_ends_the_profile_within_the_patience(tmp_path):
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: Conditions(92.0, None)
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        settings = ProfilerSettings(limits=Limits(cooling_patience_s=60))
        with pytest.raises(TooHotError, match="still at 92 degrees after resting 60 s"):
            list(Profiler(device, settings).profile([MODE], device.step, journal))
    assert device.clock.now_s() < 75
    assert (device.running_meters, device.held) == (0, 0)


def test_what_a_throttling_board_shows_is_discarded():
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: Conditions(None, 7 if at_s < 12 else 9)
    with pytest.raises(DisturbedError, match="throttled 2 times"):
        Profiler(device).measure(MODE, device.step)
    # Events before the measurement do not count.
    assert Profiler(device).measure(MODE, device.step).power_mw == 13_000


def test_a_mode_that_always_throttles_is_excluded_and_each_attempt_recorded(tmp_path):
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: Conditions(None, int(at_s) if device.in_force == MODE else 0)
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        (record,) = Profiler(device).profile([MODE, OTHER], device.step, journal)
        assert record.mode == OTHER
        assert len(journal.discarded) == 3
        assert (journal.discarded_modes(3), journal.discarded_modes(4)) == ([MODE], [])


def test_a_profile_ends_on_a_board_that_does_not_bear_its_highest_mode(tmp_path):
    device = SimulatedDevice("orin-nano", 0)
    highest = device.current_mode()
    device.conditions = lambda: Conditions(None, int(device.clock.now_s()) if device.current_mode() == highest else 0)
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
        (Conditions(None, 0), "temperature sensor can no longer be read"),
        (Conditions(60.0, None), "throttle counter can no longer be read"),
    ],
)
def test_a_sensor_that_is_gone_during_a_measurement_disturbs_it(gone, reason):
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: Conditions(60.0, 0) if at_s < 10 else gone
    with pytest.raises(DisturbedError, match=reason):
        Profiler(device).measure(MODE, device.step)
    assert device.clock.now_s() == pytest.approx(11.5, abs=0.6)
    # A value that was missing from the beginning is not treated as a failure.
    assert Profiler(device).measure(MODE, device.step).power_mw == 13_000


def test_a_sensor_that_cannot_be_read_now_and_then_disturbs_nothing():
    device = ScriptedDevice()
    looks = itertools.count()
    device.conditions_at = lambda at_s: Conditions(None, None) if next(looks) % 3 else Conditions(60.0, 0)
    assert Profiler(device).measure(MODE, device.step).power_mw == 13_000


def test_a_board_is_not_cool_while_its_temperature_cannot_be_read_any_more(tmp_path):
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: Conditions(None if 10 <= at_s < 300 else 60.0, None)
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        list(Profiler(device).profile([MODE], device.step, journal))
        assert len(journal.discarded) == 1
    assert device.clock.now_s() > 300


def test_a_temperature_that_never_comes_back_ends_the_profile_within_the_patience(tmp_path):
    device = ScriptedDevice()
    device.conditions_at = lambda at_s: Conditions(92.0 if at_s < 20 else None, None)
    settings = ProfilerSettings(limits=Limits(cooling_patience_s=60))
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        with pytest.raises(TooHotError, match="the temperature cannot be read after resting 60 s"):
            list(Profiler(device, settings).profile([MODE], device.step, journal))
    assert device.clock.now_s() < 75


def test_the_mode_after_one_that_is_left_out_begins_cool(tmp_path):
    device = ScriptedDevice()
    apply, hot_until_s, began_at_c = device.apply, 0.0, []
    device.conditions_at = lambda at_s: Conditions(92.0 if at_s < hot_until_s else 60.0, None)

    def noted(mode):
        began_at_c.append((mode, device.conditions().temperature_c))
        apply(mode)

    def step():
        nonlocal hot_until_s
        device.step()
        if device.in_force == MODE:
            hot_until_s = device.clock.now_s() + 100

    device.apply = noted
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        (record,) = Profiler(device).profile([MODE, OTHER], step, journal)
        assert record.mode == OTHER
        assert [one.mode for one in journal.discarded] == [MODE] * 3
    assert began_at_c == [(MODE, 60.0)] * 3 + [(OTHER, 60.0)]


@pytest.mark.parametrize(
    "wrong", [{"cool_c": 85}, {"cool_c": float("nan")}, {"cooling_patience_s": -1}, {"attempts": 0}]
)
def test_limits_out_of_range_are_refused(wrong):
    with pytest.raises(InvalidInputError):
        Limits(**wrong)
