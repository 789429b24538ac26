"""Workstations, servers and Raspberry Pis: their file, their modes, and a journey with each through the commands."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from contextlib import nullcontext

import numpy as np
import pytest

from edge_agent.devices.device import Activity, KnobNotReachedError, ModeNotAppliedError
from edge_agent.devices.external_meters import MeterError
from edge_agent.devices.host import HOST_FILE, HostDevice, HostFile, parse_host_file, read_host_file
from edge_agent.devices.meters import power_now_mw
from edge_agent.devices.nvml import GpuLimitError, Nvml
from edge_agent.devices.selection import folder_of_device
from edge_agent.devices.sysfs import mode_argument, presets_of
from edge_agent.paths import BACKUP_FILE
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.profiler import Profiler
from edge_agent.runtime.readiness import parked_mode
from edge_agent.selftest import WORKS, result_of, selftest
from edge_agent.training.mode_change import DeviceBusyError, KnobBackup, backed_up, has_backup, restore_backup
from tests.fakes.faked_host import (
    PI_KHZ,
    FakedPi,
    FixedMeter,
    in_virtual_time,
    open_pi,
    open_workstation,
    workstation_tree,
    write_host_file,
)
from tests.fakes.faked_jetson import CPU
from tests.fakes.faked_nvml import FakeGpu, FakeNvml
from wattfleet.common.clock import SystemClock, VirtualClock
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import JournalHeader, ModeArray, array_to_modes

STEP_S = 0.25


# --- The owner's file -------------------------------------------------------------------------------------------------


def test_without_a_file_a_machine_is_never_changed(tmp_path):
    tree = workstation_tree(tmp_path)
    tree.location(HOST_FILE).unlink()
    device = HostDevice(tree, VirtualClock(), Nvml(FakeNvml()))
    assert (device.board_kind, device.has_modes, len(device.modes)) == ("host", False, 1)
    assert device.knobs() == {} and device.may_set() is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[machine]", "no table \\[host\\]"),
        ("[host]\nmode = 'cpu'", "unknown mode; \\[host\\] may have kind, modes, meter"),
        ("[host]\nmodes = 'gpu'", "one of fixed, gpu-power, cpu"),
        ("[host]\nmodes = 1", "modes has to be a text"),
        ("[host]\nkind = 'My PC'", "kind may have a-z"),
        ("[host]\nkind = 'agx-orin'", "no Jetson"),
        ("[host]\nmeter = 'shelly:'", "unknown meter"),
        ("[host]\nmeter = 'shelly:a b'", "host.toml: 'a b' is no host"),
        ("[host]\nmeter = 'shelly:http://1.2.3.4'", "host.toml: .* without http://"),
        ("[host]\nmeter = 'tasmota:https://plug'", "host.toml: .* without https://"),
        ("[host]\nmeter = 'command:watts'", "host.toml: .*absolute path"),
        ("[host]\nmeter = 'command:\"\"'", "host.toml: .*absolute path"),
        ("[host]\nperiod_s = 2", "name a meter, or remove period_s"),
        ("[host]\nidle_w = 3\nbusy_w = 9\nperiod_s = 2", "name a meter, or remove period_s"),
        ("[host]\nmeter = 'prometheus:http://localhost:9090'", "write a server and a query"),
        ("[host]\nmeter = 'command:watts \"'", "closing quotation"),
        ("[host]\nmeter = 'pmic'\nperiod_s = 60", "period_s has to be from 0.2 to 5 s"),
        ("[host]\nrest_w = -5", "rest_w has to be a number of at least 0"),
        ("[host]\nrest_w = nan", "rest_w has to be a number of at least 0"),
        ("[host]\nidle_w = true\nbusy_w = 9", "idle_w has to be a number"),
        ("[host]\nidle_w = 3", "give both or neither"),
        ("[host]\nidle_w = 9\nbusy_w = 3", "more than idle_w"),
        ("[host]\nidle_w = 3\nbusy_w = 9\nmeter = 'pmic'", "instead of meter"),
        ("[host", "host.toml: "),
    ],
)
def test_a_file_that_says_something_else_names_what_and_the_choices(text, problem):
    with pytest.raises(InvalidInputError, match=problem):
        parse_host_file(text.encode(), "host.toml")


def test_a_file_may_leave_everything_out():
    assert parse_host_file(b"[host]\n", "host.toml") == HostFile()
    assert parse_host_file(b"[host]\nrest_w = 0\n", "host.toml") == HostFile()


def test_root_uses_no_file_that_others_may_write(tmp_path, monkeypatch):
    tree = workstation_tree(tmp_path, 'meter = "command:/bin/true"')
    tree.location(HOST_FILE).chmod(0o666)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert read_host_file(tree).meter == "command:/bin/true", "an ordinary user runs it with its own rights only"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(InvalidInputError, match=r"host.toml: cannot be used: .*run `ch(mod go-w|own root) /"):
        read_host_file(tree)


def test_a_machine_with_modes_has_one_folder_for_its_settings_wherever_the_state_is(tmp_path):
    tree = workstation_tree(tmp_path / "root")
    state = tmp_path / "state"
    assert folder_of_device("host", state, tree.location("/")) == tmp_path / "root/var/lib/wattfleet/device"
    write_host_file(tree, 'modes = "fixed"')
    assert folder_of_device("host", state, tree.location("/")) == state / "device"


# --- Power limits of GPUs ---------------------------------------------------------------------------------------------


def test_the_fake_has_the_names_numbers_and_signatures_of_the_real_package():
    real, fake = importlib.import_module("pynvml"), FakeNvml()
    names = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML_"))]
    assert len(names) > 25
    for name in names:
        if name.startswith("nvml"):
            assert list(inspect.signature(getattr(fake, name)).parameters) == list(
                inspect.signature(getattr(real, name)).parameters
            ), name
        else:
            assert getattr(fake, name) == getattr(real, name), name
    assert real.NVMLError(4).value == fake.NVMLError(4).value == 4


def limits_w(device):
    return [float(name.removesuffix("W")) for name in device.presets]


def test_modes_are_limits_from_the_least_to_the_most_in_round_steps(tmp_path):
    device = open_workstation(tmp_path, FakeNvml())
    assert limits_w(device) == [100, *range(120, 350, 20), 350]
    assert (np.diff(device.modes[:, 2]) > 0).all() and (device.modes[:, [0, 1, 3]] == device.modes[0, [0, 1, 3]]).all()
    assert device.modes[-1].tolist() == [16, 4_900_000, 2_100_000_000, 9_501_000_000]
    assert presets_of(device)["350W"] == device.current_mode()


def test_a_small_range_gets_small_steps_and_the_default_limit_is_a_mode(tmp_path):
    device = open_workstation(tmp_path, FakeNvml(FakeGpu(least_mw=60_000, most_mw=75_500, default_mw=72_300)))
    assert limits_w(device) == [60, 65, 70, 72.3, 75, 75.5]


@pytest.mark.parametrize("range_mw", [(100_500, 176_000, 151_234), (102_000, 252_000, 203_000), (1_000, 9e6, 2_345)])
def test_there_are_at_most_17_limits_in_all(tmp_path, range_mw):
    least_mw, most_mw, default_mw = map(int, range_mw)
    gpu = FakeGpu(least_mw=least_mw, most_mw=most_mw, default_mw=default_mw)
    watts = limits_w(open_workstation(tmp_path, FakeNvml(gpu)))
    assert len(watts) <= 17 and (watts[0], watts[-1]) == (least_mw / 1e3, most_mw / 1e3)


def test_several_gpus_get_one_limit_that_all_of_them_allow(tmp_path):
    library = FakeNvml(FakeGpu("a", least_mw=100_000), FakeGpu("b", least_mw=150_000, most_mw=300_000))
    device = open_workstation(tmp_path, library)
    assert (min(limits_w(device)), max(limits_w(device))) == (150, 300)
    device.apply(device.presets["200W"])
    assert [gpu.limit_mw for gpu in library.gpus] == [200_000, 200_000]
    assert device.current_mode() == device.presets["200W"]


def test_limits_that_were_unequal_come_back_unequal(tmp_path):
    library = FakeNvml(FakeGpu("a", limit_mw=300_000), FakeGpu("b", limit_mw=250_000))
    device = open_workstation(tmp_path / "root", library)
    assert device.current_mode() not in array_to_modes(device.modes)
    with backed_up(device, tmp_path / "device"):
        device.apply(device.presets["120W"])
    assert [gpu.limit_mw for gpu in library.gpus] == [300_000, 250_000]


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (4, "only root may set a GPU's power limit; run the agent as root"),
        (15, "a GPU is lost; see `dmesg`, and reboot"),
        (16, "requires a reset"),
        (3, "has no power limit that can be set"),
        (999, "see `nvidia-smi` and `dmesg`"),
    ],
)
def test_what_nvml_refuses_has_a_remedy_and_changes_no_gpu(tmp_path, code, remedy):
    library = FakeNvml(FakeGpu("a"), FakeGpu("b"))
    device = open_workstation(tmp_path, library)
    library.gpus[1].failing["nvmlDeviceSetPowerManagementLimit"] = code
    with pytest.raises(GpuLimitError, match=remedy):
        device.apply(device.presets["200W"])
    assert [gpu.limit_mw for gpu in library.gpus] == [350_000, 350_000]


def test_a_gpu_without_limits_is_refused_with_what_to_write(tmp_path):
    library = FakeNvml()
    library.fail("nvmlDeviceGetPowerManagementLimitConstraints", library.NVML_ERROR_NOT_SUPPORTED)
    with pytest.raises(InvalidInputError, match='no power limit that can be set.*`modes = "fixed"`'):
        open_workstation(tmp_path, library)
    with pytest.raises(InvalidInputError, match="no power limits to choose from"):
        open_workstation(tmp_path, FakeNvml(FakeGpu("a"), FakeGpu("b", least_mw=350_000, most_mw=400_000)))
    with pytest.raises(InvalidInputError, match="NVML finds no NVIDIA GPU"):
        HostDevice(workstation_tree(tmp_path), VirtualClock(), None)


@pytest.mark.parametrize("fault", ["deaf", "enforced"])
def test_a_limit_that_is_not_reached_is_that_knobs_fault_and_is_taken_back(tmp_path, fault):
    gpu = FakeGpu(limit_mw=200_000)
    device = open_workstation(tmp_path, FakeNvml(gpu))
    gpu.is_deaf = fault == "deaf"
    gpu.enforced_mw = 250_000 if fault == "enforced" else None
    with pytest.raises(KnobNotReachedError, match="300 W") as raised:
        device.apply(device.presets["300W"])
    assert raised.value.knob == "gpu_hz"
    assert gpu.limit_mw == 200_000


def test_a_limit_that_is_never_reached_is_learned_and_no_longer_tried(tmp_path):
    gpu = FakeGpu(enforced_mw=250_000)
    device = in_virtual_time(open_workstation(tmp_path / "root", FakeNvml(gpu)))
    modes = [device.presets["350W"], device.presets["200W"]]
    with Journal.open(tmp_path / "profile.jsonl", header_of(device)) as journal:
        for _ in range(2):
            list(Profiler(device).profile(modes, lambda: device.clock.sleep_s(STEP_S), journal))
        assert [record.mode for record in journal.records] == modes[1:]
        assert journal.unreached_values(2) == [("gpu_hz", modes[0].gpu_hz)]


def test_a_killed_agents_limit_is_restored_by_the_next_one(tmp_path):
    library = FakeNvml()
    first = open_workstation(tmp_path / "root", library)
    folder = tmp_path / "device"
    with KnobBackup.hold(first, folder) as backup:
        backup.save()
        first.apply(first.presets["100W"])
        with pytest.raises(DeviceBusyError), KnobBackup.hold(first, folder):
            pass
    assert has_backup(folder) and library.gpus[0].limit_mw == 100_000
    with backed_up(open_workstation(tmp_path / "root", library), folder):
        assert library.gpus[0].limit_mw == 350_000
    assert not has_backup(folder)


@pytest.mark.parametrize("edited", ['kind = "rtx-3090"', 'kind = "my-pc"\nmodes = "gpu-power"'])
def test_a_limit_is_not_forgotten_when_the_file_is_edited_after_a_crash(tmp_path, edited):
    library, root = FakeNvml(), tmp_path / "root"
    device = open_workstation(root, library)
    folder = folder_of_device("host", tmp_path / "state", root)
    with KnobBackup.hold(device, folder) as backup:
        backup.save()
        device.apply(device.presets["100W"])
    device = open_workstation(root, library, edited)
    assert folder_of_device("host", tmp_path / "state", root) == folder
    with pytest.raises(InvalidInputError, match=f"set kind and modes in {HOST_FILE} as before, run `wattfleet agent"):
        restore_backup(device, folder)
    assert restore_backup(open_workstation(root, library), folder) and library.gpus[0].limit_mw == 350_000
    write_host_file(workstation_tree(root), edited)
    assert (folder_of_device("host", tmp_path / "state", root) == folder) == ("modes" in edited)


def test_a_machine_that_is_never_changed_leaves_no_backup_behind(tmp_path):
    device = open_workstation(tmp_path / "root", FakeNvml(), "")
    with backed_up(device, tmp_path / "device"):
        assert not has_backup(tmp_path / "device")


def test_a_limit_that_cannot_be_restored_keeps_its_backup(tmp_path):
    library = FakeNvml(FakeGpu("a"), FakeGpu("b"))
    device = open_workstation(tmp_path / "root", library)
    with pytest.raises(ModeNotAppliedError, match="not restored.*lost"), backed_up(device, tmp_path / "device"):
        device.apply(device.presets["100W"])
        library.gpus[0].failing["nvmlDeviceSetPowerManagementLimit"] = library.NVML_ERROR_GPU_IS_LOST
    assert library.gpus[1].limit_mw == 350_000, "the other one is restored"
    assert has_backup(tmp_path / "device")


def test_a_gpu_that_is_gone_keeps_no_other_one_at_the_lowest_limit(tmp_path):
    library, folder = FakeNvml(FakeGpu("a"), FakeGpu("b")), tmp_path / "device"
    device = open_workstation(tmp_path / "root", library)
    with KnobBackup.hold(device, folder) as backup:
        backup.save()
        device.apply(device.presets["100W"])
    del library.gpus[0]
    device = open_workstation(tmp_path / "root", library)
    with pytest.raises(GpuLimitError, match="a is missing.*reboot"), KnobBackup.hold(device, folder) as backup:
        backup.restore()
    assert library.gpus[0].limit_mw == 350_000 and has_backup(folder)
    with pytest.raises(InvalidInputError, match="cannot restore the power limits"):
        device.restore({"cpu0/online": "1"})


@pytest.mark.parametrize("others", [[], ["b"]], ids=["alone", "beside-another"])
def test_a_gpu_that_replaced_another_after_a_crash_keeps_its_own_limit(tmp_path, others):
    library, folder = FakeNvml(FakeGpu("a"), *map(FakeGpu, others)), tmp_path / "device"
    device = open_workstation(tmp_path / "root", library)
    with KnobBackup.hold(device, folder) as backup:
        backup.save()
        device.apply(device.presets["100W"])
    new = library.gpus[0] = FakeGpu("c", "NVIDIA RTX A6000", limit_mw=280_000, default_mw=300_000, most_mw=300_000)
    device = open_workstation(tmp_path / "root", library)
    changed = "a is missing, c (NVIDIA RTX A6000) was put in since, and keeps its limit (if you exchanged GPUs, nothing"
    with pytest.raises(GpuLimitError, match=re.escape(changed)), backed_up(device, folder):
        pytest.fail("the agent must not begin to change limits")
    assert not new.set_to_mw and [gpu.limit_mw for gpu in library.gpus] == [280_000, *[350_000 for _ in others]]
    (folder / BACKUP_FILE).unlink()  # as the message says
    with backed_up(device, folder):
        device.apply(device.presets["100W"])
    assert new.limit_mw == 280_000 and not has_backup(folder)


def test_restoring_what_never_changed_needs_no_permission(tmp_path):
    library = FakeNvml()
    device = open_workstation(tmp_path, library)
    kept = device.knobs()
    library.fail("nvmlDeviceSetPowerManagementLimit", library.NVML_ERROR_NO_PERMISSION)
    device.restore(kept)
    assert library.gpus[0].set_to_mw == []


# --- A Raspberry Pi ---------------------------------------------------------------------------------------------------


def test_a_pis_modes_are_its_cores_and_clocks(tmp_path):
    tree = FakedPi(tmp_path)
    device = open_pi(tree)
    assert len(device.modes) == 4 * len(PI_KHZ)
    mode = array_to_modes(device.modes)[3]
    device.apply(mode)
    assert tree.read(f"{CPU}/cpufreq/policy0/scaling_max_freq") == str(mode.cpu_khz)
    assert [tree.read(f"{CPU}/cpu{core}/online") for core in (1, 2, 3)] == ["0", "0", "0"]


def test_a_clock_that_a_pi_does_not_reach_is_that_knobs_fault(tmp_path):
    tree = FakedPi(tmp_path)
    device = open_pi(tree)
    tree.deaf.add(f"{CPU}/cpufreq/policy0/scaling_max_freq")
    with pytest.raises(KnobNotReachedError) as raised:
        device.apply(device.current_mode()._replace(cpu_khz=PI_KHZ[0]))
    assert raised.value.knob == "cpu_khz"


def test_a_machine_whose_kernel_lists_no_clocks_says_what_to_write(tmp_path):
    tree = workstation_tree(tmp_path, 'modes = "cpu"')
    with pytest.raises(InvalidInputError, match='lists no values.*`modes = "fixed"`'):
        HostDevice(tree, VirtualClock(), None)


# --- Power ------------------------------------------------------------------------------------------------------------


def test_a_meter_of_the_file_replaces_the_built_in_ones_and_what_it_misses_is_added(tmp_path):
    tree = workstation_tree(tmp_path, 'meter = "shelly:10.0.0.9"\nrest_w = 4.5')
    device = HostDevice(tree, SystemClock(), Nvml(FakeNvml()), FixedMeter(120.0))
    assert power_now_mw(device) == pytest.approx(124_500)
    assert device.power_statement == "power by a fixed meter; 4.5 W stated for the rest"
    assert device.basis == device.power_statement and device.provenance == "hardware"


@pytest.mark.parametrize(
    ("file", "interval_s"),
    [("", 0.2), ('meter = "tasmota:h"\nperiod_s = 0.5', 0.5), ('meter = "shelly:h"\nperiod_s = 5', 1.0)],
)
def test_a_meter_is_sampled_in_its_own_period(tmp_path, monkeypatch, file, interval_s):
    seen = []
    monkeypatch.setattr("edge_agent.devices.host.PolledMeter", lambda read, clock, every_s: seen.append(every_s))
    HostDevice(workstation_tree(tmp_path, file), VirtualClock(), None, FixedMeter()).start_meter()
    assert seen == [interval_s]


class Busy:
    """The kernel's count of ticks, of which a share is busy."""

    def __init__(self, tree):
        self.tree, self.ticks = tree, [0, 0]
        self.pass_time(0.0)

    def pass_time(self, share):
        self.ticks = [self.ticks[0] + 1000 * share, self.ticks[1] + 1000 * (1 - share)]
        place = self.tree.location("/proc/stat")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"cpu  {self.ticks[0]:.0f} 0 0 {self.ticks[1]:.0f} 0 0 0 0 0 0\ncpu0 1 1 1 1\n")


def test_stated_watts_follow_the_use_and_the_mode_and_are_labelled(tmp_path):
    tree = FakedPi(tmp_path, 'kind = "raspberry-pi-4"\nmodes = "cpu"\nidle_w = 3\nbusy_w = 7')
    busy = Busy(tree)
    device = HostDevice(tree, VirtualClock(), None)
    assert device.provenance == "stated"
    assert device.basis.startswith("stated by its owner, not measured: 3 W idle, 7 W in full use")
    assert np.isnan(device.activity().power_mw), "no tick has passed yet"
    for share, watts in ((0.0, 3.0), (1.0, 7.0), (0.5, 5.0)):
        busy.pass_time(share)
        assert device.activity().power_mw == pytest.approx(1e3 * watts)
    device.apply(device.current_mode()._replace(cores=2))
    busy.pass_time(1.0)
    assert device.activity().power_mw == pytest.approx(5_000)


# --- The commands -----------------------------------------------------------------------------------------------------


def header_of(device):
    return JournalHeader("bench", device.board_kind, device.provenance, "app", 16, device.basis)


def some_modes(device):
    modes: ModeArray = device.modes
    return [array_to_modes(modes)[row] for row in (0, len(modes) // 2, len(modes) - 1)]


@pytest.fixture
def run(agent, tmp_path):
    return lambda command, *arguments: agent(command, *arguments, "--device", "host", "--state-dir", tmp_path / "state")


@pytest.fixture(params=["workstation", "pi"])
def machine(request, tmp_path):
    """A device, and a function that returns all its settings."""
    if request.param == "pi":
        tree = FakedPi(tmp_path / "root")
        return open_pi(tree), tree.settings
    library = FakeNvml(FakeGpu("a"), FakeGpu("b", limit_mw=300_000))
    device = open_workstation(tmp_path / "root", library)
    return device, lambda: [gpu.limit_mw for gpu in library.gpus]


def test_a_machine_is_checked_profiled_set_and_restored(run, machine, as_device, tmp_path):
    device, settings = machine
    before = settings()
    as_device(device)
    found = {finding["topic"]: finding for finding in run("doctor", "--json").content["findings"]}
    for topic in ("device", "permission", "power"):
        assert found[topic]["level"] == "ok", found[topic]
    assert f"{device.board_kind} (hardware), {len(device.modes)} modes" in found["device"]["found"]

    modes = some_modes(device)
    for mode in modes:
        assert run("apply", mode_argument(mode)).code == 0
        assert device.current_mode() == mode
    assert run("restore").code == 0
    assert settings() == before

    in_virtual_time(device)
    seen = set()

    def step():
        device.clock.sleep_s(STEP_S)
        seen.add(device.current_mode())

    with Journal.open(tmp_path / "profile.jsonl", header_of(device)) as journal, backed_up(device, tmp_path / "device"):
        records = list(Profiler(device).profile(modes, step, journal))
    assert [record.mode for record in records] == modes and seen == set(modes)
    assert settings() == before


def test_an_owner_can_try_every_knob(machine, tmp_path):
    device, settings = machine
    before = settings()
    if device.file.modes == "cpu":
        device.activity = lambda: Activity(2e3 + device.current_mode().cores * device.current_mode().cpu_khz / 1e3)
    found = list(selftest(in_virtual_time(device), tmp_path / "device", 600, lambda cores: nullcontext()))
    assert result_of(found) == WORKS, found
    assert settings() == before


def test_a_machine_is_parked_in_its_lowest_mode(machine):
    device, _ = machine
    assert parked_mode(device) == array_to_modes(device.modes)[0]


def test_a_limit_is_applied_by_its_watts(run, as_device, tmp_path):
    gpu = FakeGpu()
    as_device(open_workstation(tmp_path / "root", FakeNvml(gpu)))
    assert run("apply", "200W").code == 0
    assert gpu.limit_mw == 200_000
    status = run("status", "--json").content
    assert status["device"]["mode"]["gpu_hz"] == round(2100 * (200 / 350) ** 0.5) * 1_000_000
    assert "200W" in run("modes").out


def findings(run):
    return {finding["topic"]: finding for finding in run("doctor", "--json").content["findings"]}


def test_doctor_says_what_else_uses_a_gpu_and_what_keeps_its_limit(run, as_device, tmp_path):
    gpu = FakeGpu(processes=(4711, 4712), display=1, persistence=0)
    as_device(open_workstation(tmp_path / "root", FakeNvml(gpu)))
    found = findings(run)
    assert found["GPU"]["found"] == "NVIDIA GeForce RTX 3090: also used by 2 other processes and a display"
    assert "measured as it is" in found["GPU"]["advice"]
    assert "nvidia-smi -pm 1" in found["GPU driver"]["advice"]


def test_doctor_says_who_may_set_a_limit(run, as_device, tmp_path):
    library = FakeNvml()
    library.fail("nvmlDeviceSetPowerManagementLimit", library.NVML_ERROR_NO_PERMISSION)
    as_device(open_workstation(tmp_path / "root", library))
    found = findings(run)["permission"]
    assert found["level"] == "fails" and "run the agent as root" in found["advice"]


def test_doctor_sets_no_limit_while_another_process_uses_the_device(tmp_path, agent, as_device, monkeypatch):
    library = FakeNvml()
    device = open_workstation(tmp_path / "root", library)
    as_device(device)
    monkeypatch.setattr("edge_agent.devices.selection.folder_of_device", lambda *_: tmp_path / "device")
    with KnobBackup.hold(device, tmp_path / "device"):
        found = agent("doctor", "--json", "--device", "host", "--state-dir", tmp_path / "state").content["findings"]
    permission = next(finding for finding in found if finding["topic"] == "permission")
    assert permission["level"] == "ok" and f"process {os.getpid()} uses the device" in permission["found"]
    assert library.gpus[0].set_to_mw == []


def test_doctor_names_the_setting_that_gives_a_machine_modes(run, as_device, tmp_path):
    tree = workstation_tree(tmp_path, "")
    as_device(HostDevice(tree, SystemClock(), Nvml(FakeNvml())))
    assert f'`modes = "gpu-power"` to {HOST_FILE}' in findings(run)["device"]["advice"]
    as_device(HostDevice(tree, SystemClock(), None))
    assert '`modes = "cpu"`' in findings(run)["device"]["advice"]


def test_doctor_repeats_what_a_meter_says(run, as_device, tmp_path):
    tree = workstation_tree(tmp_path, 'meter = "shelly:10.0.0.9"')
    as_device(HostDevice(tree, SystemClock(), None, FixedMeter(MeterError("10.0.0.9 did not answer within 3 s"))))
    found = findings(run)["power"]
    assert found["level"] == "fails" and "did not answer within 3 s" in found["found"]
    assert HOST_FILE in found["advice"]


def test_doctor_and_status_label_stated_watts(run, as_device, tmp_path):
    tree = FakedPi(tmp_path, 'kind = "raspberry-pi-4"\nmodes = "cpu"\nidle_w = 3\nbusy_w = 7')
    device = in_virtual_time(HostDevice(tree, VirtualClock(), None))
    device.activity = lambda: Activity(3_000.0)
    as_device(device)
    found = findings(run)["power"]
    assert found["level"] == "limited" and found["found"].endswith("; 3.0 W now")
    assert "labelled `stated`" in found["advice"]
    assert run("status", "--json").content["device"]["provenance"] == "stated"
