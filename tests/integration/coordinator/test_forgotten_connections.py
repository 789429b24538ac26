"""Connections that a firewall has forgotten: both sides notice, and clients open new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import psutil
import pytest

from coordinator import listeners
from coordinator.settings import CoordinatorSettings
from tests.fakes.faulty_link import faulty_link
from tests.fakes.polling import eventually
from tests.fakes.served import Agent, serving
from wattfleet_identity import channels
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc, session_pb2_grpc

_TEN_TIMES_SOONER = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")


def sooner(options: Any) -> list[tuple[str, Any]]:
    """The same options with pings ten times as often."""
    return [(name, value // 10 if name in _TEN_TIMES_SOONER else value) for name, value in options]


def failures_before_an_answer(call: Callable[[Any], object], stub: Any) -> int:
    """The number of failed calls before one succeeds; a busy machine may lose more than the call in progress."""
    for failed in range(4):
        with suppress(grpc.RpcError):
            call(stub)
            return failed
    pytest.fail("the client goes on with a connection that a firewall has forgotten")


async def test_a_client_uses_a_new_connection(config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_CLIENT_OPTIONS", sooner(channels._CLIENT_OPTIONS))  # noqa: SLF001

    def resolve(planning: Any) -> object:
        return planning.ResolveNodes(planning_pb2.ResolveNodesRequest(), timeout=10.0, wait_for_ready=True)

    async with serving(config) as client, faulty_link(client.bound.address) as link:
        with channels.open_channel(link.address, None) as channel:
            planning = planning_pb2_grpc.PlanningServiceStub(channel)
            await asyncio.to_thread(resolve, planning)
            link.forget()
            failed = await asyncio.to_thread(failures_before_an_answer, resolve, planning)
            assert failed > 0, "nothing was in progress on the forgotten connection"


async def test_the_coordinator_closes_them(config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        listeners,
        "OPTIONS",
        [(name, value // 60 if name in _TEN_TIMES_SOONER else value) for name, value in listeners.OPTIONS],
    )
    config = config.with_values(sessions={"lease_s": 1.0, "check_s": 0.1})
    async with serving(config) as client, faulty_link(client.bound.address) as link:
        _, _, port = client.bound.address.rpartition(":")

        def connections() -> int:
            return sum(
                each.laddr.port == int(port) and each.status == psutil.CONN_ESTABLISHED
                for each in psutil.Process().net_connections("tcp")
                if each.laddr
            )

        await client.states()
        before = connections()
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with channels.open_async_channel(link.address, None, options) as channel:
            agent = Agent(session_pb2_grpc.SessionServiceStub(channel))
            await agent.hello("orin")
            assert connections() == before + 1
            link.forget()
            await eventually(lambda: connections() == before)
