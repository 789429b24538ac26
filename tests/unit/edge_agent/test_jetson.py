"""A Jetson that is read and set through sysfs or jtop while its kernel, sensors or owner interfere."""

from __future__ import annotations

import errno
import json
import sys
import types
from dataclasses import replace

import numpy as np
import pytest

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.jtop import JtopDevice, JtopUnavailableError, open_jtop
from edge_agent.devices.virtual.simulated import SimulatedDevice
from tests.fakes.faked_jetson import (
    AGX_ORIN_JP5,
    AGX_ORIN_JP6,
    BPMP,
    CAP_4_5,
    CAP_6,
    CPU,
    FAKED_BOARDS,
    LOCK,
    NANO,
    ORIN_NANO,
    XAVIER_AGX,
    FakedJetson,
    open_sysfs,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import array_to_modes

# --- A device of sysfs ------------------------------------------------------------------------------------------------
# Reading and setting a Jetson whose kernel, sensors or owner interfere.


BOARDS = pytest.mark.parametrize("board", FAKED_BOARDS, ids=lambda board: board.name)
# How kernels show a CPU policy whose cores are all offline.
OFFLINE_POLICIES = pytest.mark.parametrize(
    "offline_policy", [None, errno.EINVAL, errno.EBUSY], ids=["vanishes", "EINVAL", "EBUSY"]
)


@pytest.fixture
def orin(tmp_path):
    return FakedJetson(tmp_path, AGX_ORIN_JP5)


@BOARDS
def test_no_write_order_ever_crosses_the_limits(tmp_path, board):
    # Old kernels would refuse crossed limits, and newer ones would clip them. All directions between modes are tried.
    tree = FakedJetson(tmp_path, board)
    device = open_sysfs(tree)
    cpu, gpu = board.cpu_khz, board.gpu_hz
    top = device.space.highest
    for khz, hz in ((cpu[0], gpu[0]), (cpu[5], gpu[-1]), (cpu[2], gpu[3]), (cpu[-1], gpu[1]), (cpu[5], gpu[4])):
        device.apply(top._replace(cpu_khz=khz, gpu_hz=hz))
        held = [tree.read(f"{tree.policy(0)}/scaling_{limit}_freq") for limit in ("min", "max")]
        assert held == [str(khz)] * 2


@BOARDS
def test_a_mode_holds_both_limits_of_every_clock_and_the_first_cores(tmp_path, board):
    tree = FakedJetson(tmp_path, board)
    device = open_sysfs(tree)
    mode = device.space.highest._replace(cores=board.cores - 1, gpu_hz=board.gpu_hz[2], mem_hz=board.emc_hz[0])
    device.apply(mode)
    assert tree.read(f"{CPU}/cpu{board.cores - 1}/online") == "0"
    assert all(tree.read(f"{CPU}/cpu{core}/online") == "1" for core in range(1, board.cores - 1))
    assert tree.read(f"{tree.gpu}/min_freq") == tree.read(f"{tree.gpu}/max_freq") == str(mode.gpu_hz)
    if board.has_bpmp:
        assert tree.read(f"{LOCK}/mrq_rate_locked") == "1"
        assert tree.read(f"{LOCK}/rate") == str(mode.mem_hz)


def test_cores_come_online_before_their_policy_is_set(orin):
    device = open_sysfs(orin)
    device.apply(device.space.lowest)
    orin.written.clear()
    device.apply(device.space.highest._replace(cpu_khz=1_113_600))
    paths = [path for path, _ in orin.written]
    for core, policy in ((4, 4), (8, 8)):
        online = paths.index(f"{CPU}/cpu{core}/online")
        assert online < paths.index(f"{orin.policy(policy)}/scaling_max_freq")


@BOARDS
def test_core_0_is_never_touched(tmp_path, board):
    tree = FakedJetson(tmp_path, board)
    tree.put(f"{CPU}/cpu0/online", 1)
    device = open_sysfs(tree)
    device.apply(device.space.lowest)
    device.restore(device.knobs())
    with pytest.raises(InvalidInputError, match="has no cpu/0/online to restore"):
        device.restore({**device.knobs(), "cpu/0/online": "0"})
    assert f"{CPU}/cpu0/online" not in [path for path, _ in tree.written]
    assert device.current_mode().cores == 1


def test_on_jetpack_5_the_memory_maximum_is_no_cap_at_all(orin):
    device = open_sysfs(orin)
    orin.write(CAP_4_5, "204000000")
    device.apply(device.space.highest)
    assert orin.read(CAP_4_5) == "0"


def test_on_jetpack_6_the_memory_maximum_is_a_number(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP6)
    device = open_sysfs(tree)
    tree.write(CAP_6, "204000000")
    device.apply(device.space.highest)
    assert tree.read(CAP_6) == "3199000000"


def test_without_debugfs_the_cap_sets_the_memory_from_the_built_in_table(orin):
    for name in ("mrq_rate_locked", "rate", "max_rate", "state"):
        orin.location(f"{LOCK}/{name}").unlink()
    orin.location(f"{BPMP}/emc/possible_rates").unlink()
    device = open_sysfs(orin)
    assert not device.memory.table_is_live
    assert device.space.mem_hz == AGX_ORIN_JP5.emc_hz
    device.apply(device.space.lowest)
    assert device.current_mode() == device.space.lowest


def test_a_memory_that_cannot_be_set_has_one_frequency(tmp_path):
    tree = FakedJetson(tmp_path, NANO)
    tree.location(CAP_4_5).unlink()
    device = open_sysfs(tree)
    assert device.space.mem_hz == (1_600_000_000,)
    device.apply(device.space.lowest)


def test_memory_frequencies_beyond_what_the_board_reaches_are_not_offered(tmp_path):
    tree = FakedJetson(tmp_path, ORIN_NANO)
    tree.put(f"{BPMP}/emc/possible_rates", "204000 665600 2133000 3199000 ")
    assert open_sysfs(tree).space.mem_hz == ORIN_NANO.emc_hz


def test_a_memory_frequency_that_was_rounded_up_is_no_applied_mode(orin):
    device = open_sysfs(orin)
    # This board's kernel lacks the frequency that was listed before.
    orin.board = replace(AGX_ORIN_JP5, emc_hz=AGX_ORIN_JP5.emc_hz[:3])
    with pytest.raises(ModeNotAppliedError, match=rf"{LOCK}/rate: wanted 3199000000, found 2133000000"):
        device.apply(device.space.lowest)
        device.apply(device.space.highest)


@pytest.mark.parametrize(
    "knob",
    [
        f"{CPU}/cpu5/online",
        f"{CPU}/cpufreq/policy4/scaling_max_freq",
        f"{CPU}/cpufreq/policy0/scaling_min_freq",
        "/sys/class/devfreq/17000000.ga10b/max_freq",
        f"{LOCK}/rate",
        f"{LOCK}/mrq_rate_locked",
    ],
)
def test_a_knob_that_silently_does_not_apply_is_named(orin, knob):
    device = open_sysfs(orin)
    orin.deaf.add(knob)
    before = orin.read(knob)
    mode = device.space.lowest._replace(cores=5, cpu_khz=729_600, gpu_hz=408_000_000)
    with pytest.raises(ModeNotAppliedError) as failed:
        device.apply(mode)
    assert f"{knob}: wanted " in str(failed.value) and f"found {before}" in str(failed.value)


def test_a_cap_that_does_not_rise_is_named(orin):
    orin.put(CAP_4_5, 204_000_000)
    orin.deaf.add(CAP_4_5)
    device = open_sysfs(orin)
    with pytest.raises(ModeNotAppliedError, match=f"{CAP_4_5}: wanted 0, found 204000000"):
        device.apply(device.space.highest)


def test_a_change_upward_that_does_not_take_is_an_error_not_a_mode(orin):
    # Users report that AGX Orins, after some time, accept only lower frequencies until a reboot.
    device = open_sysfs(orin)
    device.apply(device.space.lowest)
    orin.deaf.add(f"{orin.gpu}/max_freq")
    with pytest.raises(ModeNotAppliedError, match="max_freq: wanted 1300500000, found 306000000"):
        device.apply(device.space.highest)


def test_a_limit_between_two_frequencies_lets_the_lower_one_be_in_force(orin):
    # NVIDIA's 15W preset leaves an AGX Orin like this if its frequency table begins at 306 MHz.
    orin.put(f"{orin.gpu}/max_freq", 420_750_000)
    orin.put(CAP_4_5, 2_750_000_000)
    device = open_sysfs(orin)
    kept = device.knobs()
    assert device.current_mode() == device.space.highest._replace(gpu_hz=408_000_000, mem_hz=2_133_000_000)
    device.apply(device.current_mode())
    device.restore(kept)
    assert orin.read(f"{orin.gpu}/max_freq") == "420750000"


def test_without_permission_it_says_to_run_as_root(orin):
    device = open_sysfs(orin)
    orin.unwritable[f"{CPU}/cpu11/online"] = errno.EACCES
    with pytest.raises(ModeNotAppliedError, match=r"cpu11/online: no permission to write 0; run the agent as root"):
        device.apply(device.space.lowest)


def test_a_refused_value_is_named_with_the_reason(orin):
    device = open_sysfs(orin)
    orin.unwritable[f"{LOCK}/rate"] = errno.EINVAL
    with pytest.raises(ModeNotAppliedError, match=rf"{LOCK}/rate: wanted 204000000, .*Invalid argument"):
        device.apply(device.space.lowest)


def test_a_knob_that_cannot_be_read_back_is_not_applied(orin):
    device = open_sysfs(orin)
    orin.unreadable[f"{LOCK}/rate"] = errno.EIO
    with pytest.raises(
        ModeNotAppliedError, match=rf"{LOCK}/rate: cannot be read: Input/output error, wanted 204000000"
    ):
        device.apply(device.space.lowest)


@BOARDS
@OFFLINE_POLICIES
def test_everything_is_as_it_was_after_a_profile(tmp_path, board, offline_policy):
    tree = FakedJetson(tmp_path, board, offline_policy)
    for policy in board.policies:
        tree.write(f"{tree.policy(policy[0])}/scaling_max_freq", str(board.cpu_khz[3]))
    device = open_sysfs(tree)
    before, kept = tree.everything(), device.knobs()
    for mode in (device.space.lowest, device.space.highest, device.space.lowest):
        with device.measuring():
            device.apply(mode)
        assert device.current_mode() == mode
    device.restore(kept)
    assert tree.everything() == before


@BOARDS
@OFFLINE_POLICIES
def test_an_offline_policy_is_set_only_if_its_limits_cannot_be_read(tmp_path, board, offline_policy):
    tree = FakedJetson(tmp_path, board, offline_policy)
    tree.write(f"{tree.policy(0)}/scaling_max_freq", str(board.cpu_khz[2]))
    for core in range(1, board.cores):
        tree.write(f"{CPU}/cpu{core}/online", "0")
    device = open_sysfs(tree)
    before, kept = tree.everything(), device.knobs()
    assert device.current_mode() == device.space.highest._replace(cores=1, cpu_khz=board.cpu_khz[2])
    telling = [0] if offline_policy != errno.EINVAL else [cores[0] for cores in board.policies]
    assert {name for name in kept if name.startswith("policy/")} == {
        f"policy/{policy}/{limit}_khz" for policy in telling for limit in ("min", "max")
    }
    device.apply(device.space.lowest)
    device.restore(kept)
    assert tree.everything() == before
    clocks = {path for path, _ in tree.written if "/cpufreq/" in path}
    set_policies = [cores[0] for cores in board.policies] if offline_policy == errno.EBUSY else [0]
    assert clocks == {
        f"{tree.policy(policy)}/scaling_{limit}_freq" for policy in set_policies for limit in ("min", "max")
    }


def test_a_policy_that_does_not_say_which_cores_it_drives_is_taken_for_active(orin):
    for core in (0, 4, 8):
        orin.location(f"{orin.policy(core)}/affected_cpus").unlink()
    assert "policy/8/max_khz" in open_sysfs(orin).knobs()


@OFFLINE_POLICIES
def test_cores_that_were_offline_go_back_there_with_their_clocks_free(tmp_path, offline_policy):
    orin = FakedJetson(tmp_path, AGX_ORIN_JP5, offline_policy)
    for core in range(4, 12):
        orin.write(f"{CPU}/cpu{core}/online", "0")
    device = open_sysfs(orin)
    kept = device.knobs()
    device.apply(device.space.highest._replace(cpu_khz=115_200))
    orin.written.clear()
    device.restore(kept)
    assert device.current_mode().cores == 4
    wrote = {path: value for path, value in orin.written}
    assert wrote[f"{orin.policy(8)}/scaling_max_freq"] == "2201600"


@OFFLINE_POLICIES
@pytest.mark.parametrize("cores_at_last", [4, 12])
def test_cores_that_come_online_later_carry_none_of_our_limits(tmp_path, offline_policy, cores_at_last):
    orin = FakedJetson(tmp_path, AGX_ORIN_JP5, offline_policy)
    orin.write(f"{orin.policy(8)}/scaling_max_freq", "1113600")
    for core in range(4, 12):
        orin.write(f"{CPU}/cpu{core}/online", "0")
    device = open_sysfs(orin)
    kept = device.knobs()
    device.apply(device.space.lowest._replace(cores=12))
    device.apply(device.space.lowest._replace(cores=cores_at_last))
    device.restore(kept)
    assert len(device.cpu.online()) == 4
    orin.write(f"{CPU}/cpu4/online", "1")
    orin.write(f"{CPU}/cpu8/online", "1")
    # If the kernel hides the limits of an offline policy, the values that the owner had set are unknown.
    theirs = "1113600" if offline_policy == errno.EINVAL else "2201600"
    assert [orin.read(f"{orin.policy(core)}/scaling_max_freq") for core in (4, 8)] == ["2201600", theirs]
    assert [orin.read(f"{orin.policy(core)}/scaling_min_freq") for core in (4, 8)] == ["115200", "115200"]


def test_a_policy_that_cannot_be_set_is_named_and_its_core_goes_offline_again(orin):
    for core in range(4, 12):
        orin.write(f"{CPU}/cpu{core}/online", "0")
    device = open_sysfs(orin)
    kept = device.knobs()
    device.apply(device.space.lowest._replace(cores=12))
    device.apply(device.space.lowest._replace(cores=4))
    orin.unwritable[f"{orin.policy(8)}/scaling_max_freq"] = errno.EIO
    with pytest.raises(ModeNotAppliedError, match="not restored: .*policy8/scaling_max_freq: wanted 2201600"):
        device.restore(kept)
    assert len(device.cpu.online()) == 4


def test_a_locked_memory_is_locked_again(orin):
    orin.write(f"{LOCK}/mrq_rate_locked", "1")
    orin.write(f"{LOCK}/rate", "2133000000")
    device = open_sysfs(orin)
    assert device.current_mode().mem_hz == 2_133_000_000
    kept = device.knobs()
    device.apply(device.space.lowest)
    device.restore(kept)
    assert (orin.read(f"{LOCK}/mrq_rate_locked"), orin.read(f"{LOCK}/rate")) == ("1", "2133000000")


@pytest.mark.parametrize("knob", [f"{CPU}/cpu5/online", f"{CPU}/cpufreq/policy0/scaling_max_freq", CAP_4_5])
def test_one_knob_that_fails_leaves_only_itself_unrestored(orin, knob):
    device = open_sysfs(orin)
    before, kept = orin.everything(), device.knobs()
    device.apply(device.space.lowest)
    orin.unwritable[knob] = errno.EIO
    with pytest.raises(ModeNotAppliedError, match=f"not restored: {knob}"):
        device.restore(kept)
    after = orin.everything()
    folder = knob.rpartition("/")[0]
    assert {path for path in before if after[path] != before[path]} <= {knob, f"{folder}/scaling_min_freq"}


def test_restoring_goes_on_past_a_group_that_fails_and_names_it(orin):
    device = open_sysfs(orin)
    before, kept = orin.everything(), device.knobs()
    device.apply(device.space.lowest)
    orin.unwritable[f"{orin.gpu}/max_freq"] = errno.EIO
    with pytest.raises(ModeNotAppliedError, match="not restored: .*max_freq"):
        device.restore(kept)
    stuck = {f"{orin.gpu}/max_freq", f"{orin.gpu}/min_freq"}
    after = orin.everything()
    assert {path: after[path] for path in after if path not in stuck} == {
        path: before[path] for path in before if path not in stuck
    }


def test_knobs_are_found_again_after_a_start_that_renumbered_them(tmp_path):
    tree = FakedJetson(tmp_path, XAVIER_AGX)
    kept = open_sysfs(tree).knobs()
    tree.renumber_hwmon()
    device = open_sysfs(tree)
    device.restore(kept)
    assert device.start_meter().stop().power_mw[0] == XAVIER_AGX.power_mw


def test_what_is_no_jetson_is_refused(tmp_path):
    tree = FakedJetson(tmp_path, NANO)
    tree.put("/proc/device-tree/compatible", "raspberrypi,4-model-b\0brcm,bcm2711\0")
    with pytest.raises(InvalidInputError, match="not a Jetson"):
        open_sysfs(tree)


def test_an_unknown_jetson_is_named(tmp_path):
    tree = FakedJetson(tmp_path, NANO)
    tree.put("/proc/device-tree/compatible", "nvidia,p2771-0000\0nvidia,tegra186\0")
    with pytest.raises(
        InvalidInputError, match=r"unknown board nvidia,p2771-0000, nvidia,tegra186; supported are agx-orin"
    ):
        open_sysfs(tree)


def test_a_jetson_that_does_not_say_its_release_still_works(orin):
    orin.location("/etc/nv_tegra_release").unlink()
    device = open_sysfs(orin)
    assert (device.identity.l4t, device.identity.jetpack) == (None, None)


@pytest.mark.parametrize("listed", ["", "none\n"])
def test_a_kernel_that_lists_no_frequencies_is_named(orin, listed):
    orin.put(f"{orin.gpu}/available_frequencies", listed)
    with pytest.raises(InvalidInputError, match="ga10b/available_frequencies: lists no values"):
        open_sysfs(orin)


def test_without_a_gpu_node_it_asks_for_the_driver(orin):
    orin.location(f"{orin.gpu}/device/of_node/name").unlink()
    with pytest.raises(InvalidInputError, match="no GPU among its nodes"):
        open_sysfs(orin)


# --- A device of jtop -------------------------------------------------------------------------------------------------
# A board read through a fake jtop, as in jetson-stats 4.3 and 7.x.

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
        self.fails = None
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
        if self.fails:
            raise self.fails
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


def test_a_service_that_fails_before_its_first_sample_is_named_and_closed(board, library):
    library.fails = EOFError("the connection was lost")
    with pytest.raises(JtopUnavailableError, match="connection was lost.*systemctl start jtop"):
        open_jtop(board)
    assert not library.running
