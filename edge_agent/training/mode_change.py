"""A mode that is put in force by hand: what was before is on disk first, and back if anything fails."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from edge_agent.devices.device import Device, Knobs, ModeNotAppliedError
from edge_agent.devices.mode_names import parse_mode
from edge_agent.devices.nvpmodel import NvpmodelDevice
from edge_agent.training.knob_backup import KEPT_FILE, KnobBackup, KnobBackupError
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.modes import PowerMode


def apply_kept(
    device: Device, name: str, folder: Path, interrupting: AbstractContextManager[None] | None = None
) -> PowerMode:
    """Put a mode in force that stays when this process ends.

    Args:
        device: the board.
        name: the mode as people write it.
        folder: the device's own, where what was in force before is kept.
        interrupting: held while the mode is put in force, but not while that is undone.

    Returns:
        The mode that was read back.

    Raises:
        InvalidInputError: there is no such mode, or the device is none that lasts.
        DeviceBusyError: another process has the device.
        KnobBackupError: what is in force cannot be put on disk; the device was not touched.
        ModeNotAppliedError: the mode did not take; the device is as its owner left it, unless the error says so.
    """
    if not device.mode_persists:
        raise InvalidInputError(
            f"{device.board_kind} is {device.provenance}: it ends with the command, so no mode lasts"
        )
    mode = parse_mode(device, name)
    with KnobBackup.hold(device, folder) as safekeeping:
        kept_now, before = safekeeping.keep(), device.knobs()
        try:
            with interrupting or nullcontext():
                if isinstance(device, NvpmodelDevice) and name in device.presets:
                    # A preset may gate the GPU's power, which the same mode by its numbers would not.
                    return device.apply_preset(name)
                device.apply(mode)
                return device.current_mode()
        except ModeNotAppliedError as error:
            raise ModeNotAppliedError(f"{error}; {_taken_back(device, before, kept_now, safekeeping)}") from None
        except BaseException:
            # Interrupted half-way: neither the one mode nor the other.
            safekeeping.restore()
            raise


def _taken_back(device: Device, before: Knobs, kept_now: bool, safekeeping: KnobBackup) -> str:
    """Undo what a refused mode has changed, and say how that ended."""
    try:
        if device.knobs() != before:
            safekeeping.restore()
            return "the device was restored"
        if kept_now:
            safekeeping.forget()
        return "nothing was changed"
    except WattfleetError as error:
        return f"and it could not be restored: {error}"


def is_kept(folder: Path) -> bool:
    """Whether a device may be in another mode than its owner left it in.

    Raises:
        KnobBackupError: the folder may not be looked into.
    """
    try:
        return (folder / KEPT_FILE).exists()
    except PermissionError:
        raise KnobBackupError(f"{folder}: may not be looked into: run this as root") from None


def restore_kept(device: Device, folder: Path) -> bool:
    """Put back what was in force before the first change; whether there was something.

    Raises:
        DeviceBusyError: another process has the device.
        KnobBackupError: what was kept is damaged.
        InvalidInputError: it was kept from another device.
        ModeNotAppliedError: it cannot be put back, and stays on disk.
    """
    with KnobBackup.hold(device, folder) as safekeeping:
        return safekeeping.restore()
