"""A coordinator's real fleet behind the planning service, with boards that train for the nodes of a fake grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from flwr.app import Message

from coordinator.errors import NoDevicesError
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceResult
from tests.fakes.flower_in_process import RUN_ID, GridOfNodes, Node, PlannerStub, StatusError, trained
from tests.fakes.obedient_devices import confirm_all, end_training, train
from tests.fakes.small_fleet import ORIN_FRONT, make_ready
from wattfleet.budgets import InForce
from wattfleet.errors import InfeasibleBudgetError, NoCandidatesError
from wattfleet.modes import Workload
from wattfleet.planning import Allowance
from wattfleet.planning.policies import AllDevices
from wattfleet_proto.assignment import RECORD_KEY
from wattfleet_proto.convert import assignment_to_message, plan_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import planning_pb2

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
