"""Child processes of one run: started with their own logs, and all gone when the run is over."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from wattfleet.errors import WattfleetError

_STOP_GRACE_S = 8.0


class PartFailedError(WattfleetError):
    """A part of the run failed; the text names it and where its log is."""


@dataclass(frozen=True)
class Part:
    """One running child.

    Attributes:
        name: of the part.
        process: the child, leader of a session of its own.
        log: where its output goes.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def failure(self) -> PartFailedError | None:
        """What to raise if it has ended."""
        if self.process.poll() is None:
            return None
        return PartFailedError(
            f"{self.name} ended with exit code {self.process.returncode}: {last_line(self.log)} (log: {self.log})"
        )


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"


class Parts:
    """All children of a run; leaving the context ends them, last started first."""

    def __init__(self, logs: Path) -> None:
        """Keep logs in a directory, created where there is none."""
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._parts: list[Part] = []

    def __enter__(self) -> Parts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Part:
        """Start a child with its output in `<name>.log`.

        Raises:
            PartFailedError: there is no such program.
        """
        log = self._logs / f"{name}.log"
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    start_new_session=True,  # so that its own children can be ended with it
                )
        except FileNotFoundError:
            raise PartFailedError(
                f"{name}: {command[0]} is not installed: pip install 'wattfleet[simulation]'"
            ) from None
        part = Part(name, process, log)
        self._parts.append(part)
        return part

    def check(self) -> None:
        """Raise if a part has ended that should be running.

        Raises:
            PartFailedError: it has.
        """
        for part in self._parts:
            if failure := part.failure():
                raise failure

    def stop(self) -> None:
        """End all parts and whatever they started: a request first, after a while by force."""
        for part in reversed(self._parts):
            _signal(part, signal.SIGTERM)
        give_up_s = time.monotonic() + _STOP_GRACE_S
        for part in reversed(self._parts):
            try:
                part.process.wait(max(0.0, give_up_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            # Also where the leader went by itself: its children may not have.
            _signal(part, signal.SIGKILL, group=True)
            part.process.wait()
        self._parts.clear()


def _signal(part: Part, number: signal.Signals, group: bool = False) -> None:
    try:
        if group:
            os.killpg(part.process.pid, number)
        else:
            part.process.send_signal(number)
    except ProcessLookupError:
        pass
