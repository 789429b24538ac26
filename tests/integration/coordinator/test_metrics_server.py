"""Connections to /metrics that are silent or slow do not block agents or other readers."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

import grpc
import pytest
from prometheus_client import Metric

from coordinator.metrics.fleet_collector import FleetCollector
from coordinator.metrics.server import metrics_served
from coordinator.settings import ServerSettings
from tests.fakes.coordinator_process import CoordinatorProcess
from tests.fakes.served import Agent
from tests.fakes.small_fleet import small_fleet
from wattfleet_io.addresses import split_address
from wattfleet_proto.v1 import session_pb2_grpc

_DESCRIPTORS = 256
_IDLE = 400
_WITHIN_S = 60.0


def served(settings: ServerSettings) -> AbstractContextManager[int]:
    """The port of a small fleet's metrics."""
    return metrics_served(small_fleet(), "127.0.0.1", 0, settings)


def connect(opened: ExitStack, port: int, count: int) -> list[socket.socket]:
    """Connections that send nothing yet."""
    return [
        opened.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=_WITHIN_S)))
        for _ in range(count)
    ]


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_WITHIN_S) as response:
        return response.read().decode()  # type: ignore[no-any-return]


def ends(connection: socket.socket) -> bool:
    """Wait until the server closes a connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_idle_connections_take_a_limited_number_of_threads(quick_to_stop: None) -> None:
    before = threading.active_count()
    with served(ServerSettings(max_metrics_connections=4)) as port, ExitStack() as opened:
        idle = connect(opened, port, 50)
        assert all(ends(each) for each in idle[:46]), "the oldest ones make room"
        assert threading.active_count() <= before + 1 + 4
        assert "wattfleet_devices" in scrape(port)


def test_a_request_that_is_being_answered_is_not_cut_off(quick_to_stop: None, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    collect = FleetCollector.collect

    def slow(self: FleetCollector) -> Iterator[Metric]:
        begun.set()
        assert may_end.wait(_WITHIN_S)
        yield from collect(self)

    with served(ServerSettings(max_metrics_connections=1)) as port, ExitStack() as opened:
        monkeypatch.setattr(FleetCollector, "collect", slow)
        [asking] = connect(opened, port, 1)
        asking.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert begun.wait(_WITHIN_S)
        [further] = connect(opened, port, 1)
        assert ends(further), "it is refused"
        may_end.set()
        assert asking.recv(12) == b"HTTP/1.0 200"


def test_a_connection_that_is_idle_or_slow_is_closed(quick_to_stop: None) -> None:
    with served(ServerSettings(metrics_timeout_s=0.3)) as port, ExitStack() as opened:
        idle, slow = connect(opened, port, 2)
        stop = threading.Event()

        def drip() -> None:
            try:
                slow.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
                while not stop.wait(0.02):
                    slow.sendall(b"x")
            except OSError:
                pass

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert ends(idle) and ends(slow)
        finally:
            stop.set()
            dripping.join()
        assert "wattfleet_devices" in scrape(port)


async def test_agents_connect_while_idle_connections_to_metrics_abound(tmp_path: Path) -> None:
    # Not `preexec_fn`: this process has threads of gRPC, which a fork would break.
    limited = ("sh", "-c", f'ulimit -n {_DESCRIPTORS}; exec "$@"', "sh")
    store = tmp_path / "coordinator.db"
    coordinator = CoordinatorProcess(tmp_path, store, "--site-budget-w", "100", wrapper=limited)
    await coordinator.start()
    try:
        addresses = coordinator.addresses
        with ExitStack() as opened:
            _, port = split_address(addresses["metrics_address"])
            connect(opened, port, _IDLE)
            async with asyncio.timeout(_WITHIN_S), grpc.aio.insecure_channel(addresses["address"]) as channel:
                await Agent(session_pb2_grpc.SessionServiceStub(channel)).hello("orin")
            assert "wattfleet_devices" in scrape(port)
    finally:
        assert coordinator.stop() == 0
