"""A device is restored whatever happens to the agent, and serves one agent at a time."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.training.mode_change import (
    BACKUP_FILE,
    LOCK_FILE,
    DeviceBusyError,
    KnobBackup,
    KnobBackupError,
    backed_up,
)
from tests.fakes.jetson_boards import AGX_ORIN_JP5, ORIN_NANO, XAVIER_AGX
from tests.fakes.jetson_tree import FakedJetson, open_sysfs
from wattfleet.errors import InvalidInputError


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
def jetson(tmp_path):
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


def test_a_device_is_as_it_was_when_the_agent_ends_and_nothing_is_kept(jetson, folder):
    before = jetson.everything()
    with backed_up(open_sysfs(jetson), folder):
        change(open_sysfs(jetson))
        assert jetson.everything() != before
    assert jetson.everything() == before
    assert not (folder / BACKUP_FILE).exists()


def test_a_device_is_as_it_was_when_the_agent_fails(jetson, folder):
    before = jetson.everything()
    with pytest.raises(ZeroDivisionError), backed_up(open_sysfs(jetson), folder):
        change(open_sysfs(jetson))
        raise ZeroDivisionError
    assert jetson.everything() == before


def test_what_is_in_force_is_on_disk_before_the_first_change(jetson, folder):
    device = open_sysfs(jetson)
    with backed_up(device, folder):
        assert json.loads((folder / BACKUP_FILE).read_text())["knobs"] == device.knobs()
        assert jetson.written == []


@pytest.mark.parametrize("board", [ORIN_NANO, XAVIER_AGX], ids=lambda board: board.name)
def test_whenever_the_agent_is_killed_the_next_start_restores_the_device(tmp_path, board):
    # Kill the agent at each write: of a mode change, of the fan setting, and of the restoring itself.
    folder = tmp_path / "device"
    kills = 0
    while True:
        jetson = MortalJetson(tmp_path / f"root{kills}", board)
        before = jetson.everything()
        device = open_sysfs(jetson)
        jetson.writes_left = kills
        try:
            with backed_up(device, folder):
                change(device)
        except Killed:
            kills += 1
        else:
            break
        jetson.writes_left = None
        # The killed process is gone, so only its files are left for the restarted agent.
        restarted = open_sysfs(jetson)
        with backed_up(restarted, folder):
            assert jetson.everything() == before
        assert jetson.everything() == before
    assert kills > 30


def test_a_killed_restart_is_no_reason_to_keep_the_wrong_mode(jetson, folder):
    before = jetson.everything()
    device = open_sysfs(jetson)
    for writes in (40, 3, 10):
        jetson.writes_left = writes
        with pytest.raises(Killed), backed_up(device, folder):
            change(device)
            change(device)
    jetson.writes_left = None
    with KnobBackup.hold(device, folder) as backup:
        assert backup.restore()
        assert not backup.restore()
    assert jetson.everything() == before


def test_a_mode_that_is_to_stay_is_put_back_later_to_what_was_first(jetson, folder):
    before = jetson.everything()
    device = open_sysfs(jetson)
    for mode in (device.space.lowest, device.space.highest._replace(cores=2)):
        with KnobBackup.hold(device, folder) as backup:
            backup.save()
            device.apply(mode)
        assert device.current_mode() == mode
    with KnobBackup.hold(device, folder) as backup:
        assert backup.restore()
    assert jetson.everything() == before


def test_two_agents_on_one_device_exclude_each_other(jetson, folder):
    device = open_sysfs(jetson)
    with backed_up(device, folder):
        change(device)
        changed = jetson.everything()
        with pytest.raises(DeviceBusyError, match=rf"device.lock: .*in use by process {os.getpid()}; stop that agent"):
            with backed_up(open_sysfs(jetson), folder):
                pytest.fail("both have it")
        assert jetson.everything() == changed
        assert (folder / BACKUP_FILE).exists()
    with backed_up(device, folder):
        pass


def test_an_agent_that_was_really_killed_leaves_the_lock_and_its_device_to_the_next(tmp_path, folder):
    jetson = FakedJetson(tmp_path / "root", AGX_ORIN_JP5)
    before = jetson.everything()
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
        with pytest.raises(DeviceBusyError, match=f"process {process.pid};"), backed_up(open_sysfs(jetson), folder):
            pytest.fail("both have it")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert jetson.everything() != before
    with backed_up(open_sysfs(jetson), folder):
        assert jetson.everything() == before


@pytest.mark.parametrize("content", [b"", b'{"kept": 1, "board_kind": "orin-nano", "kno', b"[1]", b"\xff\xfe", b"null"])
def test_a_damaged_file_says_what_to_do_and_changes_nothing(jetson, folder, content):
    folder.mkdir()
    (folder / BACKUP_FILE).write_bytes(content)
    with pytest.raises(KnobBackupError) as refused, backed_up(open_sysfs(jetson), folder):
        pytest.fail("went on")
    assert f"{BACKUP_FILE}: is damaged" in str(refused.value) and "sudo nvpmodel -m" in str(refused.value)
    assert jetson.written == []
    assert (folder / BACKUP_FILE).read_bytes() == content


def test_what_was_kept_from_another_board_is_refused(jetson, folder, tmp_path):
    with KnobBackup.hold(open_sysfs(FakedJetson(tmp_path / "other", XAVIER_AGX)), folder) as backup:
        backup.save()
    with pytest.raises(InvalidInputError, match="is the backup of the board xavier-agx, but this is orin-nano"):
        with backed_up(open_sysfs(jetson), folder):
            pytest.fail("went on")
    assert (folder / BACKUP_FILE).exists()


def test_what_was_kept_from_another_kind_of_device_is_refused(jetson, folder):
    with KnobBackup.hold(SimulatedDevice("orin-nano", 1), folder) as backup:
        backup.save()
    with pytest.raises(InvalidInputError, match=rf"{BACKUP_FILE}: .*pass the device that this backup is from"):
        with backed_up(open_sysfs(jetson), folder):
            pytest.fail("went on")
    assert jetson.written == []


@pytest.mark.parametrize("room", [5, 9, 60])
def test_a_full_disk_leaves_the_device_untouched(jetson, folder, room):
    with pytest.raises(KnobBackupError, match="No space left on device; the device was not"):
        with backed_up(open_sysfs(jetson), folder, torn_after(room)):
            pytest.fail("went on")
    assert jetson.written == []
    assert {path.name for path in folder.iterdir()} == {LOCK_FILE}


def test_a_folder_that_cannot_be_made_leaves_the_device_untouched(jetson, folder):
    folder.write_text("a file")
    with pytest.raises(KnobBackupError, match=r"device.lock: cannot be opened"), backed_up(open_sysfs(jetson), folder):
        pytest.fail("went on")
    assert jetson.written == []


def test_what_cannot_be_put_back_stays_on_disk_for_the_next_start(jetson, folder):
    device = open_sysfs(jetson)
    before = jetson.everything()
    with pytest.raises(ModeNotAppliedError, match="not restored: .*online"), backed_up(device, folder):
        change(device)
        jetson.unwritable["/sys/devices/system/cpu/cpu5/online"] = errno.EIO
    jetson.unwritable.clear()
    with backed_up(device, folder):
        assert jetson.everything() == before
