"""Connections to the gRPC port without a request are closed, so that they do not exhaust the file descriptors."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.served import serving_client
from wattfleet_io.addresses import split_address

# HTTP/2's preface, and empty settings.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


async def until_closed(address: str, greeting: bytes) -> None:
    """Connect, send some bytes, and read until the other side closes."""
    reader, writer = await asyncio.open_connection(*split_address(address))
    writer.write(greeting)
    try:
        async with asyncio.timeout(60):
            while await reader.read(65_536):
                pass
    except ConnectionResetError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("greeting", [GREETING, b""], ids=["without a request", "without a word"])
async def test_an_idle_connection_is_closed_and_a_session_lasts(config: CoordinatorSettings, greeting: bytes) -> None:
    async with serving_client(config.with_values(server={"idle_connection_s": 1.0})) as client:
        agent = client.agent()
        await agent.hello("orin")
        await until_closed(client.bound.address, greeting)
        assert "orin" in await client.devices()
        await agent.goodbye()
