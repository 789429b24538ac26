"""The planning client: messages of a large fleet within their limits, and timeouts that adapt to a slow link."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from flwr.app import Error

from coordinator.listeners import OPTIONS
from tests.fakes.flower_in_process import A, GridOfNodes, Node, PlannerStub, RecordingClock, StatusError
from wattfleet.common.clock import SystemClock
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError
from wattfleet.common.identity.channels import Endpoint
from wattfleet.flower.server import planning_client
from wattfleet.flower.server.away import AwayPolicy
from wattfleet.flower.server.errors import CoordinatorRefusedError
from wattfleet.flower.server.names import RunNaming, WorkloadNaming
from wattfleet.flower.server.nodes import Nodes
from wattfleet.flower.server.planning_client import PlanningClient
from wattfleet.flower.server.replies import PlannedRound
from wattfleet.flower.server.rounds import PlannedRounds, WaitLimits
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

# --- Flower planner ---------------------------------------------------------------------------------------------------
# The planning client with a large fleet: every message is within its size limit.


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
        planner, "FedAvg", False, 1.0, WorkloadNaming(), RunNaming(), None, None, limits, AwayPolicy(), RecordingClock()
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
    with pytest.raises(CoordinatorRefusedError, match="larger than max"):
        planner.report("BindNodes", lambda: planning_pb2.BindNodesRequest(bindings=bindings))
    assert planner.pending_reports == 0


# --- Slow link --------------------------------------------------------------------------------------------------------
# PowerAware over a slow link: the timeout of attempts to reach the coordinator adapts to the link.

LOOKUP = planning_pb2.ResolveNodesRequest(node_ids=[A])


class SlowLink:
    """A planner's stub over a link with a round-trip time, in virtual time; gRPC stays connected."""

    def __init__(self, planner: PlannerStub, clock: RecordingClock, round_trip_s: float) -> None:
        self._planner, self._clock, self.round_trip_s = planner, clock, round_trip_s

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(request: Any, timeout: float, wait_for_ready: bool) -> Any:
            self._clock.advance(min(self.round_trip_s, timeout))
            if self.round_trip_s > timeout:
                raise StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            return getattr(self._planner, method)(request, timeout=timeout, wait_for_ready=wait_for_ready)

        return call


def attempts(client: PlanningClient, most: int = 10) -> int:
    """The number of attempts until the coordinator answers."""
    for number in range(1, most + 1):
        with suppress(CoordinatorUnreachableError):
            client.connect()
            return number
    raise AssertionError(f"no answer in {most} attempts")


@pytest.fixture
def clock() -> RecordingClock:
    return RecordingClock()


def lost(client: PlanningClient, planner: PlannerStub) -> None:
    """Let the coordinator vanish and come back."""
    planner.away = True
    with pytest.raises(CoordinatorUnreachableError):
        client.call("ResolveNodes", LOOKUP)
    planner.away = False


def test_a_link_of_24_s_each_way_recovers_at_the_first_attempt(clock: RecordingClock) -> None:
    planner = PlannerStub()
    client = PlanningClient(SlowLink(planner, clock, 2 * 2.4), clock)
    client.call("ResolveNodes", LOOKUP)
    lost(client, planner)
    assert attempts(client) == 1


def test_a_link_that_became_slow_during_an_outage_recovers(clock: RecordingClock) -> None:
    planner = PlannerStub()
    link = SlowLink(planner, clock, 0.02)
    client = PlanningClient(link, clock)
    client.call("ResolveNodes", LOOKUP)
    lost(client, planner)
    link.round_trip_s = 2 * 2.4
    assert attempts(client) == 3
    lost(client, planner)
    assert attempts(client) == 1, "as measured since"


def test_attempts_start_short_and_get_longer_while_nothing_answers(clock: RecordingClock) -> None:
    planner = PlannerStub()
    link = SlowLink(planner, clock, 0.02)
    client = PlanningClient(link, clock)
    client.call("ResolveNodes", LOOKUP)
    link.round_trip_s = float("inf")
    client.report("ReportMetrics", planning_pb2.ReportMetricsRequest)
    took_s = []
    for _ in range(6):
        began_s = clock.now_s()
        with pytest.raises(CoordinatorUnreachableError):
            client.connect()
        took_s.append(clock.now_s() - began_s)
    assert took_s == pytest.approx([2, 4, 8, 15, 15, 15])


def test_an_attempt_never_takes_longer_than_a_minute(clock: RecordingClock) -> None:
    planner = PlannerStub()
    link = SlowLink(planner, clock, 14.0)
    client = PlanningClient(link, clock)
    client.call("ResolveNodes", LOOKUP)
    link.round_trip_s = float("inf")
    began_s = clock.now_s()
    with pytest.raises(CoordinatorUnreachableError):
        client.connect()
    assert clock.now_s() - began_s == 60.0


def test_a_round_does_not_wait_for_a_coordinator_that_answers_nothing(clock: RecordingClock) -> None:
    planner = PlannerStub()
    link = SlowLink(planner, clock, 0.02)
    client = PlanningClient(link, clock)
    client.connect()
    link.round_trip_s = float("inf")
    began_s = clock.now_s()
    with pytest.raises(CoordinatorUnreachableError):
        client.call_briefly("GetPlan", planning_pb2.GetPlanRequest(plan_id="7/1"))
    client.report("FinishRound", planning_pb2.FinishRoundRequest)
    assert clock.now_s() - began_s == pytest.approx(2.0)
    assert client.pending_reports == 1


def test_a_report_of_a_round_waits_for_5_s_or_as_long_as_a_slow_link_needs(clock: RecordingClock) -> None:
    for round_trip_s, waits_s in ((0.02, 5.0), (4.0, 20.0)):
        link = SlowLink(PlannerStub(), clock, round_trip_s)
        client = PlanningClient(link, clock)
        client.connect()
        link.round_trip_s = float("inf")
        began_s = clock.now_s()
        client.report("FinishRound", planning_pb2.FinishRoundRequest)
        assert (clock.now_s() - began_s, client.pending_reports) == (pytest.approx(waits_s), 1)


# --- a real connection through a proxy that delays its bytes --------------------------------------------------------


class _Lookup(planning_pb2_grpc.PlanningServiceServicer):
    def ResolveNodes(self, request: Any, context: Any) -> Any:  # noqa: N802 - named by the protocol
        return planning_pb2.ResolveNodesResponse(unknown_node_ids=request.node_ids)


class DelayingProxy:
    """Forwards connections to a port, with each piece of data delayed."""

    def __init__(self, port: int, delay_s: float) -> None:
        self.is_up = True
        self._port, self._delay_s = port, delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self) -> None:
        """Close all connections, and new ones until it is up again."""
        self.is_up = False
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.drop()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self.is_up:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                for source, target in ((near, far), (far, near)):
                    pieces: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
                    threading.Thread(target=self._read, args=(source, pieces), daemon=True).start()
                    threading.Thread(target=self._write, args=(target, pieces), daemon=True).start()

    def _read(self, source: socket.socket, pieces: SimpleQueue[tuple[float, bytes]]) -> None:
        piece = b"-"
        while piece:
            try:
                piece = source.recv(65_536)
            except OSError:
                piece = b""
            pieces.put((time.monotonic() + self._delay_s, piece))

    def _write(self, target: socket.socket, pieces: SimpleQueue[tuple[float, bytes]]) -> None:
        with suppress(OSError), target:
            while True:
                due_s, piece = pieces.get()
                if not piece:
                    return
                time.sleep(max(0.0, due_s - time.monotonic()))
                target.sendall(piece)


@contextmanager
def coordinator_behind(delay_s: float) -> Iterator[DelayingProxy]:
    server = grpc.server(ThreadPoolExecutor(2))
    planning_pb2_grpc.add_PlanningServiceServicer_to_server(_Lookup(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    proxy = DelayingProxy(port, delay_s)
    try:
        yield proxy
    finally:
        proxy.close()
        server.stop(None).wait()


def test_a_new_connection_over_a_slow_link_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # A tenth of 2.4 s each way, and a tenth of the fixed timeout.
    monkeypatch.setattr(planning_client, "_RECONNECT_TIMEOUT_S", 0.2)
    with coordinator_behind(delay_s=0.24) as proxy:
        client = PlanningClient(Endpoint.of(proxy.address, None), SystemClock())
        client.connect()
        client.call("ResolveNodes", LOOKUP)
        monkeypatch.setattr(planning_client, "_CONNECT_TIMEOUT_S", 0.2)
        proxy.drop()
        with pytest.raises(CoordinatorUnreachableError):
            client.call("ResolveNodes", LOOKUP)
        proxy.is_up = True
        assert attempts(client)
