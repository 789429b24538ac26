"""The sensors and meters of Jetsons and other machines, their failures, and jumps of the wall clock."""

from __future__ import annotations

import ast
import errno
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import edge_agent
from edge_agent.devices.device import Activity, ModeNotAppliedError
from edge_agent.devices.host import ABSENT_HZ, ABSENT_KHZ, HostDevice
from edge_agent.devices.meters import PolledMeter, Rapl
from edge_agent.devices.nvml import Nvml, open_nvml
from edge_agent.devices.tree import Tree
from tests.fakes.faked_jetson import (
    AGX_ORIN_JP5,
    FAKED_BOARDS,
    INA_HWMON,
    INA_IIO,
    NANO,
    ORIN_NANO,
    FakedJetson,
    Ticks,
    open_sysfs,
)
from tests.fakes.faked_nvml import FakeNvml
from wattfleet.common.clock import SystemClock, VirtualClock
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Measurement, PowerMode, Profile, array_to_modes, read_profile, write_profile

# --- Jetson sensors ---------------------------------------------------------------------------------------------------
# Fan, power rails, thermal zones and throttle counters of a Jetson, and their failures.


BOARDS = pytest.mark.parametrize("board", FAKED_BOARDS, ids=lambda board: board.name)
# How kernels show a CPU policy whose cores are all offline.
OFFLINE_POLICIES = pytest.mark.parametrize(
    "offline_policy", [None, errno.EINVAL, errno.EBUSY], ids=["vanishes", "EINVAL", "EBUSY"]
)


@pytest.fixture
def orin(tmp_path):
    return FakedJetson(tmp_path, AGX_ORIN_JP5)


def test_the_fan_runs_full_while_measuring_and_is_given_back(orin):
    device = open_sysfs(orin)
    with device.measuring():
        assert orin.read(orin.fan) == "255" and not orin.fan_service_runs
    assert orin.read(orin.fan) == "80" and orin.fan_service_runs


@pytest.mark.parametrize("refused", [False, True])
def test_a_fan_whose_service_does_not_start_again_stays_at_full_speed(orin, refused):
    device = open_sysfs(orin)
    kept = device.knobs()
    with device.measuring():
        pass
    orin.run(["systemctl", "stop", "nvfancontrol"], "")
    orin.fan_service_starts = False
    if refused:
        orin.unwritable[orin.fan] = errno.EIO
    with pytest.raises(ModeNotAppliedError, match="systemctl start nvfancontrol: Job .* failed") as error:
        device.restore(kept)
    assert orin.read(orin.fan) == ("80" if refused else "255")
    assert ("wanted 255, the kernel refused it" in str(error.value)) == refused


def test_a_fan_without_its_service_gets_its_speed_back(orin):
    orin.run(["systemctl", "stop", "nvfancontrol"], "")
    orin.put(orin.fan, 120)
    with open_sysfs(orin).measuring():
        assert orin.read(orin.fan) == "255"
    assert orin.read(orin.fan) == "120" and not orin.fan_service_runs


def test_a_fan_that_something_else_turns_down_is_no_condition_to_measure_in(orin):
    device = open_sysfs(orin)
    orin.deaf.add(orin.fan)
    with pytest.raises(ModeNotAppliedError, match="stop the other program that controls the fan"), device.measuring():
        pytest.fail("measured")
    assert orin.fan_service_runs


@pytest.mark.parametrize(
    ("board", "sensor"),
    [
        (AGX_ORIN_JP5, f"{INA_HWMON}/1-0040/hwmon/hwmon3/curr2_input"),
        (ORIN_NANO, f"{INA_HWMON}/1-0040/hwmon/hwmon3/in1_input"),
        (NANO, f"{INA_IIO}/6-0040/iio:device0/in_power0_input"),
    ],
)
def test_a_rail_that_cannot_be_read_makes_the_sample_missing(tmp_path, board, sensor):
    tree = FakedJetson(tmp_path, board)
    device = open_sysfs(tree)
    clock = VirtualClock()
    ticks = Ticks(clock, 4)
    tree.unreadable[sensor] = errno.EIO
    meter = PolledMeter(device.power.read_mw, clock, 0.5, ticks)
    ticks.spent.wait()
    assert np.isnan(meter.stop().power_mw).tolist() == [True] * 5
    del tree.unreadable[sensor]
    assert device.start_meter().stop().power_mw.tolist()[0] == board.power_mw


def test_activity_has_the_fan_and_the_gpu_as_far_as_the_kernel_tells(orin):
    device = open_sysfs(orin)
    assert device.activity() == Activity(device.power.read_mw(), 80 / 255, None)
    orin.put(f"{orin.gpu}/device/load", 250)
    assert device.activity().gpu_use_share == 0.25


def test_a_rail_that_is_not_the_boards_does_not_matter(tmp_path):
    tree = FakedJetson(tmp_path, ORIN_NANO)
    tree.unreadable[f"{INA_HWMON}/1-0040/hwmon/hwmon3/in2_input"] = errno.EIO
    assert open_sysfs(tree).power.read_mw() == ORIN_NANO.power_mw


def test_a_missing_rail_is_named_and_nothing_stands_for_it(orin):
    orin.location(f"{INA_HWMON}/1-0040/hwmon/hwmon3/in2_label").unlink()
    device = open_sysfs(orin)
    assert device.power.missing == ("VDD_CPU_CV",)
    assert np.isnan(device.power.read_mw())


def test_a_meter_samples_at_its_interval_even_when_the_sensor_is_slow():
    clock = VirtualClock()
    ticks = Ticks(clock, 20)

    def slow_mw():
        clock.sleep_s(0.03)
        return 5_000.0

    meter = PolledMeter(slow_mw, clock, 0.2, ticks)
    ticks.spent.wait()
    trace = meter.stop()
    assert np.allclose(trace.at_s, 0.2 * np.arange(21))
    assert (trace.power_mw == 5_000).all()


def test_the_hottest_zone_on_the_chip_counts_where_none_is_named_so(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP5)
    tree.unreadable["/sys/class/thermal/thermal_zone3/temp"] = errno.EAGAIN
    assert open_sysfs(tree).conditions().temperature_c == 48.0


def test_without_any_zone_the_temperature_is_absent(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP5)
    for number in range(4):
        tree.unreadable[f"/sys/class/thermal/thermal_zone{number}/temp"] = errno.EAGAIN
    assert open_sysfs(tree).conditions().temperature_c is None


def _battery(tree: FakedJetson, number: int, capacity: object, kind: str = "Battery") -> None:
    tree.put(f"/sys/class/power_supply/BAT{number}/type", kind)
    tree.put(f"/sys/class/power_supply/BAT{number}/capacity", capacity)


def test_the_charge_of_the_emptiest_battery_is_reported(orin):
    device = open_sysfs(orin)
    assert device.conditions().battery_share is None
    _battery(orin, 0, 80)
    _battery(orin, 1, 55)
    _battery(orin, 2, 10, "Mains")
    _battery(orin, 3, 5)
    orin.put("/sys/class/power_supply/BAT3/scope", "Device")
    assert device.conditions().battery_share == 0.55


@pytest.mark.parametrize("capacity", [140, -1, "full", ""])
def test_an_impossible_charge_counts_as_unknown_and_is_logged_once(orin, caplog, capacity):
    _battery(orin, hash(capacity) % 1000 + 10, capacity)
    device = open_sysfs(orin)
    assert device.conditions().battery_share is None
    assert device.conditions().battery_share is None
    assert caplog.text.count("so it counts as unknown: check the battery's gauge") == 1


def test_a_throttle_counter_that_fails_makes_the_count_absent(orin):
    device = open_sysfs(orin)
    orin.put("/sys/class/hwmon/hwmon1/oc2_event_cnt", 5)
    assert device.conditions().throttle_events == 8
    orin.unreadable["/sys/class/hwmon/hwmon1/oc3_event_cnt"] = errno.EIO
    assert device.conditions().throttle_events is None


# --- Host device ------------------------------------------------------------------------------------------------------
# A machine without power modes, on fake files and a fake NVML.

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


# --- Clock jumps ------------------------------------------------------------------------------------------------------
# Measurements are unaffected by jumps of the wall clock, as on boards that have no clock battery.

WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


@pytest.fixture
def jumping(monkeypatch):
    jumps = iter(range(0, 10**9, 86_400))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))


def test_what_is_timed_while_the_wall_clock_jumps_by_days_took_what_it_took(jumping):
    clock = SystemClock()
    begun_s = clock.now_s()
    meter = PolledMeter(lambda: 9000.0, clock, interval_s=0.001)
    clock.sleep_s(0.01)
    trace = meter.stop()
    assert 0.01 <= clock.now_s() - begun_s < 60
    assert trace.at_s[0] >= begun_s and trace.at_s[-1] <= clock.now_s()


def test_nothing_in_the_agent_asks_the_wall_clock():
    asked = [
        f"{path.name}:{node.lineno}"
        for path in Path(edge_agent.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in WALL_CLOCKS
    ]
    assert asked == []
