"""`wattfleet agent modes`, `apply` and `restore`, and the backup from which a device is always restored."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.paths import BACKUP_FILE
from edge_agent.training.mode_change import LOCK_FILE, DeviceBusyError, KnobBackup, KnobBackupError, backed_up
from tests.fakes.faked_jetson import (
    AGX_ORIN_JP5,
    CPU,
    ORIN_NANO,
    XAVIER_AGX,
    FakedJetson,
    FakedNvpmodel,
    open_nvpmodel,
    open_sysfs,
)
from tests.fakes.short_forms import first
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode

# --- `modes`, `apply` and `restore` -----------------------------------------------------------------------------------
# `wattfleet agent modes`, `apply` and `restore`: the modes listed, the mode applied, and the way back.


MODE = "4,1036800,408000000,2133000000"


@pytest.fixture
def jetson(tmp_path, as_device):
    faked = FakedJetson(tmp_path / "root", AGX_ORIN_JP5)
    as_device(open_sysfs(faked))
    return faked


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def run(agent, state):
    return lambda command, *arguments: agent(command, *arguments, "--state-dir", state)


def kept(state):
    return state / "device" / BACKUP_FILE


def refused(ended, code, *said):
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.startswith("wattfleet: ") and ended.err.count("\n") == 1
    assert all(words in ended.err for words in said), ended.err


# --- the modes listed -----------------------------------------------------------------------------------------------


def test_modes_shows_every_value_and_the_named_modes(run, jetson):
    FakedNvpmodel(jetson)
    content = run("modes", "--json").content
    assert content["modes"] == AGX_ORIN_JP5.modes
    assert content["values"]["gpu_hz"] == list(AGX_ORIN_JP5.gpu_hz)
    assert content["presets"]["15W"] == {"cores": 6, "cpu_khz": 1113600, "gpu_hz": 408000000, "mem_hz": 204000000}
    shown = run("modes").out
    assert "15,312 modes" in shown and "6,1113600,408000000,204000000" in shown


def test_every_mode_is_listed_as_csv(run, jetson):
    lines = run("modes", "--list").out.splitlines()
    assert lines[0] == "cores,cpu_khz,gpu_hz,mem_hz"
    assert len(lines) == 1 + AGX_ORIN_JP5.modes
    assert MODE in lines


def test_a_board_without_a_configuration_has_no_named_modes(run, jetson):
    assert run("modes", "--json").content["presets"] == {}
    jetson.put("/etc/nvpmodel.conf", "< broken")
    assert run("modes", "--json").content["presets"] == {}


@pytest.mark.parametrize("kind", ["agx-orin", "orin-nano", "orin-nx", "xavier-agx"])
def test_the_named_modes_of_a_simulated_board_are_offered(run, kind):
    listed = run("modes", "--list", "--device", f"simulated:{kind}").out.splitlines()
    presets = run("modes", "--json", "--device", f"simulated:{kind}").content["presets"]
    assert presets and all(",".join(map(str, mode.values())) in listed for mode in presets.values())


# --- a mode and the way back ----------------------------------------------------------------------------------------


def test_a_mode_stays_until_it_is_restored(run, jetson, state):
    before = jetson.everything()
    applied = run("apply", MODE)
    assert applied.code == 0 and f"applied {MODE}" in applied.out
    assert open_sysfs(jetson).current_mode() == PowerMode(*map(int, MODE.split(",")))
    assert kept(state).exists()
    assert run("status", "--json").content["knob_backup"] == {"held_by": None, "restore_file": True}
    restored = run("restore")
    assert restored.code == 0 and "restored " in restored.out
    assert jetson.everything() == before and not kept(state).exists()


def test_two_modes_after_another_are_restored_to_what_was_first(run, jetson):
    before = jetson.everything()
    run("apply", MODE)
    run("apply", "12,2201600,306000000,204000000")
    assert run("restore", "--json").content["restored"] is True
    assert jetson.everything() == before


def test_restoring_what_was_never_changed_changes_nothing(run, jetson):
    jetson.written.clear()
    ended = run("restore")
    assert (ended.code, jetson.written) == (0, []) and "nothing to restore" in ended.out
    assert run("restore", "--json").content == {"restored": False}


def test_a_preset_is_applied_by_its_name(run, jetson):
    FakedNvpmodel(jetson)
    assert run("apply", "15W", "--json").content["argument"] == "6,1113600,408000000,204000000"


def test_nvpmodel_applies_a_preset_and_prints_what_a_reboot_would_do(tmp_path, run, as_device, state):
    jetson = FakedJetson(tmp_path / "root", AGX_ORIN_JP5)
    nvpmodel = FakedNvpmodel(jetson)
    as_device(open_nvpmodel(jetson, nvpmodel, state))
    assert run("apply", "15W").code == 0 and nvpmodel.mode_id == 1
    run("restore")
    before = jetson.everything()
    refused(run("apply", "10W"), 1, "needs a reboot, so it was not applied", "nothing was changed")
    assert jetson.everything() == before and not kept(state).exists() and not nvpmodel.rebooted


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("4,1036800,408000001,2133000000", "its nearest mode is 4,1036800,408000000,2133000000"),
        ("99,9999999,1,1", "its nearest mode is 12,2201600,306000000,204000000"),
        ("0,0,0,0", "its nearest mode is 1,115200,306000000,204000000"),
        ("4,1036,408,2133", "its nearest mode is 4,115200,306000000,204000000"),
        ("MAXN", "unknown mode 'MAXN'; use cores,CPU kHz,GPU Hz,memory Hz, such as 12,2201600,"),
        ("4,1036800,408000000", "unknown mode"),
        ("", "unknown mode"),
    ],
)
def test_a_mode_that_is_not_offered_changes_nothing(run, jetson, state, mode, said):
    refused(run("apply", mode), 2, said)
    assert jetson.written == [] and not state.exists()


def test_a_misspelt_preset_is_answered_with_the_names(run, jetson):
    FakedNvpmodel(jetson)
    refused(run("apply", "15w"), 2, "or one of the presets MAXN, 15W, 10W")


def test_whoever_is_not_root_changes_nothing(run, jetson, state):
    device = open_sysfs(jetson)
    groups = (device.cpu, device.gpu, device.memory, device.fan)
    jetson.unwritable |= {path: errno.EACCES for group in groups for path in group.written_files()}
    refused(run("apply", MODE), 1, "no permission to write ", "; run the agent as root; nothing was changed")
    assert not kept(state).exists()


@pytest.mark.parametrize("knob", [f"{CPU}/cpu9/online", "/sys/class/devfreq/17000000.ga10b/max_freq"])
def test_without_permission_the_device_is_as_before(run, jetson, state, knob):
    before = jetson.everything()
    jetson.unwritable[knob] = errno.EACCES
    ended = run("apply", MODE)
    refused(ended, 1, "no permission to write", "run the agent as root")
    jetson.unwritable.clear()
    run("restore")
    assert jetson.everything() == before and not kept(state).exists()


def test_a_mode_that_did_not_take_is_an_error_and_taken_back(run, jetson, state):
    before = jetson.everything()
    jetson.deaf.add(f"{jetson.gpu}/max_freq")
    refused(run("apply", MODE), 1, "max_freq: wanted 408000000, found 1300500000", "the device was restored")
    jetson.deaf.clear()
    assert jetson.everything() == before and not kept(state).exists()


def test_an_interrupted_change_is_taken_back(run, jetson, state, monkeypatch):
    before = jetson.everything()
    writes = iter([*[None] * 9, KeyboardInterrupt()])
    real = FakedJetson.write

    def write(tree, path, text):
        if (error := next(writes, None)) is not None:
            raise error
        real(tree, path, text)

    monkeypatch.setattr(FakedJetson, "write", write)
    assert run("apply", MODE).code != 0
    assert jetson.everything() == before and not kept(state).exists()


STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def sent_at_write(monkeypatch, number, *counts):
    """Send this process the signal `number` at the given writes to knobs, counted from 1; returns all writes."""
    writes, real = [], FakedJetson.write

    def write(tree, path, text):
        writes.append(path)
        if len(writes) in counts:
            os.kill(os.getpid(), number)
        real(tree, path, text)

    monkeypatch.setattr(FakedJetson, "write", write)
    return writes


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_half_way_takes_the_change_back(run, jetson, state, monkeypatch, number):
    before, handler = jetson.everything(), signal.getsignal(number)
    # The second signal comes while the first change is being undone.
    sent_at_write(monkeypatch, number, 10, 12)
    ended = run("apply", MODE)
    assert (ended.code, ended.out) == (128 + number, "") and "the device was restored" in ended.err
    assert jetson.everything() == before and not kept(state).exists()
    assert signal.getsignal(number) == handler


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_while_a_refused_mode_is_undone_does_not_stop_that(run, jetson, state, monkeypatch, number):
    before = jetson.everything()
    jetson.deaf.add(f"{jetson.gpu}/max_freq")
    real = KnobBackup.restore

    def restore(backup):
        os.kill(os.getpid(), number)
        return real(backup)

    monkeypatch.setattr(KnobBackup, "restore", restore)
    refused(run("apply", MODE), 1, "max_freq", "the device was restored")
    jetson.deaf.clear()
    assert jetson.everything() == before and not kept(state).exists()


@pytest.mark.parametrize("number", STOPS)
def test_no_signal_stops_a_restore(run, jetson, state, monkeypatch, number):
    before = jetson.everything()
    run("apply", MODE)
    sent_at_write(monkeypatch, number, 2)
    assert run("restore").code == 0
    assert jetson.everything() == before and not kept(state).exists()


def test_a_full_disk_leaves_the_device_untouched(run, jetson, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("edge_agent.training.mode_change.replace_file", full)
    refused(run("apply", MODE), 1, "No space left on device; the device was not changed")
    assert jetson.written == []


@pytest.mark.parametrize("command", [("apply", MODE), ("restore",)])
def test_a_damaged_restore_file_is_left_alone_and_explained(run, jetson, state, command):
    kept(state).parent.mkdir(parents=True)
    kept(state).write_text('{"kept": 1, "board_kind": "agx-or')
    refused(run(*command), 1, "is damaged", "sudo nvpmodel -m <ID>")
    assert jetson.written == [] and kept(state).exists()


def test_a_backup_of_another_board_is_refused(run, jetson, tmp_path, as_device, state):
    run("apply", MODE)
    as_device(open_sysfs(FakedJetson(tmp_path / "other", XAVIER_AGX)))
    refused(run("restore"), 2, "is the backup of the board agx-orin, but this is xavier-agx")
    assert kept(state).exists()


def test_a_device_in_use_is_left_to_its_agent(run, jetson, state):
    with backed_up(open_sysfs(jetson), state / "device"):
        written = list(jetson.written)
        for command in (("apply", MODE), ("restore",)):
            refused(run(*command), 1, f"in use by process {os.getpid()}", "stop that agent first")
        assert jetson.written == written


def test_a_board_that_is_not_there_keeps_no_mode(run, state):
    refused(run("apply", "15W", "--device", "simulated:orin-nano"), 2, "it exists only while a command runs")
    assert not state.exists()


def test_a_board_that_cannot_be_restored_keeps_the_file(run, jetson, state):
    run("apply", MODE)
    jetson.unwritable[f"{CPU}/cpu9/online"] = errno.EIO
    refused(run("restore"), 1, "not restored", "cpu9/online")
    assert kept(state).exists()
    jetson.unwritable.clear()
    assert run("restore").code == 0


def test_the_real_tree_of_a_container_is_set_too(agent, tmp_path):
    jetson = FakedJetson(tmp_path / "root", ORIN_NANO)
    before = jetson.everything()
    spec = f"sysfs:{tmp_path / 'root'}"
    applied = agent("apply", "6,1510400,408000000,2133000000", "--device", spec, "--state-dir", tmp_path / "one")
    assert applied.code == 0 and jetson.everything() != before
    # A board has one restore file, whoever changed the board and whichever state directories are used.
    two = ("--device", spec, "--state-dir", tmp_path / "two")
    assert agent("status", *two, "--json").content["knob_backup"]["restore_file"] is True
    assert agent("restore", *two, "--json").content["restored"] is True
    assert jetson.everything() == before


def test_a_misspelt_device_is_not_taken_for_one_that_needs_no_restoring(run):
    refused(run("restore", "--device", "sysf"), 2, "unknown device 'sysf'")


# --- Knob backup ------------------------------------------------------------------------------------------------------
# A device is restored whatever happens to the agent, and serves one agent at a time.


class Killed(BaseException):
    """Raised when the agent is killed; as a BaseException, it is not handled."""


class MortalJetson(FakedJetson):
    """A Jetson that raises Killed at every write once `writes_left` writes are done."""

    writes_left = None

    def write(self, path, text):
        if self.writes_left is not None:
            if self.writes_left == 0:
                raise Killed
            self.writes_left -= 1
        super().write(path, text)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "device"


@pytest.fixture
def faked_jetson(tmp_path):
    return MortalJetson(tmp_path / "root", ORIN_NANO)


def disk_full(descriptor, data):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def torn_after(written):
    """A write function for a disk that is full after `written` more bytes."""

    def write(descriptor, data):
        nonlocal written
        if written == 0:
            disk_full(descriptor, data)
        some = data[:written]
        written -= len(some)
        return os.write(descriptor, some)

    return write


def change(device):
    device.apply(device.space.lowest)
    with device.measuring():
        device.apply(device.space.highest._replace(cores=3))


def test_a_device_is_as_it_was_when_the_agent_ends_and_nothing_is_kept(faked_jetson, folder):
    before = faked_jetson.everything()
    with backed_up(open_sysfs(faked_jetson), folder):
        change(open_sysfs(faked_jetson))
        assert faked_jetson.everything() != before
    assert faked_jetson.everything() == before
    assert not (folder / BACKUP_FILE).exists()


def test_a_device_is_as_it_was_when_the_agent_fails(faked_jetson, folder):
    before = faked_jetson.everything()
    with pytest.raises(ZeroDivisionError), backed_up(open_sysfs(faked_jetson), folder):
        change(open_sysfs(faked_jetson))
        raise ZeroDivisionError
    assert faked_jetson.everything() == before


def test_what_is_in_force_is_on_disk_before_the_first_change(faked_jetson, folder):
    device = open_sysfs(faked_jetson)
    with backed_up(device, folder):
        assert json.loads((folder / BACKUP_FILE).read_text())["knobs"] == device.knobs()
        assert faked_jetson.written == []


@pytest.mark.parametrize("every", first(1, [3, 1]))
@pytest.mark.parametrize("board", [ORIN_NANO, XAVIER_AGX], ids=lambda board: board.name)
def test_whenever_the_agent_is_killed_the_next_start_restores_the_device(tmp_path, board, every):
    # Kill the agent at each write: of a mode change, of the fan setting, and of the restoring itself.
    folder = tmp_path / "device"
    kills = 0
    while True:
        faked_jetson = MortalJetson(tmp_path / f"root{kills}", board)
        before = faked_jetson.everything()
        device = open_sysfs(faked_jetson)
        faked_jetson.writes_left = kills
        try:
            with backed_up(device, folder):
                change(device)
        except Killed:
            kills += every
        else:
            break
        faked_jetson.writes_left = None
        # The killed process is gone, so only its files are left for the restarted agent.
        restarted = open_sysfs(faked_jetson)
        with backed_up(restarted, folder):
            assert faked_jetson.everything() == before
        assert faked_jetson.everything() == before
    assert kills > 30


def test_a_killed_restart_is_no_reason_to_keep_the_wrong_mode(faked_jetson, folder):
    before = faked_jetson.everything()
    device = open_sysfs(faked_jetson)
    for writes in (40, 3, 10):
        faked_jetson.writes_left = writes
        with pytest.raises(Killed), backed_up(device, folder):
            change(device)
            change(device)
    faked_jetson.writes_left = None
    with KnobBackup.hold(device, folder) as backup:
        assert backup.restore()
        assert not backup.restore()
    assert faked_jetson.everything() == before


def test_a_mode_that_is_to_stay_is_put_back_later_to_what_was_first(faked_jetson, folder):
    before = faked_jetson.everything()
    device = open_sysfs(faked_jetson)
    for mode in (device.space.lowest, device.space.highest._replace(cores=2)):
        with KnobBackup.hold(device, folder) as backup:
            backup.save()
            device.apply(mode)
        assert device.current_mode() == mode
    with KnobBackup.hold(device, folder) as backup:
        assert backup.restore()
    assert faked_jetson.everything() == before


def test_two_agents_on_one_device_exclude_each_other(faked_jetson, folder):
    device = open_sysfs(faked_jetson)
    with backed_up(device, folder):
        change(device)
        changed = faked_jetson.everything()
        with pytest.raises(DeviceBusyError, match=rf"device.lock: .*in use by process {os.getpid()}; stop that agent"):
            with backed_up(open_sysfs(faked_jetson), folder):
                pytest.fail("both have it")
        assert faked_jetson.everything() == changed
        assert (folder / BACKUP_FILE).exists()
    with backed_up(device, folder):
        pass


def test_an_agent_that_was_really_killed_leaves_the_lock_and_its_device_to_the_next(tmp_path, folder):
    faked_jetson = FakedJetson(tmp_path / "root", AGX_ORIN_JP5)
    before = faked_jetson.everything()
    agent = """
import sys
from pathlib import Path
from edge_agent.devices.selection import open_device
from edge_agent.training.mode_change import backed_up
device = open_device(f"sysfs:{sys.argv[1]}", seed=0)
with backed_up(device, Path(sys.argv[2])):
    device.apply(device.space.lowest)
    print("applied", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", agent, str(tmp_path / "root"), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "applied\n"
        with (
            pytest.raises(DeviceBusyError, match=f"process {process.pid};"),
            backed_up(open_sysfs(faked_jetson), folder),
        ):
            pytest.fail("both have it")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert faked_jetson.everything() != before
    with backed_up(open_sysfs(faked_jetson), folder):
        assert faked_jetson.everything() == before


@pytest.mark.parametrize("content", [b"", b'{"kept": 1, "board_kind": "orin-nano", "kno', b"[1]", b"\xff\xfe", b"null"])
def test_a_damaged_file_says_what_to_do_and_changes_nothing(faked_jetson, folder, content):
    folder.mkdir()
    (folder / BACKUP_FILE).write_bytes(content)
    with pytest.raises(KnobBackupError) as refused, backed_up(open_sysfs(faked_jetson), folder):
        pytest.fail("went on")
    assert f"{BACKUP_FILE}: is damaged" in str(refused.value) and "sudo nvpmodel -m" in str(refused.value)
    assert faked_jetson.written == []
    assert (folder / BACKUP_FILE).read_bytes() == content


def test_what_was_kept_from_another_board_is_refused(faked_jetson, folder, tmp_path):
    with KnobBackup.hold(open_sysfs(FakedJetson(tmp_path / "other", XAVIER_AGX)), folder) as backup:
        backup.save()
    with pytest.raises(InvalidInputError, match="is the backup of the board xavier-agx, but this is orin-nano"):
        with backed_up(open_sysfs(faked_jetson), folder):
            pytest.fail("went on")
    assert (folder / BACKUP_FILE).exists()


def test_what_was_kept_from_another_kind_of_device_is_refused(faked_jetson, folder):
    with KnobBackup.hold(SimulatedDevice("orin-nano", 1), folder) as backup:
        backup.save()
    with pytest.raises(InvalidInputError, match=rf"{BACKUP_FILE}: .*pass the device that this backup is from"):
        with backed_up(open_sysfs(faked_jetson), folder):
            pytest.fail("went on")
    assert faked_jetson.written == []


@pytest.mark.parametrize("room", [5, 9, 60])
def test_a_disk_without_room_for_the_backup_leaves_the_device_untouched(faked_jetson, folder, room):
    with pytest.raises(KnobBackupError, match="No space left on device; the device was not"):
        with backed_up(open_sysfs(faked_jetson), folder, torn_after(room)):
            pytest.fail("went on")
    assert faked_jetson.written == []
    assert {path.name for path in folder.iterdir()} == {LOCK_FILE}


def test_a_folder_that_cannot_be_made_leaves_the_device_untouched(faked_jetson, folder):
    folder.write_text("a file")
    with (
        pytest.raises(KnobBackupError, match=r"device.lock: cannot be opened"),
        backed_up(open_sysfs(faked_jetson), folder),
    ):
        pytest.fail("went on")
    assert faked_jetson.written == []


def test_what_cannot_be_put_back_stays_on_disk_for_the_next_start(faked_jetson, folder):
    device = open_sysfs(faked_jetson)
    before = faked_jetson.everything()
    with pytest.raises(ModeNotAppliedError, match="not restored: .*online"), backed_up(device, folder):
        change(device)
        faked_jetson.unwritable["/sys/devices/system/cpu/cpu5/online"] = errno.EIO
    faked_jetson.unwritable.clear()
    with backed_up(device, folder):
        assert faked_jetson.everything() == before
