"""A coordinator in a process of its own that can be killed at any moment, and started again where it was."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sqlalchemy import URL

_STARTS_WITHIN_S = 60.0


class MortalCoordinator:
    """The real command on a store; it keeps the port that it got first.

    Args:
        folder: of its log.
        store: an SQLite file, or a database's URL.
        options: further ones of the command.
    """

    def __init__(self, folder: Path, store: Path | URL, *options: str) -> None:
        self._store = str(store) if isinstance(store, Path) else store.render_as_string(hide_password=False)
        self._options = options
        self._announced = folder / "addresses.json"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = "127.0.0.1:0"
        self.log = folder / "coordinator.log"

    async def start(self) -> float:
        """Start it; the seconds until it serves."""
        self._announced.unlink(missing_ok=True)
        begun_s = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", "from wattfleet_io.cli import main; main()", "coordinator", "serve"),
                    *("--address", self.address, "--metrics-address", "127.0.0.1:0"),
                    *("--announce", str(self._announced), *self._options),
                ],
                # A database's URL has a password, which a command line must not have.
                env={**os.environ, "WATTFLEET_COORDINATOR_STORE_LOCATION": self._store},
                stdout=log,
                stderr=log,
            )
        while not self._announced.exists():
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() - begun_s < _STARTS_WITHIN_S, self.log.read_text()[-3000:]
            await asyncio.sleep(0.02)
        self.address = json.loads(self._announced.read_text())["address"]
        return time.monotonic() - begun_s

    def kill(self) -> None:
        """End it without a chance to do anything."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it as an operator does; its exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None, "it was started"
        self._process.send_signal(number)
        return self._process.wait(30)
