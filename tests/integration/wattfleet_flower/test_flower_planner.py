"""The planning client with a large fleet: every message is within its size limit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from flwr.app import Error

from coordinator.listeners import OPTIONS
from tests.fakes.flower_in_process import GridOfNodes, Node, RecordingClock
from wattfleet_flower.server.away import AwayPolicy
from wattfleet_flower.server.errors import RefusedError
from wattfleet_flower.server.names import RunNaming, WorkloadNaming
from wattfleet_flower.server.nodes import Nodes
from wattfleet_flower.server.planning_client import PlanningClient
from wattfleet_flower.server.replies import PlannedRound
from wattfleet_flower.server.rounds import PlannedRounds, WaitLimits
from wattfleet_identity.channels import Endpoint
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

DEVICES = 10_000
IDS = [f"{k:05}".rjust(90, "x") for k in range(DEVICES)]


class Coordinator(planning_pb2_grpc.PlanningServiceServicer):
    """A coordinator of a large fleet that records its requests."""

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
def planner(coordinator: Coordinator) -> Iterator[PlanningClient]:
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, options=OPTIONS)
        planning_pb2_grpc.add_PlanningServiceServicer_to_server(coordinator, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield PlanningClient(Endpoint.of(f"127.0.0.1:{port}", None), RecordingClock())
        server.stop(None).wait()


def test_the_plan_of_a_large_fleet_arrives(planner: PlanningClient) -> None:
    plan = planner.call("PlanRound", planning_pb2.PlanRoundRequest(run_id="run", round=1))
    assert plan.ByteSize() > 4 * 1024 * 1024
    assert [decision.device_id for decision in plan.decisions] == IDS


def test_all_nodes_of_a_large_fleet_are_bound(planner: PlanningClient, coordinator: Coordinator) -> None:
    grid = GridOfNodes({2**63 + k: Node(device_id) for k, device_id in enumerate(IDS)})
    Nodes(planner, 60.0, RecordingClock()).identified(grid, list(grid.nodes))
    assert coordinator.bound == {2**63 + k: device_id for k, device_id in enumerate(IDS)}


def finish(planner: PlanningClient, failed: int) -> None:
    """Report a round of 5,000 devices, some of which failed with a long reason."""
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
    limits = WaitLimits(None, 60.0, 60.0)
    rounds = PlannedRounds(
        planner, "FedAvg", 1.0, WorkloadNaming(), RunNaming(), None, None, limits, AwayPolicy(), RecordingClock()
    )
    rounds.finish(PlannedRound(plan, 1, 1000.0, 90.0, sent), replies, "num-examples")


def test_a_round_in_which_most_devices_failed_is_reported(planner: PlanningClient, coordinator: Coordinator) -> None:
    finish(planner, 3300)
    [told] = coordinator.finished
    assert [result.device_id for result in told.results] == IDS[:5000]
    assert all(result.failure.startswith("the app raised: RuntimeError of ") for result in told.results[:3300])
    assert {result.failure for result in told.results[3300:]} == {"no reply within 90 s"}


def test_few_failures_are_reported_in_full(planner: PlanningClient, coordinator: Coordinator) -> None:
    finish(planner, 100)
    [told] = coordinator.finished
    assert len(told.results[0].failure) > 290


def test_a_request_above_the_size_limit_is_refused_and_not_kept(
    planner: PlanningClient,
) -> None:
    bindings = [planning_pb2.NodeBinding(node_id=k, device_id=one) for k, one in enumerate(10 * IDS)]
    with pytest.raises(RefusedError, match="larger than max"):
        planner.report("BindNodes", lambda: planning_pb2.BindNodesRequest(bindings=bindings))
    assert planner.pending_reports == 0
