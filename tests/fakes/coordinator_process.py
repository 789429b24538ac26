"""A coordinator in a process of its own, run by its command; it can be killed, and restarted at the same address."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import URL

_WITHIN_S = 60.0
_COMMAND = "from wattfleet_io.cli import main; main()"


class CoordinatorProcess:
    """The real command on a store; after a restart it keeps its first port.

    Args:
        folder: the folder of its log.
        store: an SQLite file, or a database's URL.
        options: further options of the command.
        code: the Python code that runs the command.
        wrapper: a command that executes the one that follows it.
        stderr: as for `subprocess.Popen`; None for the log.
    """

    def __init__(
        self,
        folder: Path,
        store: Path | URL,
        *options: str,
        code: str = _COMMAND,
        wrapper: Sequence[str] = (),
        stderr: int | None = None,
    ) -> None:
        self._store = str(store) if isinstance(store, Path) else store.render_as_string(hide_password=False)
        self._options = options
        self._command = (*wrapper, sys.executable, "-c", code, "coordinator", "serve")
        self._stderr = stderr
        self._announced = folder / "addresses.json"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = "127.0.0.1:0"
        self.log = folder / "coordinator.log"

    def begin(self) -> None:
        """Start it, without waiting until it serves."""
        self._announced.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *self._command,
                    *("--address", self.address, "--metrics-address", "127.0.0.1:0"),
                    *("--announce", str(self._announced), *self._options),
                ],
                # A database's URL contains a password, which must not be on a command line.
                env={**os.environ, "WATTFLEET_COORDINATOR_STORE_LOCATION": self._store},
                stdout=log,
                stderr=log if self._stderr is None else self._stderr,
            )

    async def start(self) -> float:
        """Start it; returns the seconds until it serves."""
        begun_s = time.monotonic()
        self.begin()
        while not self.serves:
            assert time.monotonic() - begun_s < _WITHIN_S, self.log.read_text()[-3000:]
            await asyncio.sleep(0.02)
        self.address = self.addresses["address"]
        return time.monotonic() - begun_s

    @property
    def serves(self) -> bool:
        """Whether it has begun to serve; fails if it has ended before."""
        assert self._started.poll() is None, self.log.read_text()[-3000:]
        return self._announced.exists()

    @property
    def addresses(self) -> dict[str, Any]:
        """The addresses that it has announced."""
        content: dict[str, Any] = json.loads(self._announced.read_text())
        return content

    @property
    def pid(self) -> int:
        return self._started.pid

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop it as an operator does; returns its exit status."""
        return self._end(number)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, and do not wait for its end."""
        self._started.send_signal(number)

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was started"
        return self._process

    def _end(self, number: signal.Signals) -> int:
        self._started.send_signal(number)
        status = self._started.wait(_WITHIN_S)
        if self._started.stderr is not None:
            self._started.stderr.close()
        return status
