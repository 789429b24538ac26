"""The faulty link: each fault affects a connection to an echo server as documented."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.fakes.connections import Direction, FaultyLink, faulty_link
from tests.fakes.polling import eventually


class Echo:
    """A server that returns the bytes it receives and counts them."""

    def __init__(self) -> None:
        self.got = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(4096):
                self.got += piece
                writer.write(piece)
                await writer.drain()
        writer.close()


class Client:
    """A client connection through the link."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, words: bytes) -> bytes:
        self.writer.write(words)
        return await self.reader.readexactly(len(words))

    async def hears_nothing(self) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(self.reader.read(1), 0.1)


@asynccontextmanager
async def echo_behind_link() -> AsyncIterator[tuple[Echo, FaultyLink]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with faulty_link(f"127.0.0.1:{port}") as link:
            yield echo, link
    finally:
        server.close()


@asynccontextmanager
async def connected(link: FaultyLink) -> AsyncIterator[Client]:
    host, port = link.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def took_s(client: Client, words: bytes) -> float:
    begun_s = time.monotonic()
    assert await client.ask(words) == words
    return time.monotonic() - begun_s


async def test_without_a_fault_bytes_and_ends_pass_unchanged() -> None:
    words = bytes(range(256)) * 2_000
    async with echo_behind_link() as (echo, link), connected(link) as client:
        assert await client.ask(words) == words
        client.writer.write_eof()
        assert await client.reader.read() == b""
        await eventually(lambda: link.connections == 0)
    assert echo.got == words


async def test_latency_holds_in_each_direction_and_ends_when_healed() -> None:
    async with echo_behind_link() as (_, link), connected(link) as client:
        link.latency_s = 0.1
        assert await took_s(client, b"slow") >= 0.2
        link.latency_s = 60.0
        link.heal()
        assert await took_s(client, b"fast") < 60.0


async def test_connections_share_the_bandwidth() -> None:
    async with echo_behind_link() as (_, link), connected(link) as one, connected(link) as other:
        link.bytes_per_s = 64_000
        begun_s = time.monotonic()
        await asyncio.gather(one.ask(bytes(6_400)), other.ask(bytes(6_400)))
        assert time.monotonic() - begun_s >= 0.2


async def test_what_is_lost_is_repeated_or_the_connection_reset() -> None:
    async with echo_behind_link() as (echo, link), connected(link) as client:
        link.loss = 0.5
        asked = [str(number).encode() for number in range(6)]
        assert [await client.ask(each) for each in asked] == asked
        assert echo.got == b"".join(asked)
        link.loss = 1.0
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.ask(b"lost for good")


@pytest.mark.parametrize(("direction", "reached"), [(Direction.TO_SERVER, b""), (Direction.TO_CLIENT, b"hello")])
async def test_half_open_swallows_one_direction_until_a_reset(direction: Direction, reached: bytes) -> None:
    async with echo_behind_link() as (echo, link), connected(link) as client:
        assert await client.ask(b"first") == b"first"
        link.half_open(direction)
        client.writer.write(b"hello")
        await client.hears_nothing()
        assert (echo.got, link.swallowed_bytes, link.connections) == (b"first" + reached, 5, 1)
        link.heal()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.ask(b"again")
        async with connected(link) as new:
            assert await new.ask(b"new") == b"new"


async def test_what_waits_for_a_partition_passes_when_it_heals() -> None:
    async with echo_behind_link() as (echo, link), connected(link) as client:
        assert await client.ask(b"before") == b"before"
        link.partition()
        client.writer.write(b"old")
        async with connected(link) as new:
            new.writer.write(b"new")
            await client.hears_nothing()
            await new.hears_nothing()
            assert echo.got == b"before"
            link.heal()
            assert await client.reader.readexactly(3) == b"old"
            assert await new.reader.readexactly(3) == b"new"
