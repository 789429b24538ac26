"""Fleets inside the test's process, without a SuperLink: a coordinator's state with fake boards, and real agents."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from coordinator.cli.client import CoordinatorClient
from coordinator.errors import NoDevicesError
from coordinator.server import BoundAddresses
from coordinator.settings import (
    CoordinatorSettings,
    PolicySettings,
    ProfilingSettings,
    ServerSettings,
    SiteSettings,
    StoreSettings,
)
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceResult
from edge_agent.devices.selection import open_virtual_board
from edge_agent.paths import device_folder
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.runtime.agent import run_agent
from tests.fakes.agent_settings import agent_settings
from tests.fakes.flower_in_process import RUN_ID, GridOfNodes, Node, OneRunGrid, PlannerStub, StatusError, trained
from tests.fakes.polling import until
from tests.fakes.served import serving
from tests.fakes.small_fleet import ORIN_FRONT, confirm_all, end_training, make_ready, train
from wattfleet.common.identity.channels import Endpoint
from wattfleet.core.budgets import InForce
from wattfleet.core.errors import InfeasibleBudgetError, NoCandidatesError
from wattfleet.core.modes import Workload
from wattfleet.core.planning import Allowance
from wattfleet.core.planning.policies import AllDevices
from wattfleet.simulation.flower_task import be_task
from wattfleet.simulation.run import CoordinatorView, RunSeen
from wattfleet_proto.assignment import RECORD_KEY
from wattfleet_proto.convert import assignment_to_message, plan_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import planning_pb2, session_pb2

# --- Planning fleet ---------------------------------------------------------------------------------------------------
# A coordinator's real fleet behind the planning service, with boards that train for the nodes of a fake grid.


RUN = str(RUN_ID)
APP = Workload("digits")
IDLE_W = 5.0
MODES = 50


def is_survey(message: Message) -> bool:
    return bool(message.content[RECORD_KEY].get("measures", False))


@dataclass
class Board:
    """What a board knows of the workload, and what a training to measure teaches it.

    Attributes:
        modes: modes that it has measured.
        length: minibatches in its epoch; None while it is unknown.
        learns_modes: modes that it measures in a training to measure.
        learns_length: the length that it learns in it; None for none.
    """

    modes: int = 0
    length: int | None = None
    learns_modes: int = 0
    learns_length: int | None = None


class PlanningFleet(PlannerStub):
    """Answers as the coordinator does, from the state of a real fleet whose devices confirm immediately."""

    def __init__(self, boards: dict[str, Board], nodes: dict[int, str], budget_w: float = 1000.0) -> None:
        super().__init__(nodes=dict(nodes))
        self.boards = boards
        self.fleet = Fleet(Allowance.of_site(budget_w), AllDevices())
        for node_id, device_id in nodes.items():
            make_ready(self.fleet, device_id, ORIN_FRONT, IDLE_W, node_id)
            self.know(device_id)
        self.fleet.flower.start_run(RUN, "FedAvg", 3, workload=APP)

    def know(self, device_id: str) -> None:
        """Report what a board knows of the workload."""
        board = self.boards[device_id]
        self.fleet.agents.report_front(device_id, ORIN_FRONT, IDLE_W, board.modes, "", APP, board.length)

    def budget(self, watts: float) -> None:
        """Change the budget, and let the devices confirm what they are told."""
        self.fleet.set_budget("site", InForce(watts, "override", False, "the operator"))
        confirm_all(self.fleet)

    @property
    def held(self) -> list[str]:
        """The devices that may draw more than their idle watts."""
        return sorted(self.fleet.rounds.grants.of_training())

    def begin(self, device_id: str) -> None:
        """Begin the training that a board was granted, if it was not stopped meanwhile."""
        confirm_all(self.fleet)
        known = self.fleet.rounds.grants.of(device_id)
        if known is not None and known.assignment is not None and known.phase is GrantPhase.WAITING:
            train(self.fleet, device_id)

    def end(self, device_id: str, measured: bool) -> None:
        """End a board's training; one to measure teaches it what it can learn, unless it was stopped."""
        known = self.fleet.rounds.grants.of(device_id)
        if known is None or known.is_over and known.assignment is not None:
            return
        if measured and known.assignment is not None:
            board = self.boards[device_id]
            wanted = 0 if known.grant.measuring is None else known.grant.measuring.modes
            board.modes += min(board.learns_modes, wanted)
            board.length = board.learns_length or board.length
            self.know(device_id)
        end_training(self.fleet, device_id)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        call = super().__getattr__(method)

        def finishing(request: Any, timeout: float, wait_for_ready: bool) -> Any:
            results = [DeviceResult(each.device_id, each.failure, None, None, each.share) for each in request.results]
            self.fleet.rounds.finish(request.plan_id, results, request.wall_s)
            self.fleet.flower.end_measuring(RUN)
            confirm_all(self.fleet)
            return call(request, timeout, wait_for_ready)

        return finishing if method == "FinishRound" else call

    def _plan(self, request: planning_pb2.PlanRoundRequest) -> planning_pb2.PlanRoundResponse:
        self.fleet.flower.stop_measuring(RUN, request.node_ids)
        confirm_all(self.fleet)
        try:
            record = self.fleet.flower.plan(RUN, request.round, request.node_ids, request.epochs)
        except (NoDevicesError, NoCandidatesError) as error:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        except InfeasibleBudgetError as error:
            raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None
        confirm_all(self.fleet)
        return plan_to_message(record.plan_id, record.plan, record.nodes)

    def _measuring(self, request: planning_pb2.PlanMeasuringRequest) -> planning_pb2.PlanMeasuringResponse:
        survey_s = request.survey_s if request.HasField("survey_s") else None
        asked = self.fleet.flower.request_measuring(RUN, request.node_ids, request.epochs, MODES, survey_s)
        plan = asked.planned()
        plan_id = ""
        if plan.assignments:
            plan_id = self.fleet.rounds.grants.measure(RUN, plan.assignments, plan.measuring)
        confirm_all(self.fleet)
        return planning_pb2.PlanMeasuringResponse(
            plan_id=plan_id,
            assignments=[assignment_to_message(each, asked.nodes[each.device_id]) for each in plan.assignments],
            waiting=plan.waiting,
            not_ready=plan.not_ready,
            predicting=plan.predicting,
        )


class BoardsGrid(GridOfNodes):
    """Nodes whose boards begin a training when they get its message, and end it when they reply.

    Attributes:
        planner: the fleet of the boards.
        at_poll: called before each look for replies.
    """

    def __init__(
        self, planner: PlanningFleet, train: Callable[[Message], Message] = trained, takes_s: float = 5.0
    ) -> None:
        """One node for each board, all with the same app."""
        super().__init__({n: Node(device_id, train, takes_s) for n, device_id in planner.nodes.items()})
        self.planner = planner
        self.at_poll: Callable[[], None] = lambda: None
        self._training: dict[str, Message] = {}

    def _send(self, messages: list[Message]) -> None:
        for message in messages:
            if message.metadata.message_type == "train" and "arrays" in message.content:
                self._training[message.metadata.message_id] = message
                self.planner.begin(self.planner.nodes[message.metadata.dst_node_id])
        super()._send(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.at_poll()
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            if (message := self._training.pop(reply.metadata.reply_to_message_id, None)) is not None:
                device_id = self.planner.nodes[message.metadata.dst_node_id]
                self.planner.end(device_id, is_survey(message) and not reply.has_error())
        return replies


# --- Fleet in process -------------------------------------------------------------------------------------------------
# A whole fleet inside the test's process: real gRPC on loopback, real agents, no SuperLink.

GRID_RUN_ID = 7
_WITHIN_S = 60.0


class InProcessGrid(OneRunGrid):
    """A grid whose nodes run the ClientApp immediately, in the caller's thread."""

    def __init__(
        self,
        app: ClientApp,
        nodes: Mapping[int, Mapping[str, Any]],
        run_config: Mapping[str, Any],
        run_id: int = GRID_RUN_ID,
    ) -> None:
        super().__init__(run_id)
        self.sent: list[Message] = []
        self.broken: set[int] = set()
        self._app = app
        self._nodes = nodes
        self._node_run_config = dict(run_config)
        self._replies: dict[str, Message] = {}
        be_task(run_id, node_id=1)

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=self._run_id)  # only its id, as a grid supplied by an app may return

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)

    def _send(self, messages: list[Message]) -> None:
        """Run the app on each node."""
        self._replies.update({message.metadata.message_id: self._answer(message) for message in messages})

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(message_id) for message_id in message_ids]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        self.sent.append(message)
        node_id = message.metadata.dst_node_id
        try:
            if node_id in self.broken:
                raise ConnectionError("the node is gone")
            # As over the network, the node gets a copy of its own.
            copy = Message(RecordDict(dict(message.content)), reply_to=message)
            copy.metadata.__dict__.update(message.metadata.__dict__)
            context = Context(
                run_id=self._run_id,
                node_id=node_id,
                node_config=dict(self._nodes[node_id]),
                state=RecordDict(),
                run_config=self._node_run_config,
            )
            return self._app(copy, context)
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)


@dataclass
class RunningFleet:
    """A coordinator and its agents on an event loop in a thread of its own."""

    addresses: BoundAddresses
    directory: Path
    device_ids: list[str]
    view: CoordinatorView
    loop: asyncio.AbstractEventLoop
    errors: list[BaseException] = field(default_factory=list)

    def socket(self, device_id: str) -> Path:
        return self.directory / f"{device_id}.sock"

    def newest_run(self) -> RunSeen:
        """The newest run; Flower's id has a suffix if the id was used before."""
        with CoordinatorClient(Endpoint(self.addresses.address)) as client:
            return self.view.run(client.runs()[-1].run_id)

    def nodes(self) -> dict[int, dict[str, Any]]:
        """Flower nodes, one per device, with ids as large as Flower's."""
        return {
            2**63 + 11 * k: {"device-id": device, "partition-id": k, "agent-socket": str(self.socket(device))}
            for k, device in enumerate(self.device_ids)
        }


@contextmanager
def running_fleet(
    directory: Path,
    specs: Mapping[str, str],
    *,
    policy: PolicySettings,
    site_budget_w: float,
    profile_modes: int = 12,
    modes_first: int | None = 10_000,
    minibatches_per_epoch: int | None = 100,
    duty: str | None = None,
) -> Iterator[RunningFleet]:
    """A coordinator and agents, with every agent ready to train.

    All modes are measured before the first round, unless `modes_first` says otherwise; with None, they are measured
    while apps train.
    """
    loop = asyncio.new_event_loop()
    stop, bound = asyncio.Event(), threading.Event()
    found: list[BoundAddresses] = []
    errors: list[BaseException] = []

    async def everything() -> None:
        settings = CoordinatorSettings(
            server=ServerSettings(address="127.0.0.1:0", http_address="127.0.0.1:0", stop_grace_s=0.05),
            store=StoreSettings(location=str(directory / "coordinator.db")),
            site=SiteSettings(budget_w=site_budget_w),
            policy=policy,
            profiling=ProfilingSettings(modes=profile_modes),
        )
        async with serving(settings) as client:
            found.append(client.bound)
            bound.set()
            boards = {device_id: open_virtual_board(spec, k) for k, (device_id, spec) in enumerate(specs.items())}
            agents = [
                run_agent(
                    agent_settings(
                        directory / device_id,
                        device_id,
                        coordinator=client.bound.address,
                        socket=directory / f"{device_id}.sock",
                        seed=k,
                        modes_first=modes_first,
                        minibatches_per_epoch=minibatches_per_epoch,
                        simulated_duty=duty,
                    ),
                    board,
                    built_in_workload(board.step),
                    device_folder(directory / device_id),
                    stop,
                )
                for k, (device_id, board) in enumerate(boards.items())
            ]
            await asyncio.gather(*agents)

    def run() -> None:
        try:
            loop.run_until_complete(everything())
        except BaseException as error:  # made available to the test's own thread below
            errors.append(error)
            bound.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert bound.wait(_WITHIN_S)
        if errors:
            raise errors[0]
        with CoordinatorView(Endpoint(found[0].address)) as view:
            until(lambda: all_ready(view, len(specs)) or bool(errors))
            yield RunningFleet(found[0], directory, list(specs), view, loop, errors)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_WITHIN_S)
        loop.close()
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def all_ready(view: CoordinatorView, count: int) -> bool:
    return [device.state for device in view.devices()].count(session_pb2.DEVICE_STATE_READY) == count
