"""A gRPC call: length-prefixed messages in the frames of one HTTP/2 stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from benchmarks.fleet import frames
from benchmarks.fleet.frames import frame

WINDOW = 4 * 1024 * 1024
"""Bytes that a server may send without acknowledgement, as grpcio allows once it has measured the path."""

WINDOW_RENEWED_AT = WINDOW // 4

_PREFIX_BYTES = 5


class Carrier(Protocol):
    """The connection that a call runs over."""

    @property
    def initial_window(self) -> int:
        """Bytes that a new call may send at once."""

    def send(self, call: Call, data: bytes) -> None:
        """Send a DATA frame, or hold it until the server's flow-control window allows it."""

    def renew(self, stream: int, received: int) -> None:
        """Enlarge the server's flow-control window by the bytes that were received."""


class Call:
    """One gRPC call.

    Args:
        connection: the connection that it runs over.
        stream: its stream number.
        on_message: called with every received message.
        on_end: called once, with the status and its text.
    """

    __slots__ = ("_connection", "_parts", "_received", "on_end", "on_message", "stream", "window")

    def __init__(
        self,
        connection: Carrier,
        stream: int,
        on_message: Callable[[bytes], None],
        on_end: Callable[[int, str], None],
    ) -> None:
        self._connection = connection
        self.stream = stream
        self.on_message = on_message
        self.on_end = on_end
        self.window = connection.initial_window
        self._parts = b""
        self._received = 0

    def send(self, message: bytes, last: bool = False) -> None:
        """Send a message as soon as the server's flow-control window allows it."""
        payload = b"\0" + len(message).to_bytes(4, "big") + message
        assert len(payload) <= frames.MAX_PAYLOAD
        self._connection.send(self, frame(frames.DATA, frames.END_STREAM if last else 0, self.stream, payload))

    def take(self, payload: bytes) -> None:
        """Process a DATA frame's payload."""
        self._received += len(payload)
        if self._received >= WINDOW_RENEWED_AT:
            self._connection.renew(self.stream, self._received)
            self._received = 0
        data = self._parts + payload if self._parts else payload
        begin = 0
        while len(data) - begin >= _PREFIX_BYTES:
            body = begin + _PREFIX_BYTES
            after = body + int.from_bytes(data[begin + 1 : body], "big")
            if after > len(data):
                break
            begin = after
            self.on_message(data[body:after])
        self._parts = data[begin:]
