"""A coordinator in a process of its own, as its command runs it; it can be killed, and started again where it was."""

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
    """The real command on a store; it keeps the port that it got first.

    Args:
        folder: of its log.
        store: an SQLite file, or a database's URL.
        options: further ones of the command.
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
                # A database's URL has a password, which a command line must not have.
                env={**os.environ, "WATTFLEET_COORDINATOR_STORE_LOCATION": self._store},
                stdout=log,
                stderr=log if self._stderr is None else self._stderr,
            )

    async def start(self) -> float:
        """Start it; the seconds until it serves."""
        begun_s = time.monotonic()
        self.begin()
        while not self.serves:
            assert time.monotonic() - begun_s < _WITHIN_S, self.log.read_text()[-3000:]
            await asyncio.sleep(0.02)
        self.address = self.addresses["address"]
        return time.monotonic() - begun_s

    @property
    def serves(self) -> bool:
        """Whether it has begun to serve; it must not have ended before."""
        assert self._started.poll() is None, self.log.read_text()[-3000:]
        return self._announced.exists()

    @property
    def addresses(self) -> dict[str, Any]:
        """What it has announced."""
        content: dict[str, Any] = json.loads(self._announced.read_text())
        return content

    def kill(self) -> None:
        """End it without a chance to do anything."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it as an operator does; its exit status."""
        return self._end(signal.SIGTERM)

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
