"""PowerAware over a slow link: the timeout of attempts to reach the coordinator adapts to the link."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from tests.fakes.flower_in_process import PlannerStub, RecordingClock, StatusError
from tests.fakes.power_aware_runs import A
from wattfleet_flower.server import planning_client
from wattfleet_flower.server.planning_client import PlanningClient
from wattfleet_identity.channels import Endpoint
from wattfleet_io.clock import SystemClock
from wattfleet_io.coordinator_channel import CoordinatorUnreachableError
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

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
