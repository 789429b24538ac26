"""Jetsons as their owners reported them: what is read from them, offered and applied, and what doctor advises."""

from __future__ import annotations

import math
import os
import shutil
import types
from dataclasses import replace
from pathlib import Path

import pytest

import edge_agent
from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.host import HostDevice
from edge_agent.devices.jetson.nvpmodel_conf import parse_conf
from edge_agent.devices.jtop import JtopDevice
from edge_agent.devices.nvpmodel import NvpmodelDevice
from edge_agent.devices.selection import open_device
from edge_agent.devices.sysfs import parse_mode
from edge_agent.diagnosis import host_findings, jetson_findings
from edge_agent.paths import PREDICTOR_DIRECTORY, PROFILE_FILE
from edge_agent.profiling.journal import Journal, keep_apart
from edge_agent.training.mode_change import apply_with_backup, backed_up
from tests.fakes.faked_jetson import (
    AGX_ORIN_JP6,
    BPMP,
    CAP_6,
    CPU,
    LOCK,
    NANO,
    ORIN_EMC,
    ORIN_NANO,
    ORIN_NANO_SUPER,
    THOR_T4000,
    THOR_T5000,
    XAVIER_AGX,
    XAVIER_NX,
    FakedBoard,
    FakedJetson,
    FakedNvpmodel,
    conf_text,
    open_nvpmodel,
    open_sysfs,
)
from wattfleet.common.clock import VirtualClock
from wattfleet.common.programs import ProgramResult
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import JournalHeader, ModeRecord, PowerMode

UNIT = Path(edge_agent.__file__).parent / "systemd/wattfleet-agent.service"


def findings(tree):
    return {finding.topic: finding for finding in jetson_findings(tree)}


def without_debugfs(tree):
    for path in tree.glob(f"{LOCK}/*") + [f"{BPMP}/emc/possible_rates"]:
        tree.location(path).unlink()


def with_linked_device_tree(tree):
    """As the kernel has it: the device tree is an absolute link into /sys."""
    for name in ("model", "compatible"):
        tree.put(f"/sys/firmware/devicetree/base/{name}", tree.location(f"/proc/device-tree/{name}").read_text())
        tree.location(f"/proc/device-tree/{name}").unlink()
    tree.location("/proc/device-tree").rmdir()
    os.symlink("/sys/firmware/devicetree/base", tree.location("/proc/device-tree"))


# --- Identity ---------------------------------------------------------------------------------------------------------


def test_jetson_linux_39_is_jetpack_7(tmp_path):
    tree = FakedJetson(tmp_path, ORIN_NANO)
    tree.put("/etc/nv_tegra_release", "# R39 (release), REVISION: 2.0, GCID: 45755727, BOARD: generic, EABI: aarch64")
    assert findings(tree)["software"].found == "Jetson Linux 39.2.0, JetPack 7"


def test_a_xavier_nx_measures_its_input(tmp_path):
    device = open_sysfs(FakedJetson(tmp_path, XAVIER_NX))
    assert device.board_kind == "xavier-nx" and device.power.rails == ("VDD_IN",)
    device.apply(device.space.lowest)
    assert device.current_mode() == device.space.lowest


def test_a_kit_without_a_power_monitor_is_not_told_to_load_its_driver(tmp_path):
    compatible = "nvidia,p3542-0000+p3448-0003\0nvidia,jetson-nano-2gb\0nvidia,tegra210"
    power = findings(FakedJetson(tmp_path, replace(NANO, compatible=compatible, chips=())))["power"]
    assert (power.level, "modprobe" in power.advice) == ("absent", False)
    assert "no power monitor" in power.found
    usual = findings(FakedJetson(tmp_path / "4gb", replace(NANO, chips=())))["power"]
    assert (usual.level, "modprobe ina3221" in usual.advice) == ("fails", True)


def test_a_kernel_without_the_gpu_driver_is_told_its_name(tmp_path):
    tree = FakedJetson(tmp_path, ORIN_NANO)
    tree.location(f"{tree.gpu}/device/of_node/name").unlink()
    gpu = findings(tree)["GPU"]
    assert gpu.level == "fails" and "nvgpu is not loaded" in gpu.found
    assert "modprobe nvgpu" in gpu.advice and "debugfs" not in gpu.advice


def test_thors_throttle_alerts_count_as_events_once_they_begin(tmp_path):
    tree = FakedJetson(tmp_path, THOR_T5000)
    device = open_sysfs(tree)
    assert device.conditions().throttle_events == 0
    assert findings(tree)["throttling"].found == "no alert in force (cpu-throttle-alert, gpu-throttle-alert)"
    tree.put("/sys/class/thermal/cooling_device2/cur_state", 1)
    assert device.conditions().throttle_events == 1
    found = findings(tree)["throttling"]
    assert (found.level, found.found) == ("limited", "in force now: gpu-throttle-alert")


def test_a_fan_of_thor_that_its_owner_had_off_runs_while_measuring(tmp_path):
    tree = FakedJetson(tmp_path, replace(THOR_T5000, fan_enable=0))
    tree.fan_service_runs = False
    before = tree.everything()
    with open_sysfs(tree).measuring():
        assert (tree.read(tree.fan), tree.read(f"{tree.fan}_enable")) == ("255", "1"), "0 would stop the fan"
    assert tree.everything() == before


def test_advice_about_the_memory_is_one_that_helps_on_this_board(tmp_path):
    nano = findings(FakedJetson(tmp_path / "nano", NANO))["memory"]
    assert (nano.level, nano.advice) == ("ok", "") and "all that is known of this kind" in nano.found
    t4000 = findings(FakedJetson(tmp_path / "t4000", THOR_T4000))["memory"]
    assert t4000.level == "limited" and "nothing to do" in t4000.advice
    hidden = FakedJetson(tmp_path / "nx", XAVIER_NX)
    without_debugfs(hidden)
    assert "sudo mount -t debugfs" in findings(hidden)["memory"].advice


def test_a_missing_power_monitor_or_gpu_is_told_the_driver_of_its_board(tmp_path):
    tree = FakedJetson(tmp_path, THOR_T5000)
    tree.location("/sys/bus/i2c/drivers/ina238/2-0044/hwmon/hwmon5/power1_input").unlink()
    assert "modprobe ina238" in findings(tree)["power"].advice
    for node in tree.board.gpus:
        shutil.rmtree(tree.location(node))
    assert "modprobe nvidia`), or wait a minute" in findings(tree)["GPU"].advice


def test_a_gpu_that_appears_late_at_boot_is_found_when_the_service_tries_again(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP6)
    late = tmp_path / "late"
    tree.location(tree.gpu).rename(late)
    with pytest.raises(InvalidInputError, match="nvgpu is not loaded, or not yet"):
        open_device("auto", 0, root=tmp_path)
    late.rename(tree.location(tree.gpu))
    assert open_device("auto", 0, root=tmp_path).board_kind == "agx-orin"
    assert {"Restart=on-failure", "RestartSec=10"} <= set(UNIT.read_text().splitlines())


def test_a_gpu_that_mig_splits_is_shown_and_its_figures_kept_apart(tmp_path):
    tree = FakedJetson(tmp_path, THOR_T5000)
    whole = open_sysfs(tree).basis
    for instance in (1, 2):
        tree.put(f"/proc/driver/nvidia/capabilities/gpu0/mig/gi{instance}/access", "")
    assert "split by MIG into 2" in findings(tree)["GPU"].found
    assert open_sysfs(tree).basis == f"{whole}; split by MIG into 2"


# --- Files in containers ----------------------------------------------------------------------------------------------


def test_links_are_followed_below_the_root(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP6)
    with_linked_device_tree(tree)
    assert open_sysfs(tree).board_kind == "agx-orin"
    tree.put("/real/first", "1")
    os.symlink("/../../real", tree.location("/linked"))
    os.symlink("loop", tree.location("/loop"))
    assert tree.read("/linked/first") == "1" and tree.glob("/linked/f*") == ["/linked/first"]
    tree.write("/linked/first", "2")
    assert tree.read("/real/first") == "2"
    assert not tree.exists("/loop") and tree.glob("/loop/*") == []


def test_a_hidden_device_tree_does_not_make_a_jetson_a_host(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP6)
    with_linked_device_tree(tree)
    for name in ("model", "compatible"):
        tree.location(f"/sys/firmware/devicetree/base/{name}").unlink()
    with pytest.raises(InvalidInputError, match="looks like a Jetson .* device tree is hidden.*/host/sys"):
        open_device("auto", 0, root=tmp_path)
    # Without the host's /etc, only /sys tells.
    tree.location("/etc/nv_tegra_release").unlink()
    with pytest.raises(InvalidInputError, match="looks like a Jetson .*device tree is hidden"):
        open_device("auto", 0, root=tmp_path)


def test_settings_that_are_mounted_read_only_are_not_a_question_of_root(tmp_path, monkeypatch):
    tree = FakedJetson(tmp_path, ORIN_NANO)
    monkeypatch.setattr(tree, "may_write", lambda path: False)
    assert "as root" in findings(tree)["permission"].advice
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_flag=os.ST_RDONLY))
    assert "--privileged" in findings(tree)["permission"].advice


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_the_unit_after_the_memory_frequencies_is_ignored(tmp_path):
    tree = FakedJetson(tmp_path, ORIN_NANO_SUPER)
    tree.put(f"{BPMP}/emc/possible_rates", "204000 665600 2133000 3199000 (kHz)")
    device = open_sysfs(tree)
    assert device.memory.table_is_live and device.space.mem_hz == ORIN_EMC


def test_without_debugfs_a_super_board_keeps_its_highest_memory_frequency(tmp_path):
    tree = FakedJetson(tmp_path, ORIN_NANO_SUPER)
    without_debugfs(tree)
    device = open_sysfs(tree)
    device.apply(device.space.lowest)
    # The cap that stands after a restart is no reason to forget the frequencies above it.
    device = open_sysfs(tree)
    device.apply(device.space.highest)
    assert tree.read(CAP_6) == "3199000000"


def test_no_highest_memory_frequency_is_below_what_the_cap_says(tmp_path):
    tree = FakedJetson(tmp_path, replace(ORIN_NANO, emc_hz=ORIN_EMC))
    without_debugfs(tree)
    device = open_sysfs(tree)
    before = device.current_mode()
    assert before.mem_hz == device.space.highest.mem_hz == 3_199_000_000
    device.apply(before._replace(gpu_hz=device.space.lowest.gpu_hz))
    assert tree.read(CAP_6) == "3199000000"


def fixed_at(tree, hz):
    """As on a board without nvphs: the cap stands, and accepts writes without effect."""
    tree.put(CAP_6, hz)
    if tree.exists(f"{LOCK}/rate"):
        tree.put(f"{LOCK}/rate", hz)
    tree.deaf.add(CAP_6)


def test_a_cap_that_cannot_be_raised_is_found_before_the_first_mode(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP6)
    fixed_at(tree, 2_133_000_000)
    device = open_sysfs(tree)
    with backed_up(device, tmp_path / "backup"):
        assert device.space.mem_hz == ORIN_EMC[:3]
        tree.deaf.clear()
        tree.written.clear()
        for mode in (device.space.lowest, device.space.highest):
            device.apply(mode)
        assert CAP_6 not in [path for path, _ in tree.written], "the cap is not touched again"
    assert tree.read(CAP_6) == "2133000000" and tree.read(f"{LOCK}/mrq_rate_locked") == "0"


def test_a_cap_that_can_be_raised_stays_as_the_owner_had_it(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP6)
    tree.write(CAP_6, "2133000000")
    before = tree.everything()
    device = open_sysfs(tree)
    with backed_up(device, tmp_path / "backup"):
        assert device.space.mem_hz == ORIN_EMC
        device.apply(device.space.highest)
        assert tree.read(CAP_6) == "3199000000"
    assert tree.everything() == before


def test_trying_the_cap_changes_nothing_not_even_the_state_of_the_clock(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP6)
    tree.write(CAP_6, "2133000000")
    tree.put(f"{LOCK}/state", 0)
    before = tree.everything()
    open_sysfs(tree).try_knobs()
    assert tree.everything() == before


def test_without_a_lock_a_fixed_cap_is_never_lowered(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP6)
    without_debugfs(tree)
    fixed_at(tree, 2_133_000_000)
    device = open_sysfs(tree)
    with backed_up(device, tmp_path / "backup"):
        assert device.space.mem_hz == (2_133_000_000,)
        device.apply(device.space.lowest)
        assert device.current_mode().mem_hz == 2_133_000_000


def test_a_locked_memory_keeps_its_cap_so_that_it_need_not_be_raised_again(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP6)
    device = open_sysfs(tree)
    kept = device.knobs()
    device.apply(device.space.lowest)
    assert device.current_mode().mem_hz == ORIN_EMC[0] and tree.read(CAP_6) == "3199000000"
    tree.deaf.add(CAP_6)
    device.restore(kept)


def test_a_mode_above_a_fixed_cap_is_not_applied_and_the_remedy_is_a_reboot(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP6)
    tree.put("/etc/nvpmodel.conf", conf_text(tree))
    fixed_at(tree, 2_133_000_000)
    before = tree.everything()
    with pytest.raises(ModeNotAppliedError, match="MAXN is not reached before a reboot.*; nothing was changed"):
        apply_with_backup(open_sysfs(tree), "MAXN", tmp_path / "backup")
    assert tree.everything() == before


def test_what_cannot_be_restored_is_left_to_a_reboot(tmp_path):
    tree = FakedJetson(tmp_path, NANO)
    device = open_sysfs(tree)
    kept = device.knobs()
    device.apply(device.space.lowest)
    tree.deaf.add(f"{tree.gpu}/max_freq")
    with pytest.raises(ModeNotAppliedError, match="not restored: .*max_freq.* reboot: the board"):
        device.restore(kept)


# --- Power ------------------------------------------------------------------------------------------------------------


def test_the_rail_inside_another_is_not_counted_twice(tmp_path):
    # A public line of tegrastats, mW.
    measured = {"VDD_GPU_SOC": 3150, "VDD_CPU_CV": 14312, "VIN_SYS_5V0": 4968, "VDDQ_VDD2_1V8AO": 1091}
    names = list(measured)
    chips = tuple(tuple((name, 1000, measured[name]) for name in group) for group in (names[:3], names[3:]))
    device = open_sysfs(FakedJetson(tmp_path, replace(AGX_ORIN_JP6, chips=chips)))
    assert device.power.read_mw() == 3150 + 14312 + 4968
    assert device.basis == "VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0"
    # jtop sums all rails of a board without an input rail.
    rails = {name: {"power": mw} for name, mw in measured.items()}
    client = types.SimpleNamespace(power={"rail": rails, "tot": {"power": sum(measured.values())}}, fan={})
    by_jtop = JtopDevice(device, client, device.power.rails)
    assert by_jtop.activity().power_mw == 3150 + 14312 + 4968 and by_jtop.basis == device.basis
    del rails["VIN_SYS_5V0"]
    assert math.isnan(by_jtop.activity().power_mw)


def test_voltage_and_current_of_the_input_are_shown_and_a_weak_supply_is_named(tmp_path):
    tree = FakedJetson(tmp_path, ORIN_NANO)
    assert "VDD_IN: 7.0 W now (VDD_IN at 5.00 V, 1.40 A)" in findings(tree)["power"].found
    (voltage,) = tree.glob("/sys/bus/i2c/drivers/ina3221/*/hwmon/*/in1_input")
    tree.put(voltage, 4_600)
    power = findings(tree)["power"]
    assert power.level == "limited" and "4.60 V" in power.found and "stronger supply" in power.advice
    iio = FakedJetson(tmp_path / "nano", NANO)
    folder = iio.glob("/sys/bus/i2c/drivers/ina3221x/*/iio:device0")[0]
    iio.put(f"{folder}/in_voltage0_input", 5_080)
    iio.put(f"{folder}/in_current0_input", 492)
    assert "POM_5V_IN at 5.08 V, 0.49 A" in findings(iio)["power"].found


HEADER = JournalHeader("orin", "agx-orin", "hardware", "app", 16, "four rails")
RECORD = ModeRecord(PowerMode(4, 729_600, 306_000_000, 204_000_000), 12.5, 18_000.0, 0.1, 0.1, 40, 20, 31.0)


def test_profiles_of_another_basis_are_kept_apart_and_come_back(tmp_path, caplog):
    path, now = tmp_path / PROFILE_FILE, replace(HEADER, basis="three rails")
    with Journal.open(path, HEADER) as journal:
        journal.append(RECORD)
    (tmp_path / PREDICTOR_DIRECTORY).mkdir()
    with pytest.raises(InvalidInputError, match="belongs to basis 'four rails', not 'three rails'"):
        Journal.open(path, now)
    keep_apart(path, now)
    assert "its figures are of four rails, but this device's are of three rails" in caplog.text
    assert not (tmp_path / PREDICTOR_DIRECTORY).exists(), "it was fitted to the other figures"
    with Journal.open(path, now) as journal:
        assert journal.records == ()
    keep_apart(path, now)
    keep_apart(path, HEADER)
    with Journal.open(path, HEADER) as journal:
        assert journal.records == (RECORD,)
    keep_apart(path, now)
    assert len(list(tmp_path.iterdir())) == 2


def test_another_devices_profile_is_not_set_aside(tmp_path):
    Journal.open(tmp_path / PROFILE_FILE, HEADER).close()
    other = replace(HEADER, device_id="nano", basis="three rails")
    keep_apart(tmp_path / PROFILE_FILE, other)
    with pytest.raises(InvalidInputError, match="belongs to device_id 'orin', not 'nano'"):
        Journal.open(tmp_path / PROFILE_FILE, other)


# --- Presets ----------------------------------------------------------------------------------------------------------

HWMON = """
< PARAM TYPE=HWMON NAME=VDDIN_OC_LIMIT >
WARN /sys/devices/platform/c250000.i2c/i2c-7/7-0040/hwmon curr1_max
CRIT /sys/devices/platform/c250000.i2c/i2c-7/7-0040/hwmon curr1_crit
"""


def with_hwmon(text):
    head, _, modes = text.partition("< POWER_MODEL ID=0")
    first, _, others = f"< POWER_MODEL ID=0{modes}".partition("\n")
    return f"{head}{HWMON}\n{first}\nVDDIN_OC_LIMIT WARN 3000\n{others}"


def test_a_limit_of_the_power_monitor_hides_no_preset(tmp_path):
    tree = FakedJetson(tmp_path, XAVIER_NX)
    text = with_hwmon(conf_text(tree))
    tree.put("/etc/nvpmodel.conf", text)
    assert list(open_sysfs(tree).presets) == ["MAXN", "15W", "10W"]
    assert findings(tree)["presets"].level == "ok"
    conf = parse_conf(text, "conf")
    assert conf.paths["VDDIN_OC_LIMIT", "WARN"].endswith("/hwmon curr1_max")
    assert parse_conf(conf.text(), "copy") == conf


def test_doctor_says_what_it_does_not_understand_of_the_configuration(tmp_path):
    tree = FakedJetson(tmp_path, ORIN_NANO)
    missing = findings(tree)["presets"]
    assert missing.level == "limited" and "/etc/nvpmodel.conf: No such file" in missing.found
    tree.put("/etc/nvpmodel.conf", conf_text(tree).replace("TYPE=CLOCK NAME=EMC", "TYPE=NEW NAME=EMC"))
    broken = findings(tree)["presets"]
    assert broken.level == "limited" and "/etc/nvpmodel.conf, line" in broken.found and "TYPE NEW" in broken.found
    assert "wattfleet agent modes" in broken.advice
    tree.put("/etc/nvpmodel.conf", conf_text(tree))
    tree.put("/var/lib/nvpmodel/status", "pmode:0017")
    stale = findings(tree)["presets"]
    assert "stored mode 17 is not among them" in stale.found and stale.advice == "run `sudo nvpmodel -m 1`"


def test_without_nvidias_release_and_presets_a_board_is_complete_in_numbers(tmp_path):
    tree = FakedJetson(tmp_path, ORIN_NANO_SUPER)
    tree.location("/etc/nv_tegra_release").unlink()
    os.symlink("/nix/store/removed/nvpmodel.conf", tree.location("/etc/nvpmodel.conf"))
    found = findings(tree)
    assert found["software"].level == "ok" and found["board"].level == "ok"
    assert "tegra-nvpmodel" in found["presets"].advice and "services.nvpmodel.enable" in found["presets"].advice
    assert all(finding.level != "fails" for finding in found.values())
    device = open_sysfs(tree)
    before = device.current_mode()
    assert device.presets == {}
    with pytest.raises(InvalidInputError, match="unknown mode 'MAXN'.*this device has no presets"):
        parse_mode(device, "MAXN")
    with backed_up(device, tmp_path / "state"):
        lower = before._replace(cores=4, gpu_hz=612_000_000)
        device.apply(lower)
        assert device.current_mode() == lower
    assert device.current_mode() == before
    with pytest.raises(InvalidInputError, match="check that nvpmodel is installed"):
        open_device("nvpmodel", 0, root=tmp_path)


def test_the_configuration_behind_an_absolute_link_is_read(tmp_path):
    tree = FakedJetson(tmp_path, ORIN_NANO_SUPER)
    tree.put("/etc/nvpmodel/nvpmodel_p3767_0003_super.conf", conf_text(tree))
    os.symlink("/etc/nvpmodel/nvpmodel_p3767_0003_super.conf", tree.location("/etc/nvpmodel.conf"))
    assert "MAXN" in open_sysfs(tree).presets


@pytest.mark.parametrize(
    ("board", "limits", "stands_at"),
    [
        (NANO, (918_000, 640_000_000), (921_600, 614_400_000)),
        (AGX_ORIN_JP6, (1_497_600, 828_750_000), (1_497_600, 816_000_000)),
        (XAVIER_AGX, (1_200_000, 670_000_000), (1_190_400, 624_750_000)),
    ],
    ids=lambda value: value.kind if isinstance(value, FakedBoard) else "",
)
def test_limits_stand_where_boards_were_seen_to_set_them(tmp_path, board, limits, stands_at):
    tree = FakedJetson(tmp_path, board)
    text = conf_text(tree).replace("MAX_FREQ 1113600", f"MAX_FREQ {limits[0]}")
    tree.put("/etc/nvpmodel.conf", text.replace("GPU MAX_FREQ 420750000", f"GPU MAX_FREQ {limits[1]}"))
    device = open_sysfs(tree)
    preset = device.presets["15W"]
    assert (preset.cpu_khz, preset.gpu_hz) == stands_at
    # The board in this mode is recognised.
    for core in range(preset.cores, board.cores):
        tree.write(f"{CPU}/cpu{core}/online", "0")
    for folder, name, value in (
        *((tree.policy(cores[0]), "scaling_max_freq", stands_at[0]) for cores in board.policies),
        (tree.gpu, "max_freq", stands_at[1]),
    ):
        tree.put(f"{folder}/{name}", value)
    assert device.current_mode()[:3] == preset[:3]


def gated(tree, mask):
    tree.put("/etc/nvpmodel.conf", conf_text(tree))
    tree.put("/sys/devices/platform/gpu.0/tpc_pg_mask", mask)
    return open_sysfs(tree)


def test_a_mode_with_other_parts_of_the_gpu_is_known_to_need_a_reboot(tmp_path, agent):
    tree = FakedJetson(tmp_path / "root", AGX_ORIN_JP6)
    device = gated(tree, 240)
    assert device.basis == "VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0; 4 of 8 TPCs on"
    assert device.need_reboot == {
        "MAXN": "its GPU has 8 of 8 TPCs on, but this board has booted with 4 of 8 TPCs on",
        "15W": "its GPU has 8 of 8 TPCs on, but this board has booted with 4 of 8 TPCs on",
        "10W": "its GPU has 2 of 8 TPCs on, but this board has booted with 4 of 8 TPCs on",
    }
    assert "4 of 8 TPCs on" in findings(tree)["GPU"].found
    assert "and reboot" in findings(tree)["presets"].advice
    spec, before = f"sysfs:{tree.location('/')}", tree.everything()
    refused = agent("apply", "MAXN", "--device", spec)
    assert refused.code != 0 and "MAXN needs a reboot, so it was not applied" in " ".join(refused.err.split())
    assert tree.everything() == before
    shown = agent("status", "--device", spec, "--state-dir", tmp_path / "state", "--json").content["device"]
    assert shown["presets"] == [] and shown["basis"] == device.basis, "its clocks alone are not MAXN"
    assert "MAXN needs a reboot" in " ".join(agent("modes", "--device", spec).out.split())
    tree.put("/sys/devices/platform/gpu.0/tpc_pg_mask", 0)
    assert list(open_sysfs(tree).need_reboot) == ["10W"]


def test_a_super_board_below_its_own_clocks_says_so(tmp_path):
    tree = FakedJetson(tmp_path, ORIN_NANO)
    tree.put("/etc/nvpmodel.conf", conf_text(tree).replace("NAME=MAXN", "NAME=MAXN_SUPER"))
    tree.put("/var/lib/nvpmodel/status", "pmode:0000")
    presets = findings(tree)["presets"]
    assert presets.level == "limited" and "below its own clocks: GPU 624.75 of 1020 MHz" in presets.found
    as_shipped = FakedJetson(tmp_path / "super", ORIN_NANO_SUPER)
    as_shipped.put("/etc/nvpmodel.conf", tree.read("/etc/nvpmodel.conf"))
    as_shipped.put("/var/lib/nvpmodel/status", "pmode:0000")
    assert findings(as_shipped)["presets"].level == "ok"
    as_shipped.put(f"{as_shipped.gpu}/max_freq", 612_000_000)
    assert "GPU 612 of 1020 MHz" in findings(as_shipped)["presets"].found


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("NVPM ERROR: power mode is not set!\n", "its power mode is not set; run `sudo nvpmodel -m 1`"),
        ("NV Power Mode: CUSTOM\n17\n", "nvpmodel has no mode 17.*run `sudo nvpmodel -m 1`"),
    ],
)
def test_a_stale_mode_of_nvpmodel_has_a_remedy(tmp_path, answer, said):
    tree = FakedJetson(tmp_path / "root", ORIN_NANO)
    tree.put("/etc/nvpmodel.conf", conf_text(tree))
    with pytest.raises(ModeNotAppliedError, match=said):
        NvpmodelDevice(tree, VirtualClock(), lambda command, text: ProgramResult(0, answer), tmp_path / "state")


def test_nvpmodel_lowers_no_cap_that_it_could_not_raise_again(tmp_path):
    tree = FakedJetson(tmp_path / "root", AGX_ORIN_JP6)
    fixed_at(tree, 2_133_000_000)
    device = open_nvpmodel(tree, FakedNvpmodel(tree), tmp_path / "state")
    device.try_knobs()
    assert device.space.mem_hz == (2_133_000_000,)


def test_a_jetson_used_as_a_host_is_told_where_its_power_is_read(tmp_path):
    tree = FakedJetson(tmp_path, ORIN_NANO)
    tree.put(f"{CPU}/online", "0-5")
    found = {finding.topic: finding for finding in host_findings(HostDevice(tree, VirtualClock(), None))}
    assert "this is a Jetson" in found["device"].found and "--device auto" in found["power"].advice
