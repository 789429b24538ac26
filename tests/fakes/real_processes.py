"""Real processes that a test can kill, stop and start again: a coordinator, and a whole fleet with mutual TLS."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from sqlalchemy import URL

from coordinator.cli.client import CoordinatorClient
from edge_agent.paths import SUPERNODE_DIRECTORY
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError
from wattfleet.simulation.fleet import FleetIdentities, enrol_device, enrol_flower
from wattfleet.simulation.flower import (
    HOST,
    OFFLINE,
    FlowerDeployment,
    Part,
    Parts,
    SuperNodeConfig,
    free_ports,
    program,
)
from wattfleet.simulation.run import CoordinatorView, RunSeen
from wattfleet_proto.v1 import session_pb2, view_pb2

# --- Coordinator process ----------------------------------------------------------------------------------------------
# A coordinator in a process of its own, run by its command; it can be killed, and restarted at the same address.


_WITHIN_S = 60.0
_COMMAND = "from wattfleet.common.cli import main; main()"


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
                    *("--address", self.address, "--http-address", "127.0.0.1:0"),
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


# --- Real fleet -------------------------------------------------------------------------------------------------------
# A fleet of real processes with mutual TLS, which a test can kill, stop and start again one by one.
#
# These are a coordinator, agents on simulated boards, Flower's SuperLink and SuperNodes, and the processes of an app.

COORDINATOR, SUPERLINK = "coordinator", "superlink"
_CONDITION_WITHIN_S = 240.0
_ACCEPTED = "SuperNode ID:"
_RETURNED = "has accepted this SuperNode again"
_OPTIONS = """
[sessions]
lease_s = 2
[rounds]
overdue_s = 20
[policy]
name = "all"
[profiling]
modes = 5
"""


def agent(device_id: str) -> str:
    """The name of a device's agent."""
    return f"agent-{device_id}"


def supernode(device_id: str) -> str:
    """The name of a device's SuperNode."""
    return f"supernode-{device_id}"


class RealFleet:
    """The processes of a fleet, by name.

    Attributes:
        device_ids: the devices.
        flower: the SuperLink and SuperNodes.
        processes: the latest process of each name.
    """

    def __init__(self, folder: Path, boards: Mapping[str, str], site_budget_w: float = 200.0) -> None:
        """Prepare a fleet.

        Args:
            folder: an empty folder with a short path.
            boards: the kind of board of each device.
            site_budget_w: power budget of all devices.
        """
        self.device_ids = list(boards)
        self.processes: dict[str, Part] = {}
        self._folder = folder
        self._boards = boards
        self._budget_w = site_budget_w
        self._parts = Parts(folder / "logs")
        self._identities = FleetIdentities(folder / "authority")
        self._flower_identity = folder / "flower-identity"
        self._config = folder / "coordinator.toml"
        self._config.write_text(_OPTIONS)
        [port] = free_ports(1)
        self._address = f"{HOST}:{port}"
        self.endpoint = self._identities.serving_at(self._address)
        self._nodes = {
            device_id: SuperNodeConfig(
                device_id, number, self._socket(device_id), self._state(device_id) / SUPERNODE_DIRECTORY
            )
            for number, device_id in enumerate(boards)
        }
        self.flower = FlowerDeployment(
            self._parts, folder / "home", list(self._nodes.values()), identity=self._flower_identity
        )
        self.view = CoordinatorView(self.endpoint)

    def __enter__(self) -> RealFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.processes:
            with suppress(ProcessLookupError):
                self.resume(name)
        self.view.__exit__(kind, error, trace)
        self._parts.stop()

    def start_all(self) -> None:
        """Start the fleet, and wait until it is ready."""
        self.start(COORDINATOR)
        with CoordinatorClient(self.endpoint) as client:
            enrol_flower(client, self._flower_identity)
            for device_id in self.device_ids:
                enrol_device(client, device_id, self._boards[device_id], self._state(device_id))
        for device_id in self.device_ids:
            self.start(agent(device_id))
        self.start(SUPERLINK)
        self.flower.connect()
        for device_id in self.device_ids:
            self.start(supernode(device_id))
        self.until(self.is_ready, "all devices are ready")

    def start(self, name: str) -> None:
        """Start a process, or start it again after it has ended."""
        kind, _, device_id = name.partition("-")
        if name == COORDINATOR:
            self.processes[name] = self._start_coordinator()
        elif name == SUPERLINK:
            self.processes[name] = self.flower.start_superlink()
        elif kind == "agent":
            self.processes[name] = self._start_agent(device_id)
        else:
            self.processes[name] = self.flower.start_supernode(self._nodes[device_id])

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL. The processes that it has started are not killed."""
        process = self.processes[name].process
        process.kill()
        process.wait()

    def stop(self, name: str) -> None:
        """Stop a process as an operator does."""
        process = self.processes[name].process
        process.terminate()
        process.wait(60.0)

    def forget_nodes(self) -> None:
        """Restart the SuperLink, so that all SuperNodes get new node ids, and wait until they are back."""
        before = {each: self.log(supernode(each)).count(_RETURNED) for each in self.device_ids}
        self.kill(SUPERLINK)
        self.start(SUPERLINK)
        self.until(
            lambda: all(self.log(supernode(each)).count(_RETURNED) > count for each, count in before.items()),
            "all SuperNodes are back",
        )

    def pause(self, name: str) -> None:
        """Make a process hang, with SIGSTOP."""
        os.kill(self.processes[name].process.pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a process that hangs go on."""
        os.kill(self.processes[name].process.pid, signal.SIGCONT)

    def is_running(self, name: str) -> bool:
        return self.processes[name].process.poll() is None

    def log(self, name: str) -> str:
        """What a process has logged."""
        return self.processes[name].log.read_text(errors="replace")

    def devices(self) -> dict[str, view_pb2.DeviceView]:
        """The devices as the coordinator shows them; none while it is away."""
        try:
            return {each.device_id: each for each in self.view.devices()}
        except CoordinatorUnreachableError:
            return {}

    def is_ready(self) -> bool:
        """Whether all devices are ready, and the SuperLink has accepted all SuperNodes."""
        ready = [each for each in self.devices().values() if each.state == session_pb2.DEVICE_STATE_READY]
        online = [each for each in self.device_ids if _ACCEPTED in self.log(supernode(each))]
        return len(ready) == len(online) == len(self.device_ids)

    def submit(self, app: Path, **config: str | int | float) -> tuple[str, Path]:
        """Start a run of the app in `tests/faults/boards_app`; returns its id and the file of its notes."""
        notes = self._folder / f"notes-{time.monotonic_ns()}.jsonl"
        values = {"coordinator": self._address, "devices": len(self.device_ids), "notes": str(notes), **config}
        return self.flower.submit(app, values), notes

    @contextmanager
    def running(self, app: Path, **config: str | int | float) -> Iterator[AppRun]:
        """A run of the app, which is stopped at the end as a user does."""
        run = AppRun(*self.submit(app, **config), self.view)
        try:
            yield run
        finally:
            self.flower.stop(run.run_id)

    def until(self, condition: Callable[[], object], what: str, within_s: float = _CONDITION_WITHIN_S) -> float:
        """Wait until a condition holds, on a machine that may be busy; returns the seconds that this took."""
        began_s = time.monotonic()
        while not condition():
            if time.monotonic() - began_s > within_s:
                devices = "\n".join(f"--- {each}" for each in self.devices().values())
                logs = "\n".join(f"--- {name}: {self.log(name)[-2000:]}" for name in self.processes)
                raise AssertionError(f"within {within_s:g} s, not so: {what}\n{devices}\n{logs}")
            time.sleep(0.05)
        return time.monotonic() - began_s

    def _start_coordinator(self) -> Part:
        announced = self._folder / "coordinator.json"
        announced.unlink(missing_ok=True)
        part = self._parts.start(
            COORDINATOR,
            [
                program("wattfleet"),
                *("coordinator", "serve", "--address", self._address, "--identity", str(self._identities.authority)),
                *("--http-address", f"{HOST}:0", "--superlink-address", self.flower.address),
                *("--store", str(self._folder / "coordinator.db"), "--announce", str(announced)),
                *("--site-budget-w", str(self._budget_w), "--config", str(self._config)),
            ],
            OFFLINE,
        )
        self.until(lambda: announced.exists() or part.failure(), "the coordinator serves")
        if failure := part.failure():
            raise failure
        return part

    def _start_agent(self, device_id: str) -> Part:
        return self._parts.start(
            agent(device_id),
            [
                program("wattfleet"),
                *("agent", "run", "--device", f"simulated:{self._boards[device_id]}", "--device-id", device_id),
                *("--coordinator", self._address, "--state-dir", str(self._state(device_id))),
                *("--socket", str(self._socket(device_id))),
            ],
            OFFLINE,
        )

    def _state(self, device_id: str) -> Path:
        return self._folder / "agents" / device_id

    def _socket(self, device_id: str) -> Path:
        return self._folder / f"{device_id}.sock"


class AppRun:
    """One run of the app, and what it has noted.

    Attributes:
        run_id: Flower's id.
        notes_file: the file of its notes.
    """

    def __init__(self, run_id: str, notes_file: Path, view: CoordinatorView) -> None:
        self.run_id = run_id
        self.notes_file = notes_file
        self._view = view

    def notes(self, what: str, **values: Any) -> list[dict[str, Any]]:
        """The notes of one kind, such as `sent`, whose values are the given ones."""
        if not self.notes_file.exists():
            return []
        lines = [json.loads(line) for line in self.notes_file.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if line["what"] == what and values.items() <= line.items()]

    def seen(self) -> RunSeen:
        """The run as the coordinator shows it; an empty run while the coordinator is away."""
        try:
            return self._view.run(self.run_id)
        except CoordinatorUnreachableError:
            return RunSeen()

    def has_ended(self) -> bool:
        return self.seen().run.finished

    def app_process(self, device_id: str) -> psutil.Process:
        """The process that handles a message on a device, or that handled the last one."""
        [*_, last] = sorted(
            [*self.notes("asked", device=device_id), *self.notes("trains", device=device_id)],
            key=lambda note: float(note["at_s"]),
        )
        return psutil.Process(last["pid"])
