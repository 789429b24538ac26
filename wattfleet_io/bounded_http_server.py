"""An HTTP or HTTPS server for a WSGI application, with a limited number and duration of connections."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from wattfleet.errors import InvalidInputError

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

_log = logging.getLogger(__name__)

_ROOM_WITHIN_S = 1.0
"""How long to wait for the end of a closed connection's thread, s; it may be sending an answer."""

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_NO_DESCRIPTOR_PAUSE_S = 0.1


class Guard(Protocol):
    """Decides which TLS settings a server uses, and whom it answers."""

    def context(self) -> ssl.SSLContext:
        """Return the TLS settings for the next connection."""
        ...

    def require_viewer(self, connection: ssl.SSLSocket) -> object:
        """Raise an error unless a caller may read; called after the handshake."""
        ...


@dataclass(frozen=True)
class ConnectionLimits:
    """The maximum number and duration of a server's connections.

    Attributes:
        connections: maximum of open connections; a further one closes the oldest one without a request.
        timeout_s: a connection is closed this long after it was opened.
    """

    connections: int
    timeout_s: float


class _Handler(WSGIRequestHandler):
    """Answers one request, without logging it."""

    server: _Server

    def parse_request(self) -> bool:
        """Read the request, and note that the connection has sent it."""
        is_valid = super().parse_request()
        self.server.request_read(self.connection)
        return is_valid

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by the base class
        """Do not log requests."""


class _Server(ThreadingMixIn, WSGIServer):
    """A server with one thread per connection, and a limited number and duration of connections."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait here do not use a file descriptor

    def __init__(
        self,
        address: tuple[str, int],
        family: socket.AddressFamily,
        limits: ConnectionLimits,
        guard: Guard | None,
    ) -> None:
        self.address_family = family
        self._guard = guard
        self._limit = limits.connections
        self._timeout_s = limits.timeout_s
        self._room = threading.Condition()
        self._since_s: dict[socket.socket, float] = {}  # the open connections, oldest first
        self._answered: set[socket.socket] = set()  # the connections whose request has been read
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            connection, address = super().get_request()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                time.sleep(_NO_DESCRIPTOR_PAUSE_S)  # the connection still waits, and would be tried again at once
            raise
        if self._guard is not None:
            # The handshake waits for the caller, so the connection's thread does it.
            context = self._guard.context()
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer a request; over TLS, only if the caller may read."""
        if self._guard is not None:
            request.do_handshake()
            self._guard.require_viewer(request)
        super().finish_request(request, client_address)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Make room for a connection by closing the oldest one without a request; if there is none, refuse it."""
        with self._room:
            idle = next((each for each in self._since_s if each not in self._answered), None)
            if len(self._since_s) >= self._limit and idle is not None:
                _close(idle)
                self._room.wait_for(lambda: len(self._since_s) < self._limit, _ROOM_WITHIN_S)
            if len(self._since_s) >= self._limit:
                return False
            self._since_s[request] = time.monotonic()
        return True

    def request_read(self, connection: socket.socket) -> None:
        """Note that a connection's request has been read, so that it is not closed to make room."""
        with self._room:
            self._answered.add(connection)

    def service_actions(self) -> None:
        """Close the connections that are open for too long."""
        with self._room:
            overdue_s = time.monotonic() - self._timeout_s
            for connection in [each for each, since_s in self._since_s.items() if since_s <= overdue_s]:
                _close(connection)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._room:
            self._since_s.pop(request, None)
            self._answered.discard(request)
            self._room.notify_all()

    def server_close(self) -> None:
        super().server_close()
        with self._room:
            for connection in self._since_s:
                _close(connection)
            self._room.wait_for(lambda: not self._since_s, _ROOM_WITHIN_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request failed", exc_info=True)


def _close(connection: socket.socket) -> None:
    """Wake the connection's thread, which then closes the connection."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(
    application: WSGIApplication, name: str, host: str, port: int, limits: ConnectionLimits, guard: Guard | None = None
) -> Iterator[int]:
    """Serve a WSGI application from a thread within this context; yield the port.

    Args:
        application: the application.
        name: its name, for errors and for the thread.
        host: the address to listen on.
        port: the port; 0 uses a free one.
        limits: limits on the connections.
        guard: decides who may read over HTTPS; None lets everybody read over HTTP.

    Raises:
        InvalidInputError: the address is in use or does not exist.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        server = _Server((host, port), family, limits, guard)
    except OSError as error:
        raise InvalidInputError(
            f"cannot serve {name} on {host}:{port}: {error.strerror}; choose another port"
        ) from None
    server.set_app(application)
    threading.Thread(target=server.serve_forever, name=name, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
