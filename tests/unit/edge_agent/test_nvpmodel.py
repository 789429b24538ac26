"""A Jetson whose modes are set by nvpmodel: its configuration file, and results that are read back and checked."""

from __future__ import annotations

import os
import stat

import pytest

from edge_agent.devices.device import KnobNotReachedError, ModeNotAppliedError
from edge_agent.devices.jetson.nvpmodel_conf import NvpmodelConfError, parse_conf
from edge_agent.devices.sysfs import RebootNeededError
from tests.fakes.faked_jetson import (
    AGX_ORIN_JP5,
    AGX_ORIN_JP6,
    CAP_4_5,
    CONF_IN_FORCE,
    LOCK,
    THOR_T5000,
    XAVIER_AGX,
    FakedJetson,
    FakedNvpmodel,
    open_nvpmodel,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode

# --- The configuration of nvpmodel ------------------------------------------------------------------------------------


CONF = """\
# NVIDIA's, shortened

< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_0 /sys/devices/system/cpu/cpu0/online
CORE_1 /sys/devices/system/cpu/cpu1/online

< PARAM TYPE=FILE NAME=GPU_POWER_CONTROL_DISABLE >
GPU_PWR_CNTL_DIS /sys/devices/gpu.0/power/control

< PARAM TYPE=CLOCK NAME=EMC >
MAX_FREQ /sys/kernel/nvpmodel_emc_cap/emc_iso_cap

< POWER_MODEL ID=3 NAME=10W >
CPU_ONLINE CORE_0 1
CPU_ONLINE CORE_1 0
EMC MAX_FREQ 1065600000

< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_0 1   # always
CPU_ONLINE CORE_1 1
GPU_POWER_CONTROL_DISABLE GPU_PWR_CNTL_DIS auto
EMC MAX_FREQ -1

< FAN_CONFIG DEFAULT=quiet >
< PM_CONFIG DEFAULT=3 >
"""


def test_modes_come_in_the_order_of_their_numbers_with_all_they_set():
    conf = parse_conf(CONF, "nvpmodel.conf")
    assert [(mode.mode_id, mode.name) for mode in conf.modes] == [(0, "MAXN"), (3, "10W")]
    assert conf.default == 3
    assert conf.paths["EMC", "MAX_FREQ"] == "/sys/kernel/nvpmodel_emc_cap/emc_iso_cap"
    assert list(conf.mode_of_name("MAXN").settings.items()) == [
        (("CPU_ONLINE", "CORE_0"), "1"),
        (("CPU_ONLINE", "CORE_1"), "1"),
        (("GPU_POWER_CONTROL_DISABLE", "GPU_PWR_CNTL_DIS"), "auto"),
        (("EMC", "MAX_FREQ"), "-1"),
    ]


def test_a_mode_more_leaves_no_gap_between_the_numbers_and_keeps_the_others():
    conf = parse_conf(CONF, "nvpmodel.conf")
    more = conf.with_mode("OURS", {("EMC", "MAX_FREQ"): "204000000"})
    assert [(mode.mode_id, mode.name) for mode in more.modes] == [(0, "MAXN"), (1, "10W"), (2, "OURS")]
    assert more.mode_of_id(more.default).name == "10W"
    assert more.mode_of_name("10W").settings == conf.mode_of_name("10W").settings


def test_what_is_written_is_what_was_meant():
    conf = parse_conf(CONF, "nvpmodel.conf").with_mode("OURS", {("CPU_ONLINE", "CORE_1"): "0"})
    assert parse_conf(conf.text(), "copy") == conf


def test_stanzas_begin_in_the_first_column_and_use_spaces():
    text = parse_conf(CONF, "nvpmodel.conf").text()
    assert "\n< POWER_MODEL ID=3 NAME=10W >\n" in text
    assert text.endswith("< PM_CONFIG DEFAULT=3 >\n")


def test_a_mode_that_is_not_there_is_answered_with_those_that_are():
    conf = parse_conf(CONF, "nvpmodel.conf")
    with pytest.raises(InvalidInputError, match=r"no mode '15W'; choose one of MAXN \(0\), 10W \(3\)"):
        conf.mode_of_name("15W")
    with pytest.raises(InvalidInputError, match="no mode 1;"):
        conf.mode_of_id(1)


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("< POWER_MODEL ID=0 NAME=MAXN >", "< POWER_MODEL ID=0 NAME=MAXN", 18, "is not a stanza"),
        ("< POWER_MODEL ID=0 NAME=MAXN >", "< POWER_MODEL NAME=MAXN >", 18, "lacks ID="),
        ("< POWER_MODEL ID=0 NAME=MAXN >", "< POWER_MODEL ID=0 >", 18, "lacks NAME="),
        ("< POWER_MODEL ID=0 NAME=MAXN >", "< POWER_MODEL ID=3 NAME=MAXN >", 18, "repeats the ID 3"),
        ("< POWER_MODEL ID=0 NAME=MAXN >", "< POWER_MODEL ID=x NAME=MAXN >", 18, "has 'x' instead of a number"),
        ("EMC MAX_FREQ 1065600000", "EMC MAX_FREQ fast", 16, "has 'fast' instead of a number"),
        ("EMC MAX_FREQ 1065600000", f"EMC MAX_FREQ {'9' * 4_301}", 16, "has a number of 4,301 characters"),
        ("EMC MAX_FREQ 1065600000", "EMC MAX_FREQ", 16, "is not a parameter, an argument and a value"),
        ("EMC MAX_FREQ 1065600000", "EMC MIN_FREQ 1", 16, "sets EMC MIN_FREQ, which no earlier PARAM defines"),
        ("NAME=EMC", "NAME=CPU_ONLINE", 10, "repeats the parameter CPU_ONLINE"),
        ("TYPE=CLOCK", "TYPE=WATCH", 10, "has the TYPE WATCH; use one of FILE, CLOCK"),
        ("MAX_FREQ /sys/kernel/nvpmodel_emc_cap/emc_iso_cap", "MAX_FREQ", 11, "is not an argument and a path"),
        ("# NVIDIA's, shortened", "CORE_0 /sys", 1, "is outside any stanza"),
        ("< FAN_CONFIG DEFAULT=quiet >", "< SECRETS A=b >", 24, "begins an unknown stanza SECRETS"),
    ],
)
def test_a_line_that_cannot_be_understood_is_named(old, new, line, what):
    with pytest.raises(NvpmodelConfError) as refused:
        parse_conf(CONF.replace(old, new), "/etc/nvpmodel.conf")
    assert str(refused.value).startswith(f"/etc/nvpmodel.conf, line {line}: {what}")


@pytest.mark.parametrize(
    ("text", "what"),
    [("", "has no POWER_MODEL"), (CONF.replace("< PM_CONFIG DEFAULT=3 >", ""), "has no PM_CONFIG")],
)
def test_a_configuration_that_nvpmodel_would_refuse_is_refused(text, what):
    with pytest.raises(NvpmodelConfError, match=what):
        parse_conf(text, "nvpmodel.conf")


# --- A device of nvpmodel ---------------------------------------------------------------------------------------------
# A Jetson whose modes are set by nvpmodel, with every result read back and checked.

QUIET = PowerMode(3, 1_113_600, 510_000_000, 665_600_000)


class Bench:
    def __init__(self, folder, board):
        self.tree = FakedJetson(folder / "root", board)
        self.nvpmodel = FakedNvpmodel(self.tree)
        self.state = folder / "state"
        self.system_conf = self.tree.read("/etc/nvpmodel.conf")

    def open(self):
        return open_nvpmodel(self.tree, self.nvpmodel, self.state)

    @property
    def custom_conf(self):
        return parse_conf((self.state / "nvpmodel.conf").read_text(), "custom")


@pytest.fixture(params=[AGX_ORIN_JP5, AGX_ORIN_JP6], ids=lambda board: board.name)
def bench(request, tmp_path):
    return Bench(tmp_path, request.param)


def test_presets_are_listed_by_name_within_the_boards_table(bench):
    device = bench.open()
    assert device.presets == {
        "MAXN": device.space.highest,
        "15W": PowerMode(6, 1_113_600, 408_000_000, 204_000_000),
        "10W": PowerMode(3, 1_113_600, 408_000_000, 204_000_000),
    }


def test_a_preset_is_put_in_force_by_its_name(bench):
    device = bench.open()
    assert device.apply_preset("15W") == device.current_mode() == device.presets["15W"]
    assert bench.nvpmodel.mode_id == 1
    assert device.apply_preset("MAXN") == device.space.highest


def test_an_unknown_preset_is_answered_with_the_known(bench):
    with pytest.raises(InvalidInputError, match=r"MAXN \(0\), 15W \(1\), 10W \(3\)"):
        bench.open().apply_preset("7W")


def test_any_mode_is_added_to_a_copy_and_the_systems_configuration_stays(bench):
    device = bench.open()
    device.apply(QUIET)
    assert device.current_mode() == QUIET
    assert bench.tree.read("/etc/nvpmodel.conf") == bench.system_conf
    assert [mode.mode_id for mode in bench.custom_conf.modes] == [0, 1, 2, 3]
    device.apply(QUIET._replace(cores=12))
    assert len(bench.custom_conf.modes) == 4


def test_other_users_may_not_enter_the_state_folder(bench):
    before = os.umask(0o022)
    try:
        bench.open().apply(QUIET)
    finally:
        os.umask(before)
    assert stat.S_IMODE(bench.state.stat().st_mode) == 0o750


def test_a_mode_keeps_the_gating_of_the_gpu_so_that_no_reboot_is_asked_for(bench):
    bench.nvpmodel.mask, bench.nvpmodel.mode_id = "252", 3
    device = bench.open()
    device.apply(QUIET)
    assert bench.custom_conf.modes[-1].settings["TPC_POWER_GATING", "TPC_PG_MASK"] == "252"
    assert bench.nvpmodel.answers == []


def test_a_preset_that_needs_a_reboot_is_declined_and_changes_nothing(bench):
    device = bench.open()
    before = device.knobs()
    with pytest.raises(RebootNeededError, match="mode 3 of /etc/nvpmodel.conf needs a reboot, so it was not applied"):
        device.apply_preset("10W")
    assert bench.nvpmodel.answers == ["no\n"] and not bench.nvpmodel.rebooted
    assert device.knobs() == before


@pytest.mark.parametrize(
    ("mood", "what"),
    [
        ("chroot", "refuses to run in a chroot and changed nothing; run the agent on the host"),
        ("fails", "NVPM ERROR: failed to set power mode!"),
        ("missing", "No such file or directory"),
        ("ignores", r"nvpmodel set the mode .*, but: .*policy0/scaling_min_freq: wanted 1113600, found 115200"),
    ],
)
def test_a_mode_that_nvpmodel_does_not_set_is_an_error(bench, mood, what):
    device = bench.open()
    bench.nvpmodel.mood = mood
    with pytest.raises(ModeNotAppliedError, match=what):
        device.apply(QUIET)


def test_a_further_mode_that_nvpmodel_does_not_set_blames_no_knob(bench):
    device = bench.open()
    device.apply(QUIET)
    bench.nvpmodel.mood = "fails"
    with pytest.raises(ModeNotAppliedError, match="NVPM ERROR: failed to set power mode!; .*wanted") as refused:
        device.apply(QUIET._replace(cores=2, cpu_khz=bench.tree.board.cpu_khz[-1]))
    assert not isinstance(refused.value, KnobNotReachedError)


def test_a_preset_of_thor_lets_the_memory_slow_down(tmp_path):
    bench = Bench(tmp_path, THOR_T5000)
    bench.open().apply_preset("15W")
    node = "/sys/class/devfreq/bwmgr"
    assert [bench.tree.read(f"{node}/{end}_freq") for end in ("min", "max")] == ["665600000", "4266000000"]


def test_a_preset_that_is_silently_ignored_is_an_error(bench):
    device = bench.open()
    bench.nvpmodel.mood = "ignores"
    with pytest.raises(ModeNotAppliedError, match="nvpmodel did not set 15W: it reports mode 0"):
        device.apply_preset("15W")


def test_a_memory_lock_that_overrides_nvpmodels_cap_is_found(bench):
    bench.tree.write(f"{LOCK}/mrq_rate_locked", "1")
    device = bench.open()
    with pytest.raises(ModeNotAppliedError, match="wanted 665600000, found 3199000000"):
        device.apply(QUIET)


def test_the_systems_mode_and_configuration_are_restored(bench):
    device = bench.open()
    device.apply_preset("15W")
    before, kept = bench.tree.everything(), device.knobs()
    device.apply(QUIET)
    assert bench.tree.read(CONF_IN_FORCE) == str(bench.state / "nvpmodel.conf")
    bench.open().restore(kept)
    assert bench.tree.read(CONF_IN_FORCE) == "/etc/nvpmodel.conf"
    assert bench.nvpmodel.mode_id == 1
    assert bench.tree.everything() == before


def test_knobs_are_restored_even_where_nvpmodel_fails_and_both_are_told(bench):
    device = bench.open()
    before, kept = bench.tree.everything(), device.knobs()
    device.apply(QUIET)
    bench.nvpmodel.mood = "fails"
    with pytest.raises(ModeNotAppliedError, match="NVPM ERROR"):
        device.restore(kept)
    assert bench.tree.everything() == before


def test_the_memory_maximum_is_uncapped_on_jetpack_5(tmp_path):
    bench = Bench(tmp_path, XAVIER_AGX)
    device = bench.open()
    device.apply(device.space.lowest)
    assert bench.tree.read(CAP_4_5) == "204000000"
    device.apply(device.space.highest)
    assert bench.tree.read(CAP_4_5) == "0"


def test_a_copy_that_cannot_be_written_leaves_the_board_alone(bench):
    device = bench.open()
    before = device.knobs()
    bench.state.write_text("a file where a folder belongs")
    with pytest.raises(ModeNotAppliedError, match=r"state/nvpmodel.conf: cannot be written"):
        device.apply(QUIET)
    assert device.knobs() == before


def test_without_nvpmodel_it_cannot_be_opened(bench):
    bench.nvpmodel.mood = "missing"
    with pytest.raises(ModeNotAppliedError, match="does not report the current mode: No such file"):
        bench.open()


def test_without_its_configuration_it_cannot_be_opened(bench):
    bench.tree.location("/etc/nvpmodel.conf").unlink()
    with pytest.raises(
        InvalidInputError, match=r"/etc/nvpmodel.conf: cannot be read: .*check that nvpmodel is installed"
    ):
        bench.open()
