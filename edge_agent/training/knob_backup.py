"""What was in force on a device before Wattfleet changed it: on disk first, put back last.

A file beside a lock, in a folder of the device's own. The file is there exactly as long as the device may be in
another mode than its owner left it in, whatever happens to the process; the lock is held as long as a process may
change the device.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_agent.devices.device import Device, Knobs
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_io.atomic_files import remove_file, replace_file

KEPT_FILE = "device-before.json"
LOCK_FILE = "device.lock"

_FORMAT = 1


class KnobBackupError(WattfleetError):
    """What was in force cannot be put on disk, or be read from it."""


class DeviceBusyError(WattfleetError):
    """Another process may change this device now."""


@contextmanager
def safekept(device: Device, folder: Path, write: Callable[[int, bytes], int] = os.write) -> Iterator[None]:
    """Have a device to oneself, to be changed at will; at the end it is as it was found.

    What an earlier process could not put back, as it was killed, is put back first.

    Args:
        device: the board.
        folder: the device's own; it is made where it is missing.
        write: how bytes get to a descriptor, `os.write` outside of tests.

    Raises:
        DeviceBusyError: another process has it.
        KnobBackupError: the folder cannot be used; the device was not touched.
        InvalidInputError: what was kept belongs to another device.
        ModeNotAppliedError: it cannot be put back; what was in force stays on disk.
    """
    with KnobBackup.hold(device, folder, write) as safekeeping:
        safekeeping.restore()
        safekeeping.keep()
        try:
            yield
        finally:
            safekeeping.restore()


class KnobBackup:
    """A device held by this process alone; use `hold`, or `safekept` for the usual order of things.

    Args:
        device: the board.
        folder: where file and lock are.
        write: how bytes get to a descriptor.
    """

    def __init__(self, device: Device, folder: Path, write: Callable[[int, bytes], int]) -> None:
        self._device = device
        self._path = folder / KEPT_FILE
        self._write = write

    @classmethod
    @contextmanager
    def hold(cls, device: Device, folder: Path, write: Callable[[int, bytes], int] = os.write) -> Iterator[KnobBackup]:
        """Keep other processes off the device until the block ends.

        Raises:
            DeviceBusyError: another process has it.
            KnobBackupError: the folder cannot be used.
        """
        with _locked(folder, write):
            yield cls(device, folder, write)

    def keep(self) -> bool:
        """Put on disk what is in force; what is there already is older, and stays.

        Returns:
            Whether it was put there now.

        Raises:
            KnobBackupError: it cannot be written, or what is there is damaged; the device must not be changed.
            InvalidInputError: what is there belongs to another device.
        """
        if self._kept() is not None:
            return False
        kept = {"kept": _FORMAT, "board_kind": self._device.board_kind, "knobs": dict(self._device.knobs())}
        try:
            replace_file(self._path, json.dumps(kept, indent=1).encode() + b"\n", self._write)
        except OSError as error:
            raise KnobBackupError(
                f"{self._path}: cannot be written: {error.strerror}; the device was not changed, as it could not be"
                " restored after a crash"
            ) from None
        return True

    def forget(self) -> None:
        """Remove what was kept, where the device is as it was before `keep`.

        Raises:
            KnobBackupError: the file cannot be removed.
        """
        try:
            remove_file(self._path)
        except OSError as error:
            raise KnobBackupError(
                f"{self._path}: cannot be removed: {error.strerror}; the device is as it was, remove the file yourself"
            ) from None

    def restore(self) -> bool:
        """Put back what was kept; whether there was something.

        Raises:
            KnobBackupError: the file is damaged, or cannot be read or removed.
            InvalidInputError: it belongs to another device.
            ModeNotAppliedError: the device cannot be set back; the file stays.
        """
        knobs = self._kept()
        if knobs is None:
            return False
        try:
            self._device.restore(knobs)
        except InvalidInputError as error:
            raise InvalidInputError(f"{self._path}: {error}; name the device that this was kept from") from None
        self.forget()
        return True

    def _kept(self) -> Knobs | None:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise self._damaged(str(error)) from None
        try:
            kept = json.loads(text)
            kind, knobs = kept["board_kind"], kept["knobs"]
            whole = kept["kept"] == _FORMAT and all(isinstance(value, str) for value in knobs.values())
        except (ValueError, KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise self._damaged("it holds no knobs of a device")
        if kind != self._device.board_kind:
            raise InvalidInputError(
                f"{self._path}: was kept from the board {kind}, and this is {self._device.board_kind}; name that device"
            )
        restorable: Knobs = knobs
        return restorable

    def _damaged(self, why: str) -> KnobBackupError:
        return KnobBackupError(
            f"{self._path}: is damaged ({why}): set the device's mode yourself, on a Jetson with"
            " `sudo nvpmodel -m <ID>` or a reboot, and then remove the file"
        )


def holder_of(folder: Path) -> str | None:
    """The process that may change the device now, as it calls itself; None where there is none.

    Raises:
        KnobBackupError: the lock cannot be looked at.
    """
    path = folder / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KnobBackupError(f"{path}: cannot be opened: {error.strerror}") from None
    try:
        # Shared, and given up at once: two who look do not turn each other away.
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
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise KnobBackupError(
            f"{path}: cannot be opened: {error.strerror}; the device was not touched{_as_whom(error)}"
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
            # For whoever is turned away; the lock itself ends with the process, so nothing has to be cleaned up.
            os.ftruncate(descriptor, 0)
            write(descriptor, f"{os.getpid()}\n".encode())
        except OSError as error:
            raise KnobBackupError(f"{path}: cannot be written: {error.strerror}; the device was not touched") from None
        yield
    finally:
        os.close(descriptor)


def _as_whom(error: OSError) -> str:
    return "; run this as root" if isinstance(error, PermissionError) else ""
