"""A fork server: it imports what ClientApps need once, and then forks a process for each message.

It has one thread, and one connection: a socket to the process that started it. When the socket closes, it ends.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from wattfleet_flower import process_log
from wattfleet_flower.supernode.warm_imports import UnfitImportError, import_all, loaded_libraries

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
        _send(control, unfit=error.module, reason=error.reason)
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
