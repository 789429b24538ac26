"""The measured servers, each in its own process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import psutil

import reference_models
from benchmarks.fleet import requests
from benchmarks.fleet.connection import Connection, connect
from benchmarks.fleet.identities import FleetIdentities
from coordinator.listeners import OPTIONS
from wattfleet.core.prediction import WEIGHTS_FILE, Artefact
from wattfleet.simulation.flower import Part, PartFailedError, Parts, program

HOST = "127.0.0.1"
_READY_WITHIN_S = 60.0
_POLL_S = 0.05
_REFERENCE = "agx_orin_resnet18"
_CHUNK_BYTES = 64 * 1024


class Server:
    """A process that serves the agents' protocol on a port of loopback.

    Args:
        parts: the run's child processes.
        name: name of the server.
        command: the command that starts it; `{port}` and `{announce}` are filled in.
        folder: folder of the file to which the server writes its address.
        identities: the identities of its clients; None for plaintext.
    """

    def __init__(
        self, parts: Parts, name: str, command: list[str], folder: Path, identities: FleetIdentities | None = None
    ) -> None:
        self._parts = parts
        self.name = name
        self._command = command
        self._announced = folder / f"{name}.json"
        self.identities = identities
        self._part: Part | None = None
        self._port = 0
        self.metrics_url = ""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return HOST, self._port

    async def start(self) -> None:
        """Start the server, on its earlier port if it had one.

        Raises:
            PartFailedError: the server does not start.
        """
        self._announced.unlink(missing_ok=True)
        filled = [part.format(port=self._port, announce=self._announced) for part in self._command]
        self._part = self._parts.start(self.name, filled, {})
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + _READY_WITHIN_S
        while not self._announced.exists():
            if failure := self._part.failure():
                raise failure
            if loop.time() > give_up_s:
                raise PartFailedError(f"{self.name} did not come up within {_READY_WITHIN_S:g} s")
            await asyncio.sleep(_POLL_S)
        announced = json.loads(self._announced.read_text())
        self._port = int(announced["address"].rpartition(":")[2])
        self.metrics_url = f"http://{announced.get('http_address')}/metrics"

    async def connect(self, number: int) -> Connection:
        """Open an agent's connection; raises the errors of `connect`."""
        return await connect(self.address, None if self.identities is None else self.identities.context(number))

    def kill(self) -> None:
        """Kill the server."""
        assert self._part is not None
        self._part.process.kill()
        self._part.process.wait()

    def cpu_s(self) -> float:
        """Return the CPU seconds that it has used."""
        times = self._process().cpu_times()
        return float(times.user + times.system)

    def rss_mb(self) -> float:
        """Return its current resident memory, MB."""
        return float(self._process().memory_info().rss) / 1e6

    def peak_rss_mb(self) -> float:
        """Return its maximum resident memory so far, MB."""
        status = Path("/proc", str(self._process().pid), "status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024 / 1e6

    async def quiet(self, limit_s: float) -> None:
        """Wait until it is idle, but not for longer than the limit."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + limit_s
        before_s = self.cpu_s()
        while loop.time() < give_up_s:
            await asyncio.sleep(0.5)
            now_s = self.cpu_s()
            if now_s - before_s < 0.05:
                return
            before_s = now_s

    def _process(self) -> psutil.Process:
        assert self._part is not None
        return psutil.Process(self._part.process.pid)


def coordinator(parts: Parts, folder: Path, reference: Path, identities: FleetIdentities | None) -> Server:
    """Return a coordinator with its store in the folder."""
    store = folder / "coordinator.db"
    command = [
        program("wattfleet"),
        *("coordinator", "serve", "--address", f"{HOST}:{{port}}", "--http-address", f"{HOST}:0"),
        *("--store", str(store), "--reference", str(reference)),
        *("--site-budget-w", "1e6", "--announce", "{announce}"),
    ]
    if identities is None:
        command += ["--identity", str(folder / "none")]
    else:
        identities.store(store)
        command += ["--identity", str(identities.folder), "--enrolment-address", f"{HOST}:0"]
    return Server(parts, "coordinator", command, folder, identities)


def bare(parts: Parts, folder: Path, reference_bytes: int, identities: FleetIdentities | None) -> Server:
    """Return a bare gRPC server without any logic.

    Args:
        parts: the run's child processes.
        folder: folder of the file to which the server writes its address.
        reference_bytes: size of a download, in chunks of the coordinator's size.
        identities: the identities of its clients; None for plaintext.
    """
    command = [
        *(sys.executable, "-m", "benchmarks.fleet.bare", "--service", requests.SERVICE[1:]),
        *("--answer-bytes", str(requests.ACK_BYTES), "--announce", "{announce}"),
        *("--options", json.dumps(dict(OPTIONS)).replace("{", "{{").replace("}", "}}")),
        *("--chunks", str(math.ceil(reference_bytes / _CHUNK_BYTES)), "--chunk-bytes", str(_CHUNK_BYTES)),
        *(() if identities is None else ("--identity", str(identities.folder))),
    ]
    return Server(parts, "bare", command, folder, identities)


def reference_of_size(size: int) -> Artefact:
    """Return a reference of this size: the shipped manifest with random weights that are never used."""
    manifest = json.loads(reference_models.load(_REFERENCE).manifest)
    weights = np.random.default_rng(0).bytes(size)
    manifest["files"][WEIGHTS_FILE] = {"sha256": hashlib.sha256(weights).hexdigest(), "size": size}
    return Artefact(json.dumps(manifest).encode(), weights)
