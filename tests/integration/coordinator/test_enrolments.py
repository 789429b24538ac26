"""The number of devices enrolled over one connection is limited: each adds metric lines and lengthens all leases."""

from __future__ import annotations

import grpc
import pytest

from coordinator.settings import CoordinatorSettings, SessionSettings
from tests.fakes.served import Client, serving_client, status


async def enrol(client: Client, channel: grpc.aio.Channel, device_id: str) -> None:
    """Open a session for one device over the caller's connection, and close it immediately."""
    agent = Client(client.bound, channel, client.stop, client.running).agent()
    await agent.hello(device_id)
    await agent.goodbye()


async def test_a_connection_enrols_a_limited_number_of_devices(config: CoordinatorSettings) -> None:
    config = config.with_values(sessions={"max_new_devices_per_connection": 20})

    async with serving_client(config) as client:
        for k in range(20):
            await enrol(client, client.channel, f"device-{k}")
        for k in range(20, 25):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await enrol(client, client.channel, f"device-{k}")
            assert status(refused) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"device-{k}: this connection has reached its limit of 20 new devices: give each agent its own"
                " connection, or raise the coordinator's setting sessions.max_new_devices_per_connection",
            )
        await enrol(client, client.channel, "device-3")  # known devices reconnect
        async with grpc.aio.insecure_channel(
            client.bound.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as other:
            await enrol(client, other, "device-20")
        assert len(await client.devices()) == 21


async def test_a_host_enrols_a_limited_number_of_devices_over_any_connections(config: CoordinatorSettings) -> None:
    config = config.with_values(sessions={"max_new_devices_per_host": 3})

    async def enrol_anew(client: Client, device_id: str) -> None:
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(client.bound.address, options=own) as channel:
            await enrol(client, channel, device_id)

    async with serving_client(config) as client:
        for k in range(3):
            await enrol_anew(client, f"device-{k}")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await enrol_anew(client, "device-3")
        assert status(refused) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "device-3: this host has reached its limit of 3 new devices: if its devices are yours, raise the"
            " coordinator's setting sessions.max_new_devices_per_host",
        )
        await enrol_anew(client, "device-2")  # known devices reconnect


async def test_by_default_one_connection_leaves_the_leases_as_they_are(config: CoordinatorSettings) -> None:
    settings = SessionSettings()
    assert settings.max_new_devices_per_connection / settings.renewals_per_s < settings.lease_s


async def test_a_refused_device_does_not_count(config: CoordinatorSettings) -> None:
    config = config.with_values(sessions={"max_new_devices_per_connection": 1})

    async with serving_client(config) as client:
        with pytest.raises(grpc.aio.AioRpcError, match="printable"):
            await enrol(client, client.channel, "a\0b")
        await enrol(client, client.channel, "orin")
