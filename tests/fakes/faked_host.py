"""Faked machines that are no Jetsons: a workstation with GPUs and a Raspberry Pi, as trees of kernel files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_agent.devices.device import PowerTrace
from edge_agent.devices.external_meters import ExternalMeter
from edge_agent.devices.host import HOST_FILE, HostDevice
from edge_agent.devices.nvml import Nvml
from edge_agent.devices.tree import Tree
from tests.fakes.faked_jetson import CPU, NANO, FakedJetson
from tests.fakes.faked_nvml import FakeNvml
from wattfleet.common.clock import VirtualClock

PI_KHZ = (1_500_000, 1_600_000, 1_700_000, 1_800_000, 1_900_000, 2_000_000, 2_100_000, 2_200_000, 2_300_000, 2_400_000)
_PI = replace(NANO, name="Raspberry Pi 5", kind="raspberry-pi-5", cpu_khz=PI_KHZ, kernel=(6, 6))
_PI_MODEL = "Raspberry Pi 5 Model B Rev 1.0"


def write_host_file(tree: Tree, text: str) -> None:
    place = tree.location(HOST_FILE)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"[host]\n{text}\n")


class FakedPi(FakedJetson):
    """A Raspberry Pi 5, whose CPU policy reacts to writes like a Jetson's."""

    def __init__(self, root: Path, file: str = 'kind = "raspberry-pi-5"\nmodes = "cpu"\nmeter = "pmic"') -> None:
        super().__init__(root, _PI)
        for path in ("/etc/nv_tegra_release", "/sys/class/devfreq", "/sys/kernel", "/sys/bus", "/sys/class/hwmon"):
            place = self.location(path)
            shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        self.put("/proc/device-tree/model", f"{_PI_MODEL}\0")
        self.put("/proc/device-tree/compatible", "raspberrypi,5-model-b\0brcm,bcm2712\0")
        self.put("/sys/class/thermal/thermal_zone0/type", "cpu-thermal")
        self.put(f"{CPU}/online", "0-3")
        write_host_file(self, file)

    def settings(self) -> dict[str, str]:
        """All settings that can be written."""
        knobs = [*self.glob(f"{CPU}/cpu*/online"), *self.glob(f"{CPU}/cpufreq/policy*/scaling_m*_freq")]
        return {path: self.location(path).read_text().strip() for path in knobs}


class FixedMeter(ExternalMeter):
    """A meter that always answers the same, or fails."""

    statement = "a fixed meter"
    period_s = 0.2

    def __init__(self, watts: float | Exception = 5.0) -> None:
        self.watts = watts
        self.reads = 0

    def read_w(self) -> float:
        self.reads += 1
        if isinstance(self.watts, Exception):
            raise self.watts
        return self.watts


def open_pi(tree: FakedPi, meter: ExternalMeter | None = None) -> HostDevice:
    return HostDevice(tree, VirtualClock(), None, meter or FixedMeter())


WORKSTATION_FILE = 'kind = "rtx-3090"\nmodes = "gpu-power"'


def workstation_tree(root: Path, file: str = WORKSTATION_FILE) -> Tree:
    tree = Tree(root)
    for path, text in (
        (f"{CPU}/online", "0-15"),
        (f"{CPU}/cpu0/cpufreq/scaling_max_freq", "4900000"),
        ("/sys/class/thermal/thermal_zone0/type", "x86_pkg_temp"),
        ("/sys/class/thermal/thermal_zone0/temp", "52000"),
    ):
        place = tree.location(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{text}\n")
    write_host_file(tree, file)
    return tree


def open_workstation(root: Path, library: FakeNvml, file: str = WORKSTATION_FILE) -> HostDevice:
    return HostDevice(workstation_tree(root, file), VirtualClock(), Nvml(library))


def in_virtual_time(device: HostDevice) -> HostDevice:
    """Let the device's meter sample in virtual time, without a thread."""

    class Meter:
        def __init__(self) -> None:
            self.begin_s = device.clock.now_s()

        def read(self) -> PowerTrace:
            at_s = np.arange(self.begin_s, device.clock.now_s() + 1e-9, 0.2)
            return PowerTrace(at_s, np.full(len(at_s), device.activity().power_mw))

        stop = read

    if (polled := device._polled) is not None:  # noqa: SLF001
        # Its thread would wait in real time, and its answers be old in virtual time.
        setattr(polled, "read_mw", lambda: 1e3 * polled.meter.read_w())  # noqa: B010 - a method
        device._live_power = None  # noqa: SLF001
    setattr(device, "start_meter", Meter)  # noqa: B010 - a method
    return device
