"""The parts of jetson-stats that the device `jtop` uses, as the installed package has them.

The service of jetson-stats runs on Jetsons only. Here, its shared data are given to the package's own client.
"""

from __future__ import annotations

import sys
import threading

import pytest

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.jtop import JtopUnavailableError, open_jtop
from edge_agent.devices.virtual.simulated import SimulatedDevice
from tests.fakes.polling import until

jtop = pytest.importorskip("jtop", reason="jetson-stats is not installed: pip install 'wattfleet[jetson]'")
from jtop.core.power import total_power  # noqa: E402 - only if it is installed

AGX_ORIN_MW = {"VDD_GPU_SOC": 3150, "VDD_CPU_CV": 14312, "VIN_SYS_5V0": 4968, "VDDQ_VDD2_1V8AO": 1091}
ORIN_NANO_MW = {"VDD_IN": 7000, "VDD_CPU_GPU_CV": 2500, "VDD_SOC": 1500}


class Service:
    """What the service shares with its clients: a queue, the latest data, and an event that they are new."""

    def __init__(self, rails_mw):
        self.fan = {"pwmfan": {"profile": "quiet", "speed": [30.0], "rpm": [1200]}}
        self.profiles = {"pwmfan": ["quiet", "cool", "manual"]}
        self.rails_mw = rails_mw
        self.version = jtop.__version__
        self.pending = []
        self.commands = []
        self.is_new = threading.Event()
        self.is_new.set()

    @staticmethod
    def register(name):
        pass

    def connect(self):
        pass

    def get_queue(self):
        return self

    def sync_data(self):
        return self

    def sync_event(self):
        return self.is_new

    def empty(self):
        return False

    def put(self, command):
        self.commands.append(command)
        change = command.get("fan")
        if change and change["command"] == "profile":
            self.fan["pwmfan"]["profile"] = change["profile"]
        elif change:
            self.fan["pwmfan"]["speed"] = [change["speed"]]

    def get(self, timeout):
        board = {"hardware": {"Module": "faked"}}
        init = {
            "version": self.version,
            "interval": 0.5,
            "board": board,
            "fan": self.profiles,
            "memory": {},
            "jc": False,
        }
        return {"init": init}

    def copy(self):
        """The latest data, as the services of the installed version put them together."""
        rails = {name: {"volt": 5000, "curr": mw // 5, "power": mw, "avg": mw} for name, mw in self.rails_mw.items()}
        total, others = total_power(rails)
        self.is_new.set()
        return {
            "power": {"tot": total, "rail": others},
            "temperature": {"tj": {"temp": 61.5, "online": True}, "cv0": {"temp": -256, "online": False}},
            "fan": self.fan,
            "gpu": {},
            "mem": {},
        }


@pytest.fixture
def connected(monkeypatch):
    """Open the device `jtop` on a board with these rails, mW."""
    opened = []
    monkeypatch.setattr(jtop.jtop, "_load_jetson_libraries", lambda client: None)

    def connect(rails_mw, rails=(), **changes):
        service = Service(rails_mw)
        vars(service).update(changes)
        made = type("Manager", (), {"__new__": lambda cls: service, "register": staticmethod(Service.register)})
        monkeypatch.setattr(sys.modules["jtop.jtop"], "JtopManager", made)
        device = open_jtop(SimulatedDevice("orin-nano", 0), rails)
        opened.append(device)
        return device, service

    yield connect
    for device in opened:
        device.close()
    for client in threading.enumerate():
        if isinstance(client, jtop.jtop):
            client.join(timeout=10)


def test_the_power_is_that_of_the_boards_rails(connected):
    assert connected(AGX_ORIN_MW, tuple(AGX_ORIN_MW)[:3])[0].activity().power_mw == 3150 + 14312 + 4968
    assert connected(ORIN_NANO_MW, ("VDD_IN",))[0].activity().power_mw == 7000
    assert connected(AGX_ORIN_MW)[0].activity().power_mw == sum(AGX_ORIN_MW.values())


def test_a_board_whose_rail_is_not_reported_is_refused(connected):
    with pytest.raises(JtopUnavailableError, match="does not report VIN, .*--device sysfs"):
        connected(AGX_ORIN_MW, ("VIN",))


def test_samples_come_to_the_meter(connected):
    device, _ = connected(ORIN_NANO_MW, ("VDD_IN",))
    meter = device.start_meter()
    until(lambda: len(meter.read().power_mw) > 1)
    assert set(meter.stop().power_mw) == {7000.0}


def test_the_hottest_part_that_is_on_counts(connected):
    assert connected(ORIN_NANO_MW)[0].conditions().temperature_c == 61.5


def test_the_fan_is_held_and_given_back(connected):
    device, service = connected(ORIN_NANO_MW)
    assert device.activity().fan_share == 0.3
    with device.measuring():
        assert service.fan["pwmfan"]["profile"] == "manual" and service.fan["pwmfan"]["speed"] == [100.0]
    assert service.fan["pwmfan"]["profile"] == "quiet"


def test_a_fan_without_a_manual_profile_is_named(connected):
    device, service = connected(ORIN_NANO_MW, profiles={"pwmfan": ["quiet"]})
    with pytest.raises(
        ModeNotAppliedError, match='jtop\'s fan pwmfan: Profile "manual" does not exist.*--device sysfs'
    ):
        with device.measuring():
            raise AssertionError("nothing is measured")
    assert service.fan["pwmfan"]["profile"] == "quiet"


def test_a_service_of_another_version_is_named(connected):
    with pytest.raises(JtopUnavailableError, match="does not answer .*Mismatch version jtop service"):
        connected(ORIN_NANO_MW, version="1.0.0")


def test_without_its_service_the_client_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(jtop.jtop, "_load_jetson_libraries", lambda client: None)
    monkeypatch.setattr("jtop.service.JTOP_PIPE", str(tmp_path / "jtop.sock"))
    monkeypatch.setattr("jtop.service.get_key", lambda: "key")
    with pytest.raises(JtopUnavailableError, match="not active.*sudo systemctl start jtop"):
        open_jtop(SimulatedDevice("orin-nano", 0))
