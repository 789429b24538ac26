"""Flower's server and its nodes in two processes, so that each can end without the other.

PowerAware, the mod and the agents are real. Instead of Flower's SuperLink and SuperNodes, the nodes listen on a unix
socket and accept one message per connection. Both processes record acknowledged events in a ledger, one JSON object a
line: `planned` and `finished` rounds, completed runs, and the trainings that an agent has `observed`.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import APP, SUPERLINK, gone, trained
from tests.fakes.ledger import Ledger
from tests.fakes.one_run_grid import OneRunGrid
from wattfleet.errors import WattfleetError
from wattfleet.modes import WorkloadFacts
from wattfleet_flower import PowerAware, power_mode_mod, profiled, until_deadline
from wattfleet_identity.channels import Endpoint
from wattfleet_proto.assignment import OBSERVED_EPOCH_S_KEY, RECORD_KEY
from wattfleet_proto.v1 import planning_pb2_grpc
from wattfleet_simulation.flower_task import be_task

_PAUSE_S = 0.2
_SLEEPS = 20
_ERROR_IN_APP = 8
_FIRST_NODE = 10

WORKLOAD = "digits"
_ARRAYS = (np.zeros((20, 30)), np.ones(20))
FACTS = WorkloadFacts(parameters=sum(each.size for each in _ARRAYS))
"""What is known of the workload: a board's physics depend on it."""

_log = logging.getLogger(__name__)


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
