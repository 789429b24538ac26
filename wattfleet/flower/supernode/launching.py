"""Starts the processes of ClientApps: with a fork server if possible, or else as Flower does."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import WARNING
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from flwr.common import log

from wattfleet.flower.logged_program import flower_script, logged
from wattfleet.flower.supernode.fork_server import LARGEST_MESSAGE_BYTES

CLIENT_APP = "flwr-clientapp"
LEARNED = "learned"
_ACKNOWLEDGED_WITHIN_S = 10.0
_MOST_UNFIT_IMPORTS = 8
_PREPARE_EVERY_S = 0.5
# The first entry of the path is the folder of Flower's script, as in a process that was started from it. Without this,
# it would be the working folder.
_BOOTSTRAP = (
    "import sys\n"
    "folder = sys.argv.pop(1)\n"
    "if not sys.flags.safe_path: sys.path[0] = folder\n"
    "from wattfleet.flower.supernode.fork_server import main\n"
    "main()\n"
)


class NoServerError(Exception):
    """The fork server cannot start the process; the text gives the reason."""


class ForkServer:
    """The client side of a running fork server."""

    def __init__(self, script: Path, imports: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        """Start the server. It is ready once its imports are done.

        Args:
            script: Flower's program that runs a ClientApp.
            imports: modules to import in addition to Flower's.
            folder: the folder for this server's files. Processes write the names of their imports to `learned` beside
                it.
            environment: environment variables of the processes that it starts.
        """
        self.imports = list(imports)
        self._learned = folder.parent / LEARNED
        self.failure = ""
        self.unfit = ""
        self._script = script
        self._is_ready = False
        names = folder / "imports.json"
        names.write_text(json.dumps(self.imports), encoding="utf-8")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-c", _BOOTSTRAP, str(script.resolve().parent), str(theirs.fileno()), str(names)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)

    def is_ready(self, within_s: float = 0.0) -> bool:
        """Whether the server can start processes. If it never will, `failure` gives the reason."""
        if not self._is_ready and not self.failure and self._has_answered(within_s):
            answer = self._answer()
            self._is_ready = "ready" in answer
            self.unfit = answer.get("unfit", "")
            if not self._is_ready:
                self.failure = "the fork server has ended"
            if self.unfit:
                self.failure = (
                    f"importing {self.unfit} {answer['reason']}, and a process that is forked afterwards would not have"
                    f" one of its own. So each message imports it anew, which took {answer['import_s']:.1f} s here"
                )
        return self._is_ready

    def start(self, arguments: Sequence[str]) -> int:
        """Start Flower's program with these arguments, and return its process id.

        Raises:
            NoServerError: the program was not started, and never will be.
        """
        request = {"arguments": [str(self._script), *arguments], "learned": str(self._learned)}
        try:
            self._control.send(json.dumps(request).encode())
            if self._has_answered(_ACKNOWLEDGED_WITHIN_S):
                return int(self._answer()["started"])
        except (OSError, KeyError):
            self._end()
            raise NoServerError("the fork server has ended") from None
        # The server must not start the program later, since another process is started instead.
        self._end()
        raise NoServerError(f"the fork server did not answer within {_ACKNOWLEDGED_WITHIN_S:g} s")

    def retire(self) -> None:
        """Let the server end when the processes that it has started have ended."""
        try:
            self._control.send(json.dumps({"retire": True}).encode())
        except OSError:
            self.process.kill()
        self._control.close()

    def close(self) -> None:
        """Close the connection, which ends the server."""
        self._control.close()

    def _has_answered(self, within_s: float) -> bool:
        readable, _, _ = select.select([self._control], [], [], within_s)
        return bool(readable)

    def _answer(self) -> dict[str, Any]:
        try:
            received = self._control.recv(LARGEST_MESSAGE_BYTES)
        except ConnectionResetError:
            received = b""
        return json.loads(received) if received else {}

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._control.close()


class Launcher:
    """Replaces `subprocess.Popen` where Flower's SuperExec starts a process.

    The first fork server imports Flower's modules only. Each app process records the libraries that it had to import.
    The next fork server imports these, too, and replaces the first one when it is ready. A library that must not be
    imported before a fork is left out.
    """

    def __init__(
        self, folder: Path, environment: Mapping[str, str], learn: bool = True, imports: Sequence[str] = ()
    ) -> None:
        """Start the first fork server.

        Args:
            folder: an empty folder for the servers' files.
            environment: environment variables of the app processes.
            learn: whether to import the apps' libraries ahead of messages.
            imports: modules that are always imported ahead.
        """
        self._lock = Lock()
        self._folder = folder
        self._environment = dict(environment)
        self._learn = learn
        self._unfit: list[str] = []
        self._servers = 0
        self._current: ForkServer | None = None
        self._next: ForkServer | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / LEARNED).mkdir()
        self._script = flower_script(CLIENT_APP)
        if self._script is None:
            self._give_up(f"{CLIENT_APP} is not installed for {sys.executable}")
        else:
            self._next = self._server(imports)

    def __call__(self, command: Sequence[str], **options: Any) -> None:
        """Start a process, as `subprocess.Popen` would."""
        with self._lock:
            self._reap()
            if command[0] == CLIENT_APP and not options and self._started_warm(command[1:]):
                return
            self._processes.append(subprocess.Popen(logged(command), env=self._environment, **options))

    def reap(self) -> int:
        """Reap ended child processes, and return how many still run, including fork servers."""
        with self._lock:
            return self._reap()

    def prepare(self) -> bool:
        """Use the next server if it is ready, or start one if there is more to import; return if one is starting."""
        with self._lock:
            return self._prepare()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Call `prepare` in a thread, so that a process's imports are imported ahead as soon as it has ended."""
        is_over = Event()

        def prepare() -> None:
            while not is_over.wait(_PREPARE_EVERY_S):
                self.prepare()

        thread = Thread(target=prepare, name="prepare", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def close(self) -> None:
        """End the servers."""
        with self._lock:
            self._close()

    def _reap(self) -> int:
        self._processes = [process for process in self._processes if process.poll() is None]
        return len(self._processes)

    def _close(self) -> None:
        if self._current is not None:
            self._current.close()
        if self._next is not None:  # it may import for seconds, and has not started a process
            self._next.process.kill()
            self._next.close()

    def _started_warm(self, arguments: Sequence[str]) -> bool:
        self._prepare()
        if self._current is None:
            return False
        try:
            self._current.start(arguments)
        except NoServerError as error:
            self._give_up(str(error))
            return False
        return True

    def _prepare(self) -> bool:
        if self._next is not None:
            if self._next.is_ready():
                if self._current is not None:
                    self._current.retire()
                self._current, self._next = self._next, None
            elif self._next.failure:
                self._replace_unfit(self._next)
        elif self._current is not None and self._learn:
            imports = self._current.imports
            if fresh := [name for name in self._learned() if self._is_fit(name) and name not in imports]:
                self._next = self._server([*imports, *fresh])
        return self._next is not None

    def _learned(self) -> list[str]:
        """Return the imports of ended processes; each is returned once."""
        names: dict[str, None] = {}
        for file in sorted((self._folder / LEARNED).glob("*.json")):
            names.update(dict.fromkeys(json.loads(file.read_text(encoding="utf-8"))))
            file.unlink()
        return list(names)

    def _replace_unfit(self, failed: ForkServer) -> None:
        failed.close()
        self._next = None
        if failed.unfit and len(self._unfit) < _MOST_UNFIT_IMPORTS:
            self._unfit.append(failed.unfit)
            log(WARNING, "Messages wait longer for the app: %s", failed.failure)
            self._next = self._server([name for name in failed.imports if self._is_fit(name)])
        elif self._current is None:
            self._give_up(failed.failure)
        else:
            log(WARNING, "Libraries of the app are not imported ahead: %s", failed.failure)
            self._learn = False

    def _is_fit(self, name: str) -> bool:
        return not any(name == unfit or name.startswith(f"{unfit}.") for unfit in self._unfit)

    def _server(self, imports: Sequence[str]) -> ForkServer | None:
        self._servers += 1
        folder = self._folder / str(self._servers)
        try:
            folder.mkdir()
            assert self._script is not None
            server = ForkServer(self._script, imports, folder, self._environment)
        except OSError as error:
            self._give_up(str(error))
            return None
        self._processes.append(server.process)
        return server

    def _give_up(self, reason: str) -> None:
        """Log the reason, and start all later processes as Flower does."""
        log(
            WARNING,
            "Each message starts a new process without warm imports, as in Flower: %s. Restart the SuperNode to try"
            " again.",
            reason,
        )
        self._close()
        self._current = self._next = None
        self._learn = False
