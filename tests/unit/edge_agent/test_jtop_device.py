"""A board read through a fake jtop, as in jetson-stats 4.3 and 7.x."""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import pytest

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.jtop import JtopDevice, JtopUnavailableError, open_jtop
from edge_agent.devices.virtual.simulated import SimulatedDevice
from wattfleet.errors import InvalidInputError
from wattfleet.modes import array_to_modes

# The data that the two versions report; 7.x has further keys.
ANNOUNCED = {
    "4.3": {
        "power": {
            "rail": {"VDD_CPU_GPU_CV": {"volt": 4848, "curr": 968, "power": 4692, "avg": 4690}},
            "tot": {"volt": 4880, "curr": 2640, "power": 12_883, "avg": 12_700},
        },
        "temperature": {"tj": {"temp": 61.5, "online": True}, "cv0": {"temp": -256, "online": False}},
    },
    "7.0": {
        "power": {
            "rail": {"VIN": {"volt": 19_000, "curr": 680, "power": 12_883, "avg": 12_700, "online": True}},
            "tot": {"power": 12_883, "avg": 12_700, "name": "VIN"},
        },
        "temperature": {"tj": {"temp": 61.5, "online": True, "max": 105.0}, "cv0": {"temp": -256, "online": False}},
    },
}


class FakeFan(dict):
    """jtop's fan, where a new setting is visible only after a delay."""

    def __init__(self, clock, delay_s):
        super().__init__(pwmfan={"profile": "quiet", "speed": [30.0]})
        self.clock, self.delay_s = clock, delay_s
        self.pending = []

    def seen(self, name):
        due = [change for at_s, change in self.pending if at_s <= self.clock.now_s()]
        self.pending = [entry for entry in self.pending if entry[0] > self.clock.now_s()]
        for change in due:
            self[name].update(change)
        return self[name]

    def set_profile(self, name, profile):
        self.pending.append((self.clock.now_s() + self.delay_s, {"profile": profile}))

    def set_speed(self, name, speed, idx=0):
        self.pending.append((self.clock.now_s() + self.delay_s, {"speed": [round(speed * 2.55) / 2.55]}))

    def get_profile(self, name):
        return self.seen(name)["profile"]

    def get_speed(self, name, idx=0):
        return self.seen(name)["speed"][idx]


class FakeJtop(types.ModuleType):
    """The `jtop` module of one version of jetson-stats."""

    class JtopException(Exception):  # noqa: N818 - named as jtop names it
        pass

    def __init__(self, generation, clock, delay_s=1.5):
        super().__init__("jtop")
        self.__version__ = generation
        self.refuses = None
        self.announces = True
        self.power = ANNOUNCED[generation]["power"]
        self.temperature = ANNOUNCED[generation]["temperature"]
        self.fan = FakeFan(clock, delay_s)
        self.observers = set()
        self.running = False

    def jtop(self, interval):
        return self

    def start(self):
        if self.refuses:
            raise self.JtopException(self.refuses)
        self.running = True

    def ok(self):
        return self.announces

    def close(self):
        self.running = False

    def attach(self, observer):
        self.observers.add(observer)

    def detach(self, observer):
        self.observers.discard(observer)

    def announce(self):
        for observer in self.observers:
            observer(self)


@pytest.fixture
def board():
    return SimulatedDevice("orin-nano", 0)


@pytest.fixture(params=ANNOUNCED)
def library(request, board, monkeypatch):
    made = FakeJtop(request.param, board.clock)
    monkeypatch.setitem(sys.modules, "jtop", made)
    return made


@pytest.fixture
def device(board, library) -> JtopDevice:
    return open_jtop(board)


def test_power_is_what_is_announced_once_each_at_the_devices_time(device, library):
    meter = device.start_meter()
    assert len(meter.read().at_s) == 0
    for _ in range(3):
        device.clock.sleep_s(1)
        library.announce()
    library.power = {"rail": {}, "tot": {}}
    device.clock.sleep_s(1)
    library.announce()
    trace = meter.stop()
    library.announce()
    assert np.array_equal(trace.at_s, [1, 2, 3, 4])
    assert np.array_equal(trace.power_mw, [12_883] * 3 + [np.nan], equal_nan=True)
    assert len(meter.read().at_s) == 4


def test_the_hottest_part_counts_and_a_sensor_that_is_off_does_not(device, library):
    assert device.conditions().temperature_c == 61.5
    library.temperature = {"cv0": {"temp": -256, "online": False}}
    assert device.conditions().temperature_c is None


def test_modes_are_the_boards(device, board):
    mode = array_to_modes(board.modes)[7]
    device.apply(mode)
    assert device.current_mode() == board.current_mode() == mode
    assert (device.board_kind, device.provenance) == ("orin-nano", "simulated")


def test_the_fan_is_held_once_it_really_runs_and_given_back(device, library):
    with device.measuring():
        assert device.clock.now_s() >= 1.5, "it waited for the setter to take effect"
        assert (library.fan.get_profile("pwmfan"), library.fan.get_speed("pwmfan")) == ("manual", 100)
    assert library.fan.get_profile("pwmfan") == "quiet"


def test_a_fan_that_does_not_follow_is_an_error_and_is_given_back(device, library):
    library.fan.set_speed = lambda name, speed, idx=0: None
    with pytest.raises(ModeNotAppliedError, match="pwmfan: wanted manual at 100 %.*group jtop"):
        with device.measuring():
            raise AssertionError("nothing is measured")
    assert library.fan.get_profile("pwmfan") == "quiet"


def test_a_fan_that_was_set_by_hand_gets_its_speed_back_in_a_later_process(board, device, library):
    library.fan["pwmfan"] = {"profile": "manual", "speed": [55.0]}
    kept = json.loads(json.dumps(dict(device.knobs())))
    library.fan["pwmfan"] = {"profile": "manual", "speed": [100.0]}
    board.apply(array_to_modes(board.modes)[3])
    open_jtop(board).restore(kept)
    assert dict(open_jtop(board).knobs())["mode"] == kept["mode"]
    assert library.fan.get_speed("pwmfan") == pytest.approx(55, abs=0.5)


@pytest.mark.parametrize("fans", [{}, {"jtop/otherfan": '["quiet", 30]'}, {"jtop/pwmfan": "loud"}])
def test_knobs_of_other_fans_are_refused_and_nothing_changes(device, board, fans):
    before = dict(device.knobs())
    with pytest.raises(InvalidInputError, match="cannot restore"):
        device.restore({**board.knobs(), **fans})
    assert device.knobs() == before


def test_without_jetson_stats_it_says_how_to_get_it(board, monkeypatch):
    monkeypatch.setitem(sys.modules, "jtop", None)
    with pytest.raises(JtopUnavailableError, match="pip install"):
        open_jtop(board)


def test_a_service_that_is_down_silent_or_too_old_is_named(board, library):
    library.refuses = "The jtop.service is not active"
    with pytest.raises(JtopUnavailableError, match="not active.*systemctl start jtop"):
        open_jtop(board)
    library.refuses, library.announces = None, False
    with pytest.raises(JtopUnavailableError, match="publishes no samples"):
        open_jtop(board)
    library.announces, library.power = True, ({"SYS5V": {"cur": 1}}, {})
    with pytest.raises(JtopUnavailableError, match="4.3 or newer"):
        open_jtop(board)
    assert not library.running
