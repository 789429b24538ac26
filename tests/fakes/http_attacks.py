"""Connections that keep an HTTP server waiting."""

from __future__ import annotations

import socket
import ssl
from contextlib import ExitStack, closing, suppress

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
