"""A fleet of processes over mutual TLS: coordinators, agents on simulated boards, Flower's server and its nodes.

Imports take seconds, and a test starts many processes, so they are forked from one that has imported everything.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.paths import IDENTITY_DIRECTORY, INSTALLATION_FILE
from tests.fakes import lasting_agent, mortal_agent
from tests.fakes.certified import CertifiedFleet
from tests.fakes.fitting_here import fitting_here
from tests.fakes.flower_process import FlowerSettings, serve_nodes, serve_rounds
from wattfleet.modes import PowerMode, array_to_modes
from wattfleet_identity.identity_folder import write_identity
from wattfleet_identity.peers import Role
from wattfleet_io import cli
from wattfleet_io.logs import start_logging

BOARD = "orin-nano"
PROCESSES = multiprocessing.get_context("forkserver")
# One process forks for all tests of a run, including those of `test_chaos_mode_change.py`.
PROCESSES.set_forkserver_preload(
    ["__main__", __name__, mortal_agent.__name__, "coordinator.cli.commands", "coordinator.server"]
)
_STOPS_WITHIN_S = 60.0


class ForkedProcess:
    """A process that a test has started, and ends by its id.

    Args:
        name: name of the process; its log file has this name.
        work: function of a module that the process runs.
        arguments: arguments of the function.
        logs: folder of its log.
    """

    def __init__(self, name: str, work: Callable[..., None], arguments: Sequence[Any], logs: Path) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self._work = work
        self._arguments = tuple(arguments)
        self.start()

    def start(self) -> None:
        """Start it, or restart it after it has ended."""
        self._process = PROCESSES.Process(target=_logged, args=(self.log, self._work, self._arguments), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    @property
    def last_words(self) -> str:
        return f"{self.name} ended with {self._process.exitcode}: {self.log.read_text()[-3000:]}"

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._process.join(_STOPS_WITHIN_S)

    def stop(self) -> int:
        """Stop it as an operator does; returns its exit status."""
        self._process.terminate()
        self._process.join(_STOPS_WITHIN_S)
        assert self._process.exitcode is not None, f"{self.name} did not stop: {self.log.read_text()[-3000:]}"
        return self._process.exitcode


class FleetFolder:
    """The files of a fleet: the authority, an identity for each process, and the state of each board and agent.

    Args:
        folder: the folder of the fleet; its path is short, since unix sockets are below it.
        device_ids: the devices.
    """

    def __init__(self, folder: Path, device_ids: Sequence[str]) -> None:
        self.folder = folder
        self.device_ids = tuple(device_ids)
        self.authority = folder / "authority"
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True)
        self.ledger = folder / "ledger.jsonl"
        fleet = CertifiedFleet.create(self.authority)
        for device_id in device_ids:
            installation = uuid.uuid4().hex
            self.state(device_id).mkdir(parents=True)
            (self.state(device_id) / INSTALLATION_FILE).write_text(f"{installation}\n")
            (self.board(device_id) / lasting_agent.MODE_FILE).write_text(json.dumps(OWNERS))
            identity = fleet.identity(Role.DEVICE, device_id, board=BOARD, installation=installation)
            write_identity(self.state(device_id) / IDENTITY_DIRECTORY, identity)
        write_identity(self._flowers, fleet.identity(Role.FLOWER, "flower"))
        self.operator = fleet.identity(Role.OPERATOR, "operator")

    @property
    def _flowers(self) -> Path:
        return self.folder / "flower-identity"

    def board(self, device_id: str) -> Path:
        return self.folder / "boards" / device_id

    def state(self, device_id: str) -> Path:
        return self.board(device_id) / "state"

    def seed(self, device_id: str) -> int:
        """The seed of a device's board."""
        return 1 + self.device_ids.index(device_id)

    def mode(self, device_id: str) -> PowerMode:
        """The current mode of a board."""
        return PowerMode(*json.loads((self.board(device_id) / lasting_agent.MODE_FILE).read_text()))

    def coordinator(self, name: str, store: str, address: str, *options: str) -> ForkedProcess:
        """Start a coordinator."""
        self.announced(name).unlink(missing_ok=True)
        arguments = ["serve", "--address", address, "--announce", str(self.announced(name))]
        arguments += ["--metrics-address", "127.0.0.1:0", "--enrolment-address", "127.0.0.1:0"]
        arguments += ["--identity", str(self.authority), *options]
        return self._start(name, run_coordinator, [store, arguments])

    def announced(self, name: str) -> Path:
        """The file that a coordinator writes when it begins to serve."""
        return self.folder / f"{name}.json"

    def address(self, name: str) -> str:
        """The address of a coordinator."""
        address: str = json.loads(self.announced(name).read_text())["address"]
        return address

    def agent(self, device_id: str, coordinator: str) -> ForkedProcess:
        """Start a device's agent."""
        agents = self.agent_socket(device_id)
        return self._start(
            device_id, run_agent, [self.board(device_id), coordinator, device_id, self.seed(device_id), agents]
        )

    def flower(self, coordinator: str, rounds: int, minibatches: int, training_s: float) -> list[ForkedProcess]:
        """Start Flower's server and its nodes."""
        sockets = {device_id: self.agent_socket(device_id) for device_id in self.device_ids}
        nodes = self.folder / "nodes.sock"
        settings = FlowerSettings(
            coordinator, self._flowers, sockets, nodes, self.ledger, rounds, minibatches, training_s
        )
        return [self._start("flower", serve_rounds, [settings]), self._start("nodes", serve_nodes, [settings])]

    def answers(self, device_id: str) -> bool:
        """Whether the device's agent accepts connections on its socket."""
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(self.agent_socket(device_id)))
            except OSError:
                return False
        return True

    def agent_socket(self, device_id: str) -> Path:
        """The socket of a device's agent."""
        return self.folder / f"{device_id}.sock"

    def _start(self, name: str, work: Callable[..., None], arguments: Sequence[Any]) -> ForkedProcess:
        return ForkedProcess(name, work, arguments, self.logs)


OWNERS = array_to_modes(SimulatedDevice(BOARD, seed=1).modes)[777]
"""The mode that the boards were in before Wattfleet started."""


def run_coordinator(store: str, arguments: Sequence[str]) -> None:
    """Run `wattfleet coordinator`; the store's password must not be on the command line."""
    os.environ["WATTFLEET_COORDINATOR_STORE_LOCATION"] = store
    sys.argv = ["wattfleet", "coordinator", *arguments]
    cli.main()


def run_agent(folder: Path, coordinator: str, device_id: str, seed: int, socket: Path) -> None:
    """An agent on a board that outlives it.

    It fits in its own process, since the usual process has the lowest priority and delays the test on a busy machine.
    """
    with patch("edge_agent.runtime.readiness.fitting_process", fitting_here):
        asyncio.run(lasting_agent.main(folder, coordinator, device_id, seed, socket, None))


def _logged(log: Path, work: Callable[..., None], arguments: Sequence[Any]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the test, which ends its processes
    start_logging()
    work(*arguments)
