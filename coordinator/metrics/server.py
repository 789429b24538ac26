"""Serves `/metrics` over HTTP or HTTPS, with limits: a connection must not take the descriptors that agents need."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from coordinator.identity.http_access import HttpAccess
from coordinator.metrics.exposure_collector import ExposureCollector
from coordinator.metrics.fleet_collector import FleetCollector
from coordinator.metrics.service_collector import ServiceCollector
from coordinator.service_figures import ServiceFigures
from coordinator.settings import ServerSettings
from coordinator.state.fleet import Fleet
from wattfleet.errors import InvalidInputError

_log = logging.getLogger(__name__)

_ROOM_WITHIN_S = 1.0
"""How long to wait until a closed connection's thread has ended; it may be in the midst of an answer."""

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_NO_DESCRIPTOR_PAUSE_S = 0.1


class _Handler(WSGIRequestHandler):
    """Answers one request; logs nothing."""

    server: _Server

    def parse_request(self) -> bool:
        """Read the request; it is answered from now on."""
        is_valid = super().parse_request()
        self.server.request_read(self.connection)
        return is_valid

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by the base class
        """Log no request."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread per connection, for a limited number of connections, each for a limited time."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait here take no descriptor

    def __init__(
        self,
        address: tuple[str, int],
        family: socket.AddressFamily,
        settings: ServerSettings,
        access: HttpAccess | None,
    ) -> None:
        self.address_family = family
        self._access = access
        self._limit = settings.max_metrics_connections
        self._timeout_s = settings.metrics_timeout_s
        self._room = threading.Condition()
        self._since_s: dict[socket.socket, float] = {}  # of the open connections, oldest first
        self._answered: set[socket.socket] = set()  # connections whose request has been read
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            connection, address = super().get_request()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                time.sleep(_NO_DESCRIPTOR_PAUSE_S)  # the connection waits, and would be tried again at once
            raise
        if self._access is not None:
            # The handshake waits for the caller, so it is left to the connection's thread.
            context = self._access.context()
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer a request, over TLS only one of a caller who may read."""
        if self._access is not None:
            request.do_handshake()
            self._access.require_viewer(request)
        super().finish_request(request, client_address)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Make room for a connection by closing the oldest one that has sent no request; refuse it if there is none."""
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
        """Note that a connection's request has been read: it is not closed to make room."""
        with self._room:
            self._answered.add(connection)

    def service_actions(self) -> None:
        """Close the connections that take too long."""
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
        _log.debug("a request for metrics failed", exc_info=True)


def _close(connection: socket.socket) -> None:
    """Wake the connection's thread, which then closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def serve_metrics(
    fleet: Fleet,
    host: str,
    port: int,
    settings: ServerSettings | None = None,
    access: HttpAccess | None = None,
    exposed: int = 0,
    figures: ServiceFigures | None = None,
    expiries: Callable[[], Mapping[str, datetime]] = dict,
) -> WSGIServer:
    """Serve `/metrics` from a thread; port 0 takes a free port.

    Args:
        fleet: what is exported.
        host: the address to listen on.
        port: the port.
        settings: limits on the connections.
        access: who may read, over HTTPS; None lets everybody read over HTTP.
        exposed: addresses of the coordinator that other machines reach in plaintext.
        figures: how the coordinator itself does; None exports zeros.
        expiries: when the certificate of each role expires first.

    Raises:
        InvalidInputError: the address is in use or does not exist.
    """
    registry = CollectorRegistry()
    settings = settings or ServerSettings()
    registry.register(FleetCollector(fleet, settings.metrics_devices))
    registry.register(ExposureCollector(exposed))
    registry.register(ServiceCollector(figures or ServiceFigures(), expiries))
    ProcessCollector(registry=registry)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        server = _Server((host, port), family, settings, access)
    except OSError as error:
        raise InvalidInputError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another port"
        ) from None
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
