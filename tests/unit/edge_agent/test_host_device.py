"""A machine without power modes, on fake files and a fake NVML."""

# ruff: noqa: N802 - named as pynvml names them
from __future__ import annotations

import json
import sys
import types

import numpy as np
import pytest

from edge_agent.devices.host import ABSENT_HZ, ABSENT_KHZ, HostDevice
from edge_agent.devices.meters import Nvml, Rapl, open_nvml
from edge_agent.devices.tree import Tree
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, PowerMode, Profile, array_to_modes, read_profile, write_profile
from wattfleet_io.clock import VirtualClock

CPUS = "sys/devices/system/cpu"
RAPL = "sys/class/powercap"


@pytest.fixture
def root(tmp_path):
    put(tmp_path, f"{CPUS}/online", "0-3,6\n")
    for cpu, khz in ((0, 2_400_000), (1, 3_600_000)):
        put(tmp_path, f"{CPUS}/cpu{cpu}/cpufreq/scaling_max_freq", f"{khz}\n")
    return tmp_path


def put(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(str(text))


def package(root, number, energy_uj, name=None, wraps_at_uj=1_000_000):
    zone = f"{RAPL}/intel-rapl:{number}"
    put(root, f"{zone}/name", name or f"package-{number}")
    put(root, f"{zone}/energy_uj", energy_uj)
    put(root, f"{zone}/max_energy_range_uj", wraps_at_uj)


def host(root, nvml=None):
    return HostDevice(Tree(root), VirtualClock(), nvml)


class FakeNvml(types.ModuleType):
    """A fake pynvml module with one GPU."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_GRAPHICS, NVML_CLOCK_MEM = 0, 0, 2

    class NVMLError(Exception):
        pass

    def __init__(self):
        super().__init__("pynvml")
        self.lost = False

    def answer(self, value):
        if self.lost:
            raise self.NVMLError("GPU is lost")
        return value

    def nvmlInit(self):
        self.answer(None)

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetPowerUsage(self, gpu):
        return self.answer(151_000)

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        return self.answer(61)

    def nvmlDeviceGetMaxClockInfo(self, gpu, clock):
        return self.answer({0: 2100, 2: 9501}[clock])


def test_its_one_mode_is_the_one_it_is_in_and_a_knob_that_it_lacks_is_a_constant(root):
    device = host(root)
    assert device.current_mode() == PowerMode(5, 3_600_000, ABSENT_HZ, ABSENT_HZ)
    assert array_to_modes(device.modes) == [device.current_mode()]
    assert (device.board_kind, device.provenance) == ("host", "hardware")
    with_gpu = host(root, Nvml(FakeNvml()))
    assert with_gpu.current_mode() == PowerMode(5, 3_600_000, 2_100_000_000, 9_501_000_000)


def test_a_machine_without_cpufreq_has_a_mode_that_a_profile_can_hold(root, tmp_path):
    for cpu in (0, 1):
        (root / f"{CPUS}/cpu{cpu}/cpufreq/scaling_max_freq").unlink()
    mode = host(root).current_mode()
    assert mode.cpu_khz == ABSENT_KHZ
    write_profile(Profile.of([Measurement(mode, 20.0, 50_000.0)]), tmp_path / "profile.csv")
    assert array_to_modes(read_profile(tmp_path / "profile.csv").modes) == [mode]


def test_it_accepts_its_mode_and_refuses_every_other(root):
    device = host(root)
    device.apply(device.current_mode())
    with pytest.raises(InvalidInputError, match="does not offer.*has only"):
        device.apply(device.current_mode()._replace(cores=2))


def test_a_machine_whose_cores_changed_is_not_in_its_mode_any_more(root):
    device = host(root)
    put(root, f"{CPUS}/online", "0-1")
    assert device.current_mode() not in array_to_modes(device.modes)


def test_without_sysfs_it_says_what_is_missing(tmp_path):
    with pytest.raises(InvalidInputError, match="not a list of cores"):
        host(tmp_path)


def test_a_machine_that_changes_by_itself_is_no_reason_to_refuse_a_start(root):
    device = host(root)
    kept = json.loads(json.dumps(dict(device.knobs())))
    put(root, f"{CPUS}/online", "0-1")
    device.restore(kept)
    with pytest.raises(InvalidInputError, match="cannot restore"):
        device.restore({"mode": "[1, 2, 3, 4]"})


def test_rapl_is_energy_over_time_over_all_packages_and_survives_a_wrap(root):
    package(root, 0, 900_000)
    package(root, 1, 100_000)
    # psys includes the packages, and `:0:0` is a part of one. Neither may be added to the packages.
    package(root, 2, 0, name="psys")
    package(root, "0:0", 0, name="core")
    clock = VirtualClock()
    rapl = Rapl(Tree(root), clock)
    read_mw = rapl.reader()
    assert rapl.packages == 2
    assert np.isnan(read_mw())
    clock.sleep_s(2.0)
    package(root, 0, 50_000)  # wrapped at 1 J: 0.15 J were used
    package(root, 1, 150_000)
    assert read_mw() == pytest.approx(100.0)  # 0.2 J in 2 s
    assert np.isnan(read_mw()), "no time has passed"


def test_a_counter_that_vanishes_is_missing_not_zero(root):
    package(root, 0, 0)
    clock = VirtualClock()
    read_mw = Rapl(Tree(root), clock).reader()
    read_mw()
    (root / f"{RAPL}/intel-rapl:0/energy_uj").unlink()
    clock.sleep_s(1)
    assert np.isnan(read_mw())


def test_packages_that_only_root_may_read_are_no_part_of_the_power(root):
    package(root, 0, 0)
    (root / f"{RAPL}/intel-rapl:0/energy_uj").unlink()
    package(root, 1, 0)
    device = host(root)
    assert "only root may read RAPL" in device.power_statement
    assert np.isnan(device.start_meter().stop().power_mw).all()


def test_gpu_and_packages_add_up_and_it_says_what_is_counted(root):
    package(root, 0, 0)
    device = host(root, Nvml(FakeNvml()))
    assert device.power_statement == (
        "power of 1 GPU(s) by NVML and 1 CPU package(s) by RAPL; the rest of the machine is not included"
    )
    device = host(root)
    assert "by RAPL" in device.power_statement and "NVML" not in device.power_statement


def test_gpu_power_is_sampled_and_a_lost_gpu_is_missing(root):
    library = FakeNvml()
    device = host(root, Nvml(library))
    assert (device.start_meter().stop().power_mw == 151_000).all()
    library.lost = True
    assert np.isnan(device.start_meter().stop().power_mw).all()
    assert device.conditions().temperature_c is None


def test_without_any_source_every_sample_is_missing_and_it_says_why(root):
    device = host(root)
    assert np.isnan(device.start_meter().stop().power_mw).all()
    assert "neither NVML nor RAPL is available" in device.power_statement


def test_conditions_are_the_hottest_part_and_the_packages_throttling(root):
    assert host(root).conditions().temperature_c is None
    assert host(root).conditions().throttle_events is None
    for zone, (kind, millidegrees) in enumerate(
        [("x86_pkg_temp", 55_000), ("acpitz", 90_000), ("cpu-thermal", 57_500)]
    ):
        put(root, f"sys/class/thermal/thermal_zone{zone}/type", kind)
        put(root, f"sys/class/thermal/thermal_zone{zone}/temp", millidegrees)
    for cpu in (0, 1):
        put(root, f"{CPUS}/cpu{cpu}/thermal_throttle/package_throttle_count", 4)
    conditions = host(root).conditions()
    assert (conditions.temperature_c, conditions.throttle_events) == (57.5, 4)
    assert host(root, Nvml(FakeNvml())).conditions().temperature_c == 61


def test_nvml_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_nvml() is None
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert open_nvml().power_mw() == 151_000
    library.lost = True
    assert open_nvml() is None
