"""A fork server: it imports what ClientApps need once, and then forks a process for each message.

It has one thread, and one connection: a socket to the process that started it. When the socket closes, it ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from wattfleet.common.clock import Clock
from wattfleet.core.errors import WattfleetError
from wattfleet.flower import process_log

# --- Warm imports -----------------------------------------------------------------------------------------------------
# Imports modules before a fork if that is safe, and lists the libraries that an app's process has imported.


# Devices without state that a fork would share.
_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts/", "/dev/shm/")


class UnfitImportError(WattfleetError):
    """A module must not be imported before a fork.

    Attributes:
        module: the module.
        reason: what the module does that a fork would break, such as "starts a thread".
        import_s: how long its import took, seconds.
    """

    def __init__(self, module: str, reason: str, import_s: float) -> None:
        """Set the text to the module and the reason."""
        super().__init__(f"{module} {reason}")
        self.module = module
        self.reason = reason
        self.import_s = import_s


def import_all(names: Iterable[str]) -> None:
    """Import modules, and check after each one whether it can be forked.

    Modules that cannot be imported are skipped. The app may have imported them under other conditions.

    Raises:
        UnfitImportError: a module started a thread or a process, or opened a network connection or a device such as a
            GPU.
    """
    opened = _open_files()
    for name in names:
        began_s = time.monotonic()
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):  # noqa: BLE001  # a library may raise anything
            continue
        if reason := _started(opened):
            raise UnfitImportError(name, reason, time.monotonic() - began_s)


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


# --- Polling ----------------------------------------------------------------------------------------------------------
# How often a SuperNode polls the SuperLink for a message.

FLOWER_POLL_S = 3.0
"""The pause between two requests of Flower's own SuperNode."""

_WAITED_SHARE = 0.05
_REQUEST_SHARE = 0.1

Received = TypeVar("Received")


class Receiver(Generic[Received]):
    """Polls for a message until there is one.

    The pause between two requests is 5 % of the time waited so far, so that a message is late by at most this share. It
    is at least `poll_s`, and at most Flower's 3 s. Requests take at most about a tenth of the time, so that a busy
    SuperLink gets fewer requests.
    """

    def __init__(self, receive: Callable[[], Received | None], poll_s: float, clock: Clock) -> None:
        """Wrap Flower's request.

        Args:
            receive: sends one request; returns the message, or None if there is none.
            poll_s: seconds of the shortest pause.
            clock: measures the waiting.
        """
        self._receive = receive
        self._poll_s = poll_s
        self._clock = clock

    def __call__(self) -> Received:
        """Wait for a message."""
        began_s = self._clock.now_s()
        while True:
            asked_s = self._clock.now_s()
            if (received := self._receive()) is not None:
                return received
            now_s = self._clock.now_s()
            pause_s = max(self._poll_s, _WAITED_SHARE * (now_s - began_s), (now_s - asked_s) / _REQUEST_SHARE)
            self._clock.sleep_s(min(pause_s, max(FLOWER_POLL_S, self._poll_s)))


# --- Fork server ------------------------------------------------------------------------------------------------------

RUNTIME = ("flwr.supernode.cli", "flwr.supernode.runtime.run_clientapp")
"""The modules that Flower's own ClientApp process imports."""

LARGEST_MESSAGE_BYTES = 65_536
_REAP_EVERY_S = 1.0


def main() -> None:
    """Import modules and serve requests. Arguments: the socket's descriptor, and a file with the module names."""
    # Ctrl-C reaches the whole group. This process ends when its socket closes.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    try:
        import_all([*RUNTIME, *json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))])
    except UnfitImportError as error:
        _send(control, unfit=error.module, reason=error.reason, import_s=error.import_s)
        return
    process_log.start()  # for this process and those that it forks
    # The garbage collector ignores frozen objects, so that the forked processes share their memory.
    gc.collect()
    gc.freeze()
    _send(control, ready=True)
    request = _serve(control)
    if request is not None:
        signal.signal(signal.SIGINT, interrupt)
        _run(request["arguments"], Path(request["learned"]))


def _send(control: socket.socket, **message: Any) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the requesting process has ended, so this one will end, too
        control.send(json.dumps(message).encode())


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request. Return the request in the child, and None in this process at its end."""
    children: set[int] = set()
    while True:
        readable, _, _ = select.select([control], [], [], _REAP_EVERY_S if children else None)
        children -= _ended(children)
        if not readable:
            continue
        try:
            received = control.recv(LARGEST_MESSAGE_BYTES)
        except ConnectionResetError:  # closed before an answer was read
            received = b""
        if not received:
            return None
        request: dict[str, Any] = json.loads(received)
        if "retire" in request:
            break
        child = os.fork()
        if not child:
            control.close()
            return request
        children.add(child)
        _send(control, started=child)
    control.close()
    for child in children:
        os.waitpid(child, 0)
    return None


def _ended(children: set[int]) -> set[int]:
    return {child for child in children if os.waitpid(child, os.WNOHANG)[0]}


def _run(arguments: Sequence[str], learned: Path) -> None:
    """Run Flower's script as if it had been started directly, and write the names of the app's imports to a folder."""
    if "numpy.random" in sys.modules:  # A fork reseeds Python's generator. Torch's is never reseeded
        sys.modules["numpy.random"].seed()
    sys.argv = list(arguments)
    known = set(sys.modules)
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        from flwr.clientapp import ClientApp

        if imported := loaded_libraries((ClientApp,), known):
            partial = learned / f"{os.getpid()}.partial"
            with suppress(FileNotFoundError):  # the SuperNode has ended meanwhile
                partial.write_text(json.dumps(imported), encoding="utf-8")
                partial.replace(partial.with_suffix(".json"))
