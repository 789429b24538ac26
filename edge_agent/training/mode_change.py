"""Changes a device's mode by hand: backs up its knobs first, and restores them if the change fails."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from edge_agent.devices.device import Device, Knobs, ModeNotAppliedError
from edge_agent.devices.mode_names import parse_mode
from edge_agent.devices.nvpmodel import NvpmodelDevice
from edge_agent.training.knob_backup import BACKUP_FILE, KnobBackup, KnobBackupError
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.modes import PowerMode


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
    """
    if not device.mode_persists:
        raise InvalidInputError(
            f"{device.board_kind} is {device.provenance}: it exists only while a command runs, so it cannot keep a mode"
        )
    mode = parse_mode(device, name)
    with KnobBackup.hold(device, folder) as backup:
        is_new, before = backup.save(), device.knobs()
        try:
            with interrupting or nullcontext():
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
