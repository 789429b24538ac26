"""How long devices have been in their states, and how long profiling takes, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.services.event_log import StateTimes
from coordinator.state.power_draw import LiveSamples
from coordinator.state.records import DeviceRecord
from wattfleet_io.clock import VirtualClock
from wattfleet_proto.convert import provenance_from_message
from wattfleet_proto.device_state import BoardSample, DeviceState
from wattfleet_proto.v1 import power_pb2

SIMULATED = provenance_from_message(power_pb2.PROVENANCE_SIMULATED)
ENROLLED = DeviceRecord("orin", "agx-orin", SIMULATED, 1000, state=DeviceState.ENROLLED)
PROFILING = replace(ENROLLED, state=DeviceState.PROFILING, profiled_modes=10)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(5000.0)


@pytest.fixture
def times(clock: VirtualClock) -> StateTimes:
    return StateTimes({"orin"}, 50, clock.now_s)


def test_a_state_lasts_until_another_is_reported(times: StateTimes, clock: VirtualClock) -> None:
    assert times.since_unix_s(ENROLLED) is None
    times.note(ENROLLED)
    clock.sleep_s(60)
    times.note(replace(ENROLLED, detail="another detail"))
    assert times.since_unix_s(ENROLLED) == 5000
    times.note(PROFILING)
    assert times.since_unix_s(PROFILING) == 5060


def test_what_is_left_follows_from_the_pace_since_profiling_began(times: StateTimes, clock: VirtualClock) -> None:
    times.note(PROFILING)
    clock.sleep_s(5)
    assert times.profiling_left_s(PROFILING) is None, "no mode yet"
    clock.sleep_s(5)
    halfway = replace(PROFILING, profiled_modes=12)  # 2 modes in 10 s are 5 s each, and 38 of 50 modes are left
    times.note(halfway)
    assert times.profiling_left_s(halfway) == 38 * 5
    clock.sleep_s(30)
    assert times.profiling_left_s(halfway) == 38 * 5 - 30
    clock.sleep_s(3600)
    assert times.profiling_left_s(halfway) == 0
    ready = replace(halfway, state=DeviceState.READY)
    times.note(ready)
    assert times.profiling_left_s(ready) is None


def test_a_board_with_few_modes_measures_no_more_than_it_has(times: StateTimes) -> None:
    assert (times.target_modes(ENROLLED), times.target_modes(replace(ENROLLED, mode_count=7))) == (50, 7)


def test_devices_that_were_forgotten_are_let_go(clock: VirtualClock) -> None:
    known = {"orin"}
    times = StateTimes(known, 50, clock.now_s)
    times.note(ENROLLED)
    known.clear()
    other = replace(ENROLLED, device_id="nano")
    known.add("nano")
    times.note(other)
    assert times.since_unix_s(ENROLLED) is None and times.since_unix_s(other) == 5000


def test_throttling_is_known_from_when_it_was_reported(times: StateTimes, clock: VirtualClock) -> None:
    samples = LiveSamples()
    assert times.throttled_unix_s("orin") is None
    for count, has_throttled in ((3, False), (3, False), (4, True), (1, False), (None, False), (9, False), (11, True)):
        assert samples.report("orin", BoardSample(throttle_events=count)) is has_throttled, count
    times.note_throttling("orin")
    clock.sleep_s(60)
    assert times.throttled_unix_s("orin") == 5000
