"""The child processes of one run. Each has its own log, and all end with the run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from wattfleet.errors import WattfleetError
from wattfleet_io.connection_variables import COORDINATOR_VARIABLE, IDENTITY_VARIABLE, INSECURE_VARIABLE
from wattfleet_io.settings.user_file import FILE_VARIABLE

_STOP_GRACE_S = 8.0
_USERS_OWN = (COORDINATOR_VARIABLE, "WATTFLEET_AGENT_", "WATTFLEET_SUPERNODE", IDENTITY_VARIABLE, INSECURE_VARIABLE)
"""Prefixes of the environment variables that are meant for the user's own fleet."""


class PartFailedError(WattfleetError):
    """A part of the run has failed; the text names the part and its log."""


class NoAnswerError(PartFailedError):
    """A command did not answer in time, for example on a busy machine, so its result is unknown. Try again."""


@dataclass(frozen=True)
class Part:
    """One running child process.

    Attributes:
        name: the part's name.
        process: the child process, in its own session.
        log: the file with its output.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def failure(self) -> PartFailedError | None:
        """Return the error to raise if the child has ended; None while it runs."""
        if self.process.poll() is None:
            return None
        return PartFailedError(
            f"{self.name} ended with exit code {self.process.returncode}: {last_line(self.log)} (log: {self.log})"
        )


def last_line(log: Path) -> str:
    """Return the last line of a log that reports an error, or else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b|wattfleet:", line)] or lines
    return errors[-1] if errors else "it printed nothing"


class Parts:
    """The children of a run. Leaving the context ends them, the last one first."""

    def __init__(self, logs: Path) -> None:
        """Write logs to a directory, which is created if it does not exist."""
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._parts: list[Part] = []

    def __enter__(self) -> Parts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], more: Mapping[str, str]) -> Part:
        """Start a child with its output in `<name>.log`. A child that is started again goes on with its log.

        Raises:
            PartFailedError: the program is not installed.
        """
        log = self._logs / f"{name}.log"
        earlier = [part for part in self._parts if part.name == name and part.process.poll() is not None]
        self._parts = [part for part in self._parts if part not in earlier]
        try:
            with log.open("ab" if earlier else "wb") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment(more),
                    start_new_session=True,  # Ctrl-C then reaches only this process, which stops the parts in order
                )
                part = Part(name, process, log)
                self._parts.append(part)
        except FileNotFoundError:
            raise PartFailedError(
                f"{name}: {command[0]} is not installed: pip install 'wattfleet[simulation]'"
            ) from None
        return part

    def check(self) -> None:
        """Make sure that all parts are running.

        Raises:
            PartFailedError: a part has ended.
        """
        for part in self._parts:
            if failure := part.failure():
                raise failure

    def stop(self) -> None:
        """End all parts and the processes that they started: with SIGTERM, and after a while with SIGKILL.

        Stop signals are blocked meanwhile.
        """
        with _signals_blocked():
            # List the children now, since a child whose parent has ended cannot be found any more.
            children = [child for part in self._parts for child in _children(part)]
            for part in reversed(self._parts):
                part.process.terminate()
            give_up_s = time.monotonic() + _STOP_GRACE_S
            for part in reversed(self._parts):
                children += _children(part)
                with suppress(subprocess.TimeoutExpired):
                    part.process.wait(max(0.0, give_up_s - time.monotonic()))
            for part in self._parts:
                part.process.kill()
                part.process.wait()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, timeout=_STOP_GRACE_S)
            self._parts.clear()


def program(name: str) -> str:
    """Return the path of a program that is installed in this Python environment."""
    return str(Path(sys.executable).parent / name)


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a child.

    Its PATH includes this Python's folder, where Flower finds its own programs. The settings, the settings file and the
    identity of the user's own fleet are left out, since they would change the simulation.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_USERS_OWN)}
    return {**kept, "PATH": path, FILE_VARIABLE: "", **more}


def _children(part: Part) -> list[psutil.Process]:
    try:
        return psutil.Process(part.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
