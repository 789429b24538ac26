"""Channels to the coordinator."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pytest

from wattfleet_identity.channels import open_async_channel, open_channel
from wattfleet_io.tasks import with_timeout

_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
_PREFACE_BYTES = 24
_GOAWAY_UNREAD = struct.pack(">I", 8)[1:] + b"\7\0" + struct.pack(">III", 0, 0, 2)
"""The last stream that was seen is 0, so that gRPC would repeat every call."""


@contextmanager
def hanging_up() -> Iterator[tuple[str, Callable[[], int]]]:
    """A server that reads the preface of each connection only, and then closes it as unused.

    Yields:
        Its host:port, and a function that returns the number of connections so far.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            accepted.append(connection)
            connection.sendall(_SETTINGS)
            connection.recv(_PREFACE_BYTES, socket.MSG_WAITALL)
            # The call is on its way once its headers have arrived after the client's settings.
            while (received := connection.recv(65_536)) and b"/wattfleet" not in received:
                pass
            connection.sendall(_GOAWAY_UNREAD)
            connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=serve, name="server that hangs up")
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", lambda: len(accepted)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        for connection in accepted:
            connection.close()
        thread.join()
        listener.close()


async def test_a_call_is_not_repeated_behind_its_callers_back() -> None:
    """gRPC would repeat it at once and without end, and take hundreds of MiB a second meanwhile."""
    with hanging_up() as (address, connections):
        async with open_async_channel(address, None) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await with_timeout(10.0, channel.stream_stream("/wattfleet/Session")().read())
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert connections() == 1
        with open_channel(address, None) as channel, pytest.raises(grpc.RpcError) as failed_too:
            channel.unary_unary("/wattfleet/Plan")(b"", timeout=10.0)
        assert failed_too.value.code() is grpc.StatusCode.UNAVAILABLE
        assert connections() == 2
