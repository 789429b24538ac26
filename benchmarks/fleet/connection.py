"""A minimal gRPC client with one TCP connection.

Ten thousand grpcio channels need too much memory and CPU time next to a coordinator on two cores. Measured with 400
connections, one message and one answer on each, on one core:

    grpc.aio    171 us of CPU a message    69 kB a connection
    h2          151 us                     22 kB
    this         58 us                      2 kB

So this module handles frames itself, and leaves headers to `hpack`. There is no compression, and a message has to fit
into one frame.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable

from hpack import Decoder, Encoder

from benchmarks.fleet import frames
from benchmarks.fleet.call import WINDOW, WINDOW_RENEWED_AT, Call
from benchmarks.fleet.frames import FrameReader, frame
from benchmarks.fleet.protection import Protected

OK, UNAVAILABLE = 0, 14
"""Statuses of gRPC."""

CONNECTED_WITHIN_S = 20.0
"""The time after which gRPC gives up an attempt to connect, including the handshake, s."""

_LINGER_NOT = b"\x01\0\0\0\0\0\0\0"

# Without dynamic tables, a header block means the same on every connection, so all share one encoder and one decoder.
_NO_TABLE = b"\x20"
_encoder, _decoder = Encoder(), Decoder()
_encoder.header_table_size = 0
_encoder.encode([])
_decoder.max_allowed_table_size = 0
_decoder.decode(_NO_TABLE)  # a server with an empty table need not announce it

_PREFACE = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + frame(
        frames.SETTINGS,
        0,
        0,
        frames.setting(frames.HEADER_TABLE_SIZE, 0) + frames.setting(frames.INITIAL_WINDOW_SIZE, WINDOW),
    )
    + frame(frames.WINDOW_UPDATE, 0, 0, (WINDOW - frames.DEFAULT_WINDOW).to_bytes(4, "big"))
)


def request_headers(path: str) -> bytes:
    """Return the encoded headers that begin a call of a method, such as `/package.Service/Method`."""
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    return _NO_TABLE + bytes(_encoder.encode(headers))


async def connect(address: tuple[str, int], context: ssl.SSLContext | None = None) -> Connection:
    """Open a connection.

    Args:
        address: host and port of the server.
        context: the client's TLS; None for plaintext.

    Raises:
        OSError: the connection or the handshake failed.
        TimeoutError: connecting took too long.
    """
    loop, connection = asyncio.get_running_loop(), Connection()
    async with asyncio.timeout(CONNECTED_WITHIN_S):
        if context is None:
            await loop.create_connection(lambda: connection, *address)
            return connection
        protected = Protected(connection, context)
        try:
            await loop.create_connection(lambda: protected, *address)
            await protected.handshake()
        except BaseException:
            protected.abort()
            raise
    return connection


class ProtocolError(Exception):
    """The server sent something that this client does not support."""


class Connection(asyncio.Protocol):
    """One TCP connection. When it is lost, its calls end with UNAVAILABLE."""

    __slots__ = ("_calls", "_held", "_next", "_reader", "_received", "_transport", "_window", "initial_window")

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._calls: dict[int, Call] = {}
        self._held: deque[tuple[Call, bytes]] = deque()
        self._next = 1
        self._received = 0
        self._window = frames.DEFAULT_WINDOW
        self.initial_window = frames.DEFAULT_WINDOW
        self._transport: asyncio.Transport | None = None

    def call(self, headers: bytes, on_message: Callable[[bytes], None], on_end: Callable[[int, str], None]) -> Call:
        """Begin a call with the headers of `request_headers`."""
        call = Call(self, self._next, on_message, on_end)
        self._calls[self._next] = call
        self._write(frame(frames.HEADERS, frames.END_HEADERS, self._next, headers))
        self._next += 2
        return call

    def drop(self) -> None:
        """Cut the connection as a failing network does, without leaving it in the system's tables."""
        if self._transport is not None:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            self._transport.abort()

    def send(self, call: Call, data: bytes) -> None:
        """Send a DATA frame of a call, or hold it until the server's flow-control window allows it."""
        self._held.append((call, data))
        self._flush()

    def renew(self, stream: int, received: int) -> None:
        """Enlarge the server's flow-control window by the bytes that were received."""
        self._write(frame(frames.WINDOW_UPDATE, 0, stream, received.to_bytes(4, "big")))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the client's preface and settings."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(_PREFACE)

    def connection_lost(self, error: Exception | None) -> None:
        """End all calls."""
        self._transport = None
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.on_end(UNAVAILABLE, str(error or "connection lost"))

    def data_received(self, data: bytes) -> None:
        """Process the frames that have arrived."""
        for kind, flags, stream, payload in self._reader.frames(data):
            if kind == frames.DATA:
                self._data(flags, stream, payload)
            elif kind == frames.WINDOW_UPDATE:
                self._room(stream, int.from_bytes(payload, "big"))
            elif kind == frames.PING and not flags & frames.ACK:
                self._write(frame(frames.PING, frames.ACK, 0, payload))
            elif kind == frames.SETTINGS and not flags & frames.ACK:
                self._settings(frames.settings(payload))
            elif kind == frames.HEADERS:
                self._headers(flags, stream, payload)
            elif kind == frames.RST_STREAM:
                self._end(stream, UNAVAILABLE, f"reset: {int.from_bytes(payload, 'big')}")
            elif kind == frames.CONTINUATION:
                raise ProtocolError("headers in more than one frame")

    def _data(self, flags: int, stream: int, payload: bytes) -> None:
        if flags & frames.PADDED:
            raise ProtocolError("padded data")
        self._received += len(payload)
        if self._received >= WINDOW_RENEWED_AT:
            self.renew(0, self._received)
            self._received = 0
        if stream in self._calls:
            self._calls[stream].take(payload)

    def _headers(self, flags: int, stream: int, payload: bytes) -> None:
        if flags & (frames.PADDED | frames.PRIORITY):
            raise ProtocolError("headers with padding or a priority")
        headers = dict(_decoder.decode(payload, raw=True))
        if flags & frames.END_STREAM:
            self._end(stream, int(headers.get(b"grpc-status", UNAVAILABLE)), headers.get(b"grpc-message", b"").decode())

    def _settings(self, received: dict[int, int]) -> None:
        if frames.INITIAL_WINDOW_SIZE in received:
            more = received[frames.INITIAL_WINDOW_SIZE] - self.initial_window
            self.initial_window += more
            for call in self._calls.values():
                call.window += more
        self._write(frame(frames.SETTINGS, frames.ACK, 0, b""))
        self._flush()

    def _room(self, stream: int, more: int) -> None:
        if stream == 0:
            self._window += more
        elif stream in self._calls:
            self._calls[stream].window += more
        self._flush()

    def _flush(self) -> None:
        while self._held:
            call, data = self._held[0]
            size = len(data) - frames.HEAD_BYTES
            if size > min(self._window, call.window):
                return
            self._held.popleft()
            self._window -= size
            call.window -= size
            self._write(data)

    def _end(self, stream: int, status: int, text: str) -> None:
        call = self._calls.pop(stream, None)
        if call is not None:
            call.on_end(status, text)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
