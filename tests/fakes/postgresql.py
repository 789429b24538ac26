"""A PostgreSQL server for the tests, from the system's packages, in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import URL

_WITHIN_S = 60.0


def _programs() -> Path:
    """The folder with the programs of the newest installed server."""
    # Debian's packages install them outside the PATH.
    installed = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if installed:
        return max(installed, key=lambda folder: float(folder.parent.name))
    found = shutil.which("initdb")
    if found is None:
        pytest.skip("PostgreSQL is not installed: no initdb in /usr/lib/postgresql or PATH")
    return Path(found).resolve().parent


def _as_other_than_root() -> list[str]:
    """The prefix for commands that have to run as another user, since PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return []
    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        user = None
    if user is None or not shutil.which("setpriv"):
        pytest.skip("PostgreSQL refuses to run as root, and there is no user postgres or no setpriv")
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]


@dataclass
class PostgresServer:
    """A server with its data in one folder; it can be stopped and started again.

    Attributes:
        folder: the folder for its data and its socket, owned by the user who runs it.
        port: port on loopback.
    """

    folder: Path
    port: int
    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it runs"
        return self._process.pid

    def url(self, database: str) -> URL:
        return URL.create("postgresql+psycopg", "wattfleet", "s3cret", "127.0.0.1", self.port, database)

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    *_as_other_than_root(),
                    *(str(_programs() / "postgres"), "-D", str(self.folder / "data"), "-p", str(self.port)),
                    *("-k", str(self.folder), "-h", "127.0.0.1", "-c", "fsync=on", "-c", "max_connections=30"),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
            )
        give_up_s = time.monotonic() + _WITHIN_S
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < give_up_s, (self.folder / "log").read_text()
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it; SIGINT closes connections and keeps all committed data; SIGQUIT does so without cleaning up."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(_WITHIN_S)
            self._process = None

    def execute(self, sql: str) -> None:
        import psycopg

        with psycopg.connect(
            host="127.0.0.1", port=self.port, user="wattfleet", dbname="postgres", autocommit=True
        ) as connection:
            connection.execute(sql)

    def _answers(self) -> bool:
        import psycopg

        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def postgres_server(folder: Path) -> Iterator[PostgresServer]:
    """A server in an empty folder that its user can access; skips the test if no server can be run."""
    pytest.importorskip("psycopg", reason="the extra `postgresql` is not installed")
    programs, before = _programs(), _as_other_than_root()
    if before:
        shutil.chown(folder, "postgres")
    subprocess.run(
        [*before, str(programs / "initdb"), "-D", str(folder / "data"), "-U", "wattfleet", "-A", "trust", "-E", "UTF8"],
        check=True,
        capture_output=True,
        cwd=folder,
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = PostgresServer(folder, port)
    try:
        server.start()
        yield server
    finally:
        server.stop(signal.SIGQUIT)  # its data is not needed any more
