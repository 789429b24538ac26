"""A peer that requests too much is refused or slowed down, and the others are not affected."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.served import Agent, serving_client, status
from wattfleet_proto.v1 import session_pb2, session_pb2_grpc, view_pb2

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_one_connection_has_a_hundred_sessions_and_another_connection_is_free(
    config: CoordinatorSettings,
) -> None:
    async with serving_client(config) as client:
        agents = [client.agent() for _ in range(100)]
        for k, agent in enumerate(agents):
            await agent.hello(f"device-{k}")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.agent().hello("one-more")
        assert status(error)[0] is EXHAUSTED and "calls_per_connection" in status(error)[1]
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(client.bound.address, options) as other:
            await Agent(session_pb2_grpc.SessionServiceStub(other)).hello("elsewhere")
        agents[0].call.cancel()
        await asyncio.sleep(0.1)
        await client.agent().hello("device-0")


async def test_a_host_has_as_many_calls_as_its_setting_says(config: CoordinatorSettings) -> None:
    async with serving_client(config.with_values(peers={"calls_per_host": 2})) as client:
        for k in range(2):
            await client.agent().hello(f"device-{k}")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.agent().hello("one-more")
        assert status(error)[0] is EXHAUSTED and "calls_per_host" in status(error)[1]


async def test_a_host_that_sends_many_requests_is_refused_while_sessions_go_on(config: CoordinatorSettings) -> None:
    async with serving_client(config.with_values(peers={"requests_per_s": 5.0})) as client:
        agent = client.agent()
        await agent.hello("orin")
        calls = [client.view.GetFleet(view_pb2.GetFleetRequest()) for _ in range(500)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [each for each in answers if isinstance(each, grpc.aio.AioRpcError)]
        assert 0 < len(refused) < 500
        assert {each.code() for each in refused} == {EXHAUSTED}
        assert "requests_per_s" in str(refused[0].details())
        await agent.send(lease=session_pb2.Lease())
        await asyncio.sleep(0.5)
        await client.view.GetFleet(view_pb2.GetFleetRequest())


async def test_a_session_that_sends_many_messages_is_slowed_down(config: CoordinatorSettings) -> None:
    loop = asyncio.get_running_loop()
    async with serving_client(config.with_values(peers={"messages_per_s": 100.0, "messages_at_once": 50})) as client:
        agent, other = client.agent(), client.agent()
        await agent.hello("orin")
        await other.hello("nano")
        begun_s = loop.time()
        for _ in range(150):
            await agent.send(lease=session_pb2.Lease())
        assert loop.time() - begun_s > 0.9, "100 messages beyond the first 50 take a second"
        await other.send(lease=session_pb2.Lease())
