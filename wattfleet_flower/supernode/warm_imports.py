"""Imports modules before a fork if that is safe, and lists the libraries that an app's process has imported."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable
from types import ModuleType

from wattfleet.errors import WattfleetError

# Devices without state that a fork would share.
_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts/", "/dev/shm/")


class UnfitImportError(WattfleetError):
    """A module must not be imported before a fork.

    Attributes:
        module: the module.
        reason: what the module does that a fork would break, such as "starts a thread".
    """

    def __init__(self, module: str, reason: str) -> None:
        """Set the text to the module and the reason."""
        super().__init__(f"{module} {reason}")
        self.module = module
        self.reason = reason


def import_all(names: Iterable[str]) -> None:
    """Import modules, and check after each one whether it can be forked.

    Modules that cannot be imported are skipped. The app may have imported them under other conditions.

    Raises:
        UnfitImportError: a module started a thread or a process, or opened a network connection or a device such as a
            GPU.
    """
    opened = _open_files()
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):  # noqa: BLE001  # a library may raise anything
            continue
        if reason := _started(opened):
            raise UnfitImportError(name, reason)


def _started(opened_before: Collection[str]) -> str:
    """Return what the imports have started or opened that a fork would break; empty if nothing."""
    for file in _open_files() - set(opened_before):
        if file.startswith("socket:"):
            return "opens a network connection"
        if file.startswith("/dev/") and not file.startswith(_HARMLESS_DEVICES):
            return f"opens the device {file}"
    try:
        os.waitpid(-1, os.WNOHANG)
        return "starts a process"
    except ChildProcessError:
        return "starts a thread" if _has_threads() else ""


def _has_threads() -> bool:
    """Whether threads are running that would not survive a fork.

    OpenBLAS ends its threads before a fork and restarts them when needed, so it is safe.
    """
    if _thread_count() == 1:
        return False
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    return _thread_count() > 1


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def _open_files() -> set[str]:
    """The targets of the open file descriptors."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # the descriptor that was open for the listing
            continue
    return found


def loaded_libraries(app_types: tuple[type, ...], known: Collection[str]) -> list[str]:
    """Return the modules of installed libraries that this process has imported, in order, without the app's own.

    Args:
        app_types: a package is the app's own if one of its modules holds an object of such a type.
        known: modules to leave out.
    """
    installed = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    folders = tuple(os.path.join(path, "") for path in (sysconfig.get_path("stdlib"), *installed))
    fresh = {
        name: module
        for name, module in list(sys.modules.items())
        if name not in known and isinstance(module, ModuleType)
    }
    own = {name.partition(".")[0] for name, module in fresh.items() if _has_object_of(module, app_types)}
    return [
        name
        for name, module in fresh.items()
        if name.partition(".")[0] not in own and str(getattr(module, "__file__", None) or "").startswith(folders)
    ]


def _has_object_of(module: ModuleType, types: tuple[type, ...]) -> bool:
    # Not isinstance, since it reads `__class__`, and some objects then warn or import something.
    return any(issubclass(type(value), types) for value in list(vars(module).values()))
