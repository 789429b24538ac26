"""Serves the web page from a thread with its own event loop, because rendering must not delay sessions."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import uvicorn

from coordinator.page.application import page_application
from coordinator.page.queries import Queries
from coordinator.page.snapshots import Snapshots
from coordinator.page.viewers import context_of, protocol_for
from wattfleet.errors import InvalidInputError
from wattfleet_identity.channels import is_loopback

if TYPE_CHECKING:
    from wattfleet_identity.http_access import HttpAccess

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 64
_STOP_S = 3.0


class PageServer:
    """A running page.

    Attributes:
        address: its host:port.
    """

    def __init__(
        self,
        queries: Queries,
        host: str,
        port: int,
        access: HttpAccess | None = None,
        has_authority: bool = False,
    ) -> None:
        """Serve until `close`; port 0 picks a free port.

        Args:
            queries: read the fleet.
            host: the address to listen on.
            port: the port.
            access: who may read over HTTPS; None lets everybody read over HTTP.
            has_authority: whether operators have certificates; if so, only they can see the audit log.

        Raises:
            InvalidInputError: the address is in use or does not exist.
        """
        self._socket = _listening(host, port)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._queries = queries
        hosts = ["127.0.0.1", "localhost"] if access is None and is_loopback(host) else ["*"]
        self._app = page_application(hosts, has_authority)
        config = uvicorn.Config(
            self._app,
            http=protocol_for(access) if access is not None else "h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        config.load()
        if access is not None:
            config.ssl = context_of(access)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; open streams of updates end."""
        self._server.should_exit = True

    def join(self) -> None:
        """Wait until the server has stopped; the coordinator's event loop has to run meanwhile."""
        self._thread.join(_STOP_S)

    async def _serve(self) -> None:
        snapshots = self._app.state.snapshots = Snapshots(self._queries)
        self._app.state.is_stopping = lambda: self._server.should_exit
        kept = asyncio.create_task(snapshots.keep(), name="page snapshots")
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            kept.cancel()
            with suppress(asyncio.CancelledError):
                await kept
            self._socket.close()


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listening = socket.socket(family)
    except OSError as error:
        raise InvalidInputError(f"cannot serve the page on {host}:{port}: {error.strerror}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise InvalidInputError(
            f"cannot serve the page on {host}:{port}: {error.strerror}; name another with --page-address"
        ) from None
    return listening
