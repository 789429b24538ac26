"""What Flower's server and a coordinator of a large fleet say to each other fits into their messages."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from flwr.app import Error

from coordinator.server import OPTIONS
from tests.fakes.flower_in_process import GridOfNodes, Node, SetClock
from wattfleet_flower.server.errors import RefusedError
from wattfleet_flower.server.nodes import Nodes
from wattfleet_flower.server.planner import Planner
from wattfleet_flower.server.rounds import Patience, PlannedRound, PlannedRounds
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

DEVICES = 10_000
IDS = [f"{k:05}".rjust(90, "x") for k in range(DEVICES)]


class Coordinator(planning_pb2_grpc.PlanningServiceServicer):
    """Notes what comes; its plans are those of a large fleet."""

    def __init__(self) -> None:
        self.bound: dict[int, str] = {}
        self.finished: list[Any] = []

    def ResolveNodes(self, request: Any, context: Any) -> Any:  # noqa: N802 - named by the protocol
        return planning_pb2.ResolveNodesResponse(unknown_node_ids=request.node_ids)

    def BindNodes(self, request: Any, context: Any) -> Any:  # noqa: N802 - named by the protocol
        self.bound.update({binding.node_id: binding.device_id for binding in request.bindings})
        return planning_pb2.BindNodesResponse()

    def PlanRound(self, request: Any, context: Any) -> Any:  # noqa: N802 - named by the protocol
        why = "other devices make more progress per second".ljust(400, ".")
        return planning_pb2.PlanRoundResponse(
            decisions=[planning_pb2.Decision(device_id=device_id, reason=why) for device_id in IDS]
        )

    def FinishRound(self, request: Any, context: Any) -> Any:  # noqa: N802 - named by the protocol
        self.finished.append(request)
        return planning_pb2.FinishRoundResponse()


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def planner(coordinator: Coordinator) -> Iterator[Planner]:
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, options=OPTIONS)
        planning_pb2_grpc.add_PlanningServiceServicer_to_server(coordinator, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield Planner(f"127.0.0.1:{port}")
        server.stop(None).wait()


def test_the_plan_of_a_large_fleet_arrives(planner: Planner) -> None:
    plan = planner.ask("PlanRound", planning_pb2.PlanRoundRequest(run_id="run", round=1))
    assert plan.ByteSize() > 4 * 1024 * 1024
    assert [decision.device_id for decision in plan.decisions] == IDS


def test_all_nodes_of_a_large_fleet_are_tied_to_their_devices(planner: Planner, coordinator: Coordinator) -> None:
    grid = GridOfNodes({2**63 + k: Node(device_id) for k, device_id in enumerate(IDS)})
    Nodes(planner, 60.0, SetClock()).identified(grid, list(grid.nodes))
    assert coordinator.bound == {2**63 + k: device_id for k, device_id in enumerate(IDS)}


def finish(planner: Planner, failed: int) -> None:
    """A round of the whole fleet, of which some raised, each with much to say."""
    sent = [(SimpleNamespace(message_id=f"message-{k}", dst_node_id=k), one) for k, one in enumerate(IDS[:5000])]
    replies: list[Any] = [
        SimpleNamespace(
            metadata=SimpleNamespace(reply_to_message_id=f"message-{k}"),
            has_error=lambda: True,
            error=Error(2, f"RuntimeError of {IDS[k]}: ".ljust(290, ".")),
        )
        for k in range(failed)
    ]
    plan = planning_pb2.PlanRoundResponse(plan_id="run/1")
    rounds = PlannedRounds(planner, "FedAvg", 1.0, Patience(None, 60.0, 60.0), SetClock())
    rounds.finish(PlannedRound(plan, 1, 1000.0, 90.0, sent), replies, "num-examples")


def test_a_round_in_which_most_of_a_large_fleet_failed_is_finished(planner: Planner, coordinator: Coordinator) -> None:
    finish(planner, 3300)
    [told] = coordinator.finished
    assert [result.device_id for result in told.results] == IDS[:5000]
    assert all(result.failure.startswith("the app raised: RuntimeError of ") for result in told.results[:3300])
    assert {result.failure for result in told.results[3300:]} == {"no reply within 90 s"}


def test_a_round_in_which_few_failed_says_all_of_why(planner: Planner, coordinator: Coordinator) -> None:
    finish(planner, 100)
    [told] = coordinator.finished
    assert len(told.results[0].failure) > 290


def test_what_is_longer_than_a_coordinator_takes_is_refused_rather_than_repeated_for_ever(planner: Planner) -> None:
    bindings = [planning_pb2.NodeBinding(node_id=k, device_id=one) for k, one in enumerate(10 * IDS)]
    with pytest.raises(RefusedError, match="larger than max"):
        planner.tell("BindNodes", planning_pb2.BindNodesRequest(bindings=bindings))
    assert planner.untold == 0
