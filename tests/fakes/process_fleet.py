"""A fleet of processes over mutual TLS: coordinators, agents on simulated boards, Flower's server and its nodes.

Imports take seconds, and a test starts many processes, so they are forked from one that has imported everything.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.paths import IDENTITY_DIRECTORY, INSTALLATION_FILE
from tests.fakes import lasting_agent
from tests.fakes.fittings import fitting_here
from tests.fakes.flower_in_process import APP, SUPERLINK, OneRunGrid, gone, trained
from tests.fakes.served import CertifiedFleet
from wattfleet.common import cli
from wattfleet.common.identity.channels import Endpoint
from wattfleet.common.identity.identity_folder import write_identity
from wattfleet.common.identity.peers import Role
from wattfleet.common.logs import start_logging
from wattfleet.core.errors import WattfleetError
from wattfleet.core.modes import PowerMode, WorkloadFacts, array_to_modes
from wattfleet.flower import PowerAware, power_mode_mod, profiled, until_deadline
from wattfleet.simulation.flower_task import be_task
from wattfleet_proto.assignment import OBSERVED_EPOCH_S_KEY, RECORD_KEY
from wattfleet_proto.v1 import planning_pb2_grpc

_log = logging.getLogger(__name__)


# --- Ledger -----------------------------------------------------------------------------------------------------------
# A file of JSON lines that several processes append to, and that survives their being killed.


class Ledger:
    """Appends each line with one write, so that a killed process leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, **entry: Any) -> None:
        os.write(self._descriptor, json.dumps(entry).encode() + b"\n")


class LedgerReader:
    """Reads what was appended since the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def look(self) -> list[dict[str, Any]]:
        found = []
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read)
            for line in iter(file.readline, b""):
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                found.append(json.loads(line))
        return found


# --- Flower process ---------------------------------------------------------------------------------------------------
# Flower's server and its nodes in two processes, so that each can end without the other.
#
# PowerAware, the mod and the agents are real. Instead of Flower's SuperLink and SuperNodes, the nodes listen on a
# unix socket and accept one message per connection. Both processes record acknowledged events in a ledger, one JSON
# object a line: `planned` and `finished` rounds, completed runs, and the trainings that an agent has `observed`.

_PAUSE_S = 0.2
_SLEEPS = 20
_ERROR_IN_APP = 8
_FIRST_NODE = 10

WORKLOAD = "digits"
_ARRAYS = (np.zeros((20, 30)), np.ones(20))
FACTS = WorkloadFacts(parameters=sum(each.size for each in _ARRAYS))
"""What is known of the workload: a board's physics depend on it."""


@dataclass(frozen=True)
class FlowerSettings:
    """Settings of the server and its nodes.

    Attributes:
        coordinator: its host:port.
        identity: the folder with the app's identity.
        sockets: device id -> the unix socket of its agent.
        nodes: the unix socket of the nodes.
        ledger: the file of acknowledged events.
        rounds: rounds of each run.
        minibatches: minibatches in one epoch of each device.
        training_s: seconds that a training takes on this machine.
    """

    coordinator: str
    identity: Path
    sockets: dict[str, Path]
    nodes: Path
    ledger: Path
    rounds: int
    minibatches: int
    training_s: float


class NotingStub:
    """The coordinator's planning service; records the plans it has returned and the rounds it has finished."""

    def __init__(self, stub: Any, ledger: Ledger) -> None:
        self._stub = stub
        self._ledger = ledger

    def __getattr__(self, method: str) -> Callable[..., Any]:
        call = getattr(self._stub, method)

        def noted(request: Any, **options: Any) -> Any:
            answer = call(request, **options)
            if method == "PlanRound":
                self._ledger.note(planned=answer.plan_id, devices=[each.device_id for each in answer.assignments])
            if method == "FinishRound":
                self._ledger.note(finished=request.plan_id)
            return answer

        return noted


class GridOfNodes(OneRunGrid):
    """The nodes in the other process; a node that cannot be reached is gone, as for Flower."""

    def __init__(self, settings: FlowerSettings, run_id: str, pool: ThreadPoolExecutor) -> None:
        super().__init__(run_id, APP)
        self._settings = settings
        self._pool = pool
        self._on_the_way: dict[str, Future[Message]] = {}

    def get_node_ids(self) -> Iterable[int]:
        return range(_FIRST_NODE, _FIRST_NODE + len(self._settings.sockets))

    def _send(self, messages: list[Message]) -> None:
        for message in messages:
            self._on_the_way[message.metadata.message_id] = self._pool.submit(self._asked, message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        there = [each for each in message_ids if each in self._on_the_way and self._on_the_way[each].done()]
        return [self._on_the_way.pop(each).result() for each in there]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        missing = list(self.push_messages(messages))
        until_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        replies: list[Message] = []
        while missing and time.monotonic() < until_s:
            time.sleep(0.01)
            arrived = list(self.pull_messages(missing))
            replies += arrived
            answered = {reply.metadata.reply_to_message_id for reply in arrived}
            missing = [each for each in missing if each not in answered]
        return replies

    def _asked(self, message: Message) -> Message:
        try:
            with Client(str(self._settings.nodes), "AF_UNIX") as connection:
                connection.send(message)
                reply: Message = connection.recv()
                return reply
        except (OSError, EOFError):
            return gone(message)


def serve_rounds(settings: FlowerSettings) -> None:
    """Run Flower's server: train one run after another until the process is ended."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    be_task(SUPERLINK, SUPERLINK)
    ledger = Ledger(settings.ledger)
    channel = Endpoint.of(settings.coordinator, settings.identity).channel()
    stub = NotingStub(planning_pb2_grpc.PlanningServiceStub(channel), ledger)
    arrays = ArrayRecord(list(_ARRAYS))
    with ThreadPoolExecutor(2 * len(settings.sockets)) as pool:
        while True:
            run_id = uuid.uuid4().hex[:12]
            strategy = PowerAware(
                FedAvg(fraction_evaluate=0.0),
                stub,
                workload=WORKLOAD,
                # The plan's seconds are in the simulated boards' time.
                allowance_s=None,
                patience_s=10.0,
                survey_s=None,
                measures_left_out=False,
            )
            try:
                strategy.start(GridOfNodes(settings, run_id, pool), arrays, num_rounds=settings.rounds, timeout=60.0)
                ledger.note(run=run_id)
            except WattfleetError as error:
                # For example, no device is ready yet.
                _log.warning("run %s ended: %s", run_id, error)
                time.sleep(_PAUSE_S)


def serve_nodes(settings: FlowerSettings) -> None:
    """Run the nodes: answer messages until the process is ended."""
    be_task(SUPERLINK, SUPERLINK)
    ledger = Ledger(settings.ledger)
    settings.nodes.unlink(missing_ok=True)
    with Listener(str(settings.nodes), "AF_UNIX", backlog=64) as listener:
        while True:
            connection = listener.accept()
            threading.Thread(target=_answer, args=(settings, ledger, connection), daemon=True).start()


def _answer(settings: FlowerSettings, ledger: Ledger, connection: Connection) -> None:
    # The server may disconnect before or after the training.
    with connection, suppress(OSError, EOFError):
        connection.send(_reply(settings, ledger, connection.recv()))


def _reply(settings: FlowerSettings, ledger: Ledger, message: Message) -> Message:
    device_id = list(settings.sockets)[message.metadata.dst_node_id - _FIRST_NODE]
    node = {"device-id": device_id, "agent-socket": str(settings.sockets[device_id])}
    context = Context(SUPERLINK, message.metadata.dst_node_id, node, RecordDict(), {})
    plan_id = str(message.content.get(RECORD_KEY, {}).get("plan-id", ""))

    def train(request: Message, _: Context) -> Message:
        pause_every = max(1, settings.minibatches // _SLEEPS)
        for number in until_deadline(profiled(range(settings.minibatches))):
            if settings.training_s and number % pause_every == 0:
                time.sleep(settings.training_s / _SLEEPS)
        return trained(request)

    try:
        reply = power_mode_mod(message, context, train)
    except Exception as error:  # as Flower does with any exception of an app
        return Message(Error(_ERROR_IN_APP, f"{type(error).__name__}: {error}"), reply_to=message)
    told = {} if reply.has_error() else reply.content.get(RECORD_KEY, {})
    if OBSERVED_EPOCH_S_KEY in told:
        ledger.note(observed=plan_id, device=device_id, epoch_s=told[OBSERVED_EPOCH_S_KEY])
    return reply


# --- Process fleet ----------------------------------------------------------------------------------------------------

BOARD = "orin-nano"
PROCESSES = multiprocessing.get_context("forkserver")
# One process forks for all tests of a run, including those of `test_agent_chaos.py`.
PROCESSES.set_forkserver_preload(
    ["__main__", __name__, lasting_agent.__name__, "coordinator.cli.commands", "coordinator.server"]
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
        arguments += ["--http-address", "127.0.0.1:0", "--enrolment-address", "127.0.0.1:0"]
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
