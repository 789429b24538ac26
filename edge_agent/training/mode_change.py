"""Changes a device's mode by hand: backs up its knobs first, and restores them if the change fails."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from edge_agent.devices.device import Device, Knobs, ModeNotAppliedError
from edge_agent.devices.host import HOST_FILE, HostDevice
from edge_agent.devices.nvpmodel import NvpmodelDevice
from edge_agent.devices.sysfs import SysfsDevice, mode_argument, parse_mode
from edge_agent.paths import BACKUP_FILE
from wattfleet.common.atomic_files import (
    make_state_folder,
    open_regular_file,
    read_regular_file,
    remove_file,
    replace_file,
    require_own_folder,
)
from wattfleet.common.console import plain_text
from wattfleet.common.parsing import parse_json
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import PowerMode

# --- Knob backup ------------------------------------------------------------------------------------------------------
# Backup of a device's knobs: saved to disk before the first change, and restored last.
#
# The backup file and a lock file are in a folder of their own for each device. The backup exists as long as the
# device may be in another mode than its owner's, even if the process is killed. The lock is held as long as a process
# may change the device.


LOCK_FILE = "device.lock"

_FORMAT = 1
_MAX_SHOWN = 200
"""Maximum of characters of a backup's content in an error."""


class KnobBackupError(WattfleetError):
    """The backup of the knobs cannot be written or read."""


class DeviceBusyError(WattfleetError):
    """Another process has locked this device."""


@contextmanager
def backed_up(device: Device, folder: Path, write: Callable[[int, bytes], int] = os.write) -> Iterator[None]:
    """Lock a device and back up its knobs; restore them at the end of the block.

    A backup left by a killed process is restored first.

    Args:
        device: the board.
        folder: the device's own folder; created if missing.
        write: writes bytes to a file descriptor; tests replace `os.write`.

    Raises:
        DeviceBusyError: another process has locked the device.
        KnobBackupError: the folder cannot be used; the device was not touched.
        InvalidInputError: the backup belongs to another device.
        ModeNotAppliedError: the knobs cannot be restored; the backup stays on disk.
    """
    with KnobBackup.hold(device, folder, write) as backup:
        backup.restore()
        backup.save()
        try:
            device.try_knobs()
            yield
        finally:
            backup.restore()


class KnobBackup:
    """The backup of a device that this process has locked; use `hold`, or `backed_up` for the usual sequence of steps.

    Args:
        device: the board.
        folder: the folder of the backup file and the lock.
        write: writes bytes to a descriptor.
    """

    def __init__(self, device: Device, folder: Path, write: Callable[[int, bytes], int]) -> None:
        self._device = device
        self._path = folder / BACKUP_FILE
        self._write = write

    @classmethod
    @contextmanager
    def hold(cls, device: Device, folder: Path, write: Callable[[int, bytes], int] = os.write) -> Iterator[KnobBackup]:
        """Lock the device against other processes until the block ends.

        Raises:
            DeviceBusyError: another process has locked the device.
            KnobBackupError: the folder cannot be used.
        """
        with _locked(folder, write):
            yield cls(device, folder, write)

    def save(self) -> bool:
        """Save the current knobs, unless there is an older backup, or the device has none to restore.

        Returns:
            Whether a backup was written.

        Raises:
            KnobBackupError: it cannot be written, or the older one is damaged; the device must not be changed.
            InvalidInputError: the older backup belongs to another device.
        """
        if self._saved() is not None:
            return False
        if not (knobs := dict(self._device.knobs())):
            return False
        content = {"kept": _FORMAT, "board_kind": self._device.board_kind, "knobs": knobs}
        try:
            replace_file(self._path, json.dumps(content, indent=1).encode() + b"\n", self._write)
        except OSError as error:
            raise KnobBackupError(
                f"{self._path}: cannot be written: {error.strerror}; the device was not changed, as it could not be"
                " restored after a crash"
            ) from None
        return True

    def discard(self) -> None:
        """Remove the backup of a device whose knobs are as before `save`.

        Raises:
            KnobBackupError: the file cannot be removed.
        """
        try:
            remove_file(self._path)
        except OSError as error:
            raise KnobBackupError(
                f"{self._path}: cannot be removed: {error.strerror}; the device is restored, remove the file yourself"
            ) from None

    def restore(self) -> bool:
        """Restore the knobs from the backup and remove it; return whether there was one.

        Raises:
            KnobBackupError: the file is damaged, or cannot be read or removed.
            InvalidInputError: it belongs to another device.
            ModeNotAppliedError: the knobs cannot be restored; the file stays.
        """
        knobs = self._saved()
        if knobs is None:
            return False
        try:
            self._device.restore(knobs)
        except InvalidInputError as error:
            reason = plain_text(str(error), _MAX_SHOWN)
            raise InvalidInputError(f"{self._path}: {reason}; {self._remedy}") from None
        self.discard()
        return True

    def _saved(self) -> Knobs | None:
        try:
            stored = read_regular_file(self._path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._damaged(error.strerror or str(error)) from None
        try:
            content = parse_json(stored)
            kind, knobs = content["board_kind"], content["knobs"]
            texts = (kind, *knobs.values())
            whole = content["kept"] == _FORMAT and all(isinstance(value, str) for value in texts)
        except (ValueError, KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise self._damaged("it does not contain the knobs of a device")
        if kind != self._device.board_kind:
            raise InvalidInputError(
                f"{self._path}: is the backup of the board {plain_text(kind, _MAX_SHOWN)}, but this is"
                f" {self._device.board_kind}; {self._remedy}"
            )
        restorable: Knobs = knobs
        return restorable

    @property
    def _remedy(self) -> str:
        """What to do with the backup of another device."""
        if isinstance(self._device, HostDevice) and not self._device.is_jetson:
            # It is most likely this machine's own, from before its file was edited.
            return f"set kind and modes in {HOST_FILE} as before, run `wattfleet agent restore`, and then change them"
        return "pass the device that this backup is from"

    def _damaged(self, why: str) -> KnobBackupError:
        return KnobBackupError(
            f"{self._path}: is damaged ({why}): set the device's mode yourself, on a Jetson with"
            " `sudo nvpmodel -m <ID>` or a reboot, and then remove the file"
        )


def holder_of(folder: Path) -> str | None:
    """Return the id of the process that has locked the device; None if the device is not locked.

    Raises:
        KnobBackupError: the lock cannot be opened.
    """
    path = folder / LOCK_FILE
    try:
        descriptor = open_regular_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KnobBackupError(f"{path}: cannot be opened: {error.strerror}") from None
    try:
        # A shared lock, released at once, so that two readers do not block each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "another process"
    finally:
        os.close(descriptor)
    return None


@contextmanager
def _locked(folder: Path, write: Callable[[int, bytes], int]) -> Iterator[None]:
    path = folder / LOCK_FILE
    try:
        make_state_folder(folder)
        require_own_folder(folder)
        descriptor = open_regular_file(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise KnobBackupError(
            f"{path}: cannot be opened: {error.strerror}; the device was not touched{_remedy(error)}"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            raise DeviceBusyError(
                f"{path}: the device is in use by {f'process {holder}' if holder else 'another process'};"
                " stop that agent first"
            ) from None
        try:
            # The process id is for error messages only. The lock ends with the process: no cleanup is needed.
            os.ftruncate(descriptor, 0)
            write(descriptor, f"{os.getpid()}\n".encode())
        except OSError as error:
            raise KnobBackupError(f"{path}: cannot be written: {error.strerror}; the device was not touched") from None
        yield
    finally:
        os.close(descriptor)


def _remedy(error: OSError) -> str:
    return "; run this as root" if isinstance(error, PermissionError) else ""


# --- Mode change ------------------------------------------------------------------------------------------------------


def apply_with_backup(
    device: Device, name: str, folder: Path, interrupting: AbstractContextManager[None] | None = None
) -> PowerMode:
    """Apply a mode that stays in force when this process ends.

    Args:
        device: the board.
        name: the mode as written by the user.
        folder: the device's own folder, for the backup of its knobs.
        interrupting: a context that is held while the mode is applied, but not while the change is undone.

    Returns:
        The mode that was read back.

    Raises:
        InvalidInputError: there is no such mode, or the device does not keep a mode after this process.
        DeviceBusyError: another process has locked the device.
        KnobBackupError: the knobs cannot be backed up; the device was not touched.
        ModeNotAppliedError: the mode was not applied; the device is restored, unless the error says otherwise.
        RebootNeededError: the mode needs a reboot; the device was not touched.
    """
    if not device.mode_persists:
        raise InvalidInputError(
            f"{device.board_kind} is {device.provenance}: it exists only while a command runs, so it cannot keep a mode"
        )
    mode = parse_mode(device, name)
    if isinstance(device, SysfsDevice):
        device.require_no_reboot(name)
    with KnobBackup.hold(device, folder) as backup:
        is_new, before = backup.save(), device.knobs()
        try:
            with interrupting or nullcontext():
                device.try_knobs()
                if (reached := parse_mode(device, name)) != mode:
                    raise ModeNotAppliedError(
                        f"{name} is not reached before a reboot: the memory's cap cannot be raised. Reboot, or apply"
                        f" {mode_argument(reached)}"
                    )
                if isinstance(device, NvpmodelDevice) and name in device.presets:
                    # A preset may switch GPU power gating; the same mode written in numbers would not.
                    return device.apply_preset(name)
                device.apply(mode)
                return device.current_mode()
        except ModeNotAppliedError as error:
            raise ModeNotAppliedError(f"{error}; {_undo(device, before, is_new, backup)}") from None
        except BaseException:
            # Interrupted: some knobs may be set and others not.
            backup.restore()
            raise


def _undo(device: Device, before: Knobs, is_new: bool, backup: KnobBackup) -> str:
    """Undo a partly applied mode; return a text with the outcome."""
    try:
        if device.knobs() != before:
            backup.restore()
            return "the device was restored"
        if is_new:
            backup.discard()
        return "nothing was changed"
    except WattfleetError as error:
        return f"and it could not be restored: {error}"


def has_backup(folder: Path) -> bool:
    """Return whether a device may be in another mode than its owner's.

    Raises:
        KnobBackupError: the folder may not be read.
    """
    try:
        return (folder / BACKUP_FILE).exists()
    except PermissionError:
        raise KnobBackupError(f"{folder}: permission denied: run this as root") from None


def restore_backup(device: Device, folder: Path) -> bool:
    """Restore the knobs as before the first change; return whether there was a backup.

    Raises:
        DeviceBusyError: another process has locked the device.
        KnobBackupError: the backup is damaged.
        InvalidInputError: it belongs to another device.
        ModeNotAppliedError: the knobs cannot be restored; the backup stays on disk.
    """
    with KnobBackup.hold(device, folder) as backup:
        return backup.restore()
