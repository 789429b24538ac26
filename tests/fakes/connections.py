"""Connections with faults: a link whose faults can be switched on and off, and clients that keep a server waiting."""

from __future__ import annotations

import asyncio
import math
import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from enum import Enum, auto

# --- Faulty link ------------------------------------------------------------------------------------------------------
# A link to a TCP server on loopback, with faults that can be switched on and off while it is in use.
#
# A TCP proxy cannot drop packets. Instead, it causes what both ends of a connection would observe during the fault:
#
# - latency: each piece of data arrives later, in each direction.
# - bandwidth: all connections share the link's bytes per second, separately in each direction.
# - loss: a lost piece is delayed by TCP's retransmission timeout: 0.2 s, doubled each time. After 6 losses in a row
#   (12.6 s), the connection is reset.
# - half-open: data sent in one direction is swallowed, including the end of the connection, and nothing is closed.
#   Healing resets the connections that have lost data, as a peer does that no longer knows them.
# - forgotten: the connections that are open now lose everything in both directions, permanently, and nothing is closed.
#   New connections work. A firewall that has forgotten idle connections behaves like this.
# - partition: nothing passes. New connections are accepted by the kernel, and receive nothing. Healing delivers
#   everything that was held up, as retransmitted packets would be.


_PIECE_BYTES = 16_384
_PIECES_UNDER_WAY = 64
_REPEATED_AFTER_S = 0.2
_MOST_LOSSES = 6


class Direction(Enum):
    """The direction of data on a link."""

    TO_SERVER = auto()
    TO_CLIENT = auto()


@dataclass(eq=False)
class _Connection:
    """One client's connection, as two streams."""

    client: asyncio.StreamWriter
    task: asyncio.Task[None] | None
    server: asyncio.StreamWriter | None = None
    has_lost_bytes: bool = False
    is_forgotten: bool = False
    waiting_bytes: int = 0

    def reset(self) -> None:
        for writer in (self.client, self.server):
            if writer is not None:
                writer.transport.abort()
        if self.task is not None:
            self.task.cancel()


class FaultyLink:
    """A link to a server; at first, all faults are off.

    Args:
        target: host:port of the server.
        seed: seed of the losses.

    Attributes:
        address: host:port for clients.
        latency_s: latency of each direction.
        bytes_per_s: bandwidth of each direction.
        loss: the probability, from 0 to 1, that a piece is lost each time it is sent.
        swallowed_bytes: bytes lost by half-open connections so far.
        waiting_bytes: bytes that were sent, and have neither arrived nor been lost yet.
    """

    def __init__(self, target: str, seed: int = 0) -> None:
        self.target = target
        self.address = ""
        self.latency_s = 0.0
        self.bytes_per_s = math.inf
        self.loss = 0.0
        self.swallowed_bytes = 0
        self.waiting_bytes = 0
        self._swallows: set[Direction] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._free_at_s = dict.fromkeys(Direction, 0.0)
        self._chance = random.Random(seed)
        self._connections: set[_Connection] = set()

    @property
    def connections(self) -> int:
        """The clients' connections that are open now."""
        return len(self._connections)

    def half_open(self, *directions: Direction) -> None:
        """Swallow everything that is sent in these directions."""
        self._swallows = set(directions)

    def forget(self) -> None:
        """Lose everything that the currently open connections send from now on."""
        for connection in self._connections:
            connection.is_forgotten = True

    def partition(self) -> None:
        """Let nothing pass."""
        self._passes.clear()

    def reset(self) -> None:
        """Reset all connections."""
        for connection in list(self._connections):
            connection.reset()

    def heal(self) -> None:
        """End all faults."""
        self.latency_s, self.bytes_per_s, self.loss = 0.0, math.inf, 0.0
        self._free_at_s = dict.fromkeys(Direction, 0.0)
        self._swallows.clear()
        for connection in list(self._connections):
            if connection.has_lost_bytes:
                connection.reset()
        self._passes.set()

    async def serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        """Forward one connection until it ends."""
        connection = _Connection(client, asyncio.current_task())
        self._connections.add(connection)
        ways: list[asyncio.Task[None]] = []
        try:
            await self._passes.wait()
            host, _, port = self.target.rpartition(":")
            from_server, connection.server = await asyncio.open_connection(host, int(port))
            for direction, source, sink in (
                (Direction.TO_SERVER, reader, connection.server),
                (Direction.TO_CLIENT, from_server, client),
            ):
                under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_PIECES_UNDER_WAY)
                ways += [
                    asyncio.create_task(self._read(connection, direction, source, under_way)),
                    asyncio.create_task(self._write(connection, direction, under_way, sink)),
                ]
            await asyncio.gather(*ways)
        except (OSError, asyncio.CancelledError):
            pass  # one end has closed, or the link is closed
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            connection.task = None
            connection.reset()
            self.waiting_bytes -= connection.waiting_bytes
            self._connections.discard(connection)

    async def _read(
        self,
        connection: _Connection,
        direction: Direction,
        source: asyncio.StreamReader,
        under_way: asyncio.Queue[tuple[float, bytes]],
    ) -> None:
        while True:
            piece = await source.read(_PIECE_BYTES)
            arrives_s = self._arrives_s(direction, len(piece))
            if arrives_s is None:
                raise ConnectionResetError("lost too often")
            self.waiting_bytes += len(piece)
            connection.waiting_bytes += len(piece)
            await under_way.put((arrives_s, piece))
            if not piece:
                return

    def _arrives_s(self, direction: Direction, length: int) -> float | None:
        """When a piece arrives, on the loop's clock; None if it was lost too often."""
        now_s = asyncio.get_running_loop().time()
        losses = 0
        while self._chance.random() < self.loss:
            losses += 1
            if losses == _MOST_LOSSES:
                return None
        repeated_s: float = _REPEATED_AFTER_S * (2**losses - 1)
        self._free_at_s[direction] = max(now_s, self._free_at_s[direction]) + length / self.bytes_per_s
        return self._free_at_s[direction] + self.latency_s + repeated_s

    async def _write(
        self,
        connection: _Connection,
        direction: Direction,
        under_way: asyncio.Queue[tuple[float, bytes]],
        sink: asyncio.StreamWriter,
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            arrives_s, piece = await under_way.get()
            await asyncio.sleep(arrives_s - loop.time())
            await self._passes.wait()
            self.waiting_bytes -= len(piece)
            connection.waiting_bytes -= len(piece)
            if connection.is_forgotten:
                self.swallowed_bytes += len(piece)
            elif direction in self._swallows:
                connection.has_lost_bytes = True
                self.swallowed_bytes += len(piece)
            elif piece:
                sink.write(piece)
                await sink.drain()
            else:
                sink.write_eof()
            if not piece:
                return


@asynccontextmanager
async def faulty_link(target: str, seed: int = 0) -> AsyncIterator[FaultyLink]:
    """A link to host:port in the running event loop, on a port of its own."""
    link = FaultyLink(target, seed)
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    link.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield link
    finally:
        server.close()
        link.reset()
        while link.connections:
            await asyncio.sleep(0.01)


# --- HTTP attacks -----------------------------------------------------------------------------------------------------
# Connections that keep an HTTP server waiting.

_WITHIN_S = 30.0


def connect(
    opened: ExitStack, port: int, count: int, host: str = "127.0.0.1", receive_bytes: int | None = None
) -> list[socket.socket]:
    """Connections from a loopback address, which send nothing yet.

    Args:
        opened: closes them.
        port: the server's port.
        count: how many.
        host: the address from which they come.
        receive_bytes: the size of the buffer for what the server sends; None for the system's.
    """
    found = []
    for _ in range(count):
        connection = opened.enter_context(closing(socket.socket()))
        connection.settimeout(_WITHIN_S)
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            # On loopback, packets are so large that the system would take megabytes off the server.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        connection.bind((host, 0))
        connection.connect(("127.0.0.1", port))
        found.append(connection)
    return found


def client_hello() -> bytes:
    """The first message of a TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def ends(connection: socket.socket) -> bool:
    """Read from a connection until the server closes it."""
    try:
        while connection.recv(1_000_000):
            pass
        return True
    except ConnectionResetError:
        return True
