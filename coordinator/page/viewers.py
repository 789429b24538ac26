"""Who may read the page: a connection over TLS needs a viewer's or operator's certificate, as `/metrics` does."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.page.failures import refused
from wattfleet.errors import WattfleetError
from wattfleet_identity.http_access import HttpAccess
from wattfleet_identity.peers import Role

_log = logging.getLogger(__name__)

_ROLE = "wattfleet.role"
"""The key of a request's scope with a function that returns the caller's role, or raises if the caller may no longer
read; it is absent if callers need no certificate."""


def protocol_for(access: HttpAccess) -> type[H11Protocol]:
    """Create an HTTP protocol that closes connections of callers who may not read.

    Args:
        access: checks who may read.
    """

    class ViewersProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            role, inner = partial(access.require_viewer, transport.get_extra_info("ssl_object")), self.app
            try:
                role()
            except WattfleetError as error:
                _log.debug("a viewer of the page was refused: %s", error)
                transport.abort()
                return

            async def app(scope: Any, receive: Any, send: Any) -> None:
                await inner({**scope, _ROLE: role}, receive, send)

            self.app = app

    return ViewersProtocol


def role_of(request: Request) -> Role | None:
    """The caller's role; None if callers need no certificate.

    Raises:
        WattfleetError: the caller may no longer read.
    """
    role: Callable[[], Role] | None = request.scope.get(_ROLE)
    return None if role is None else role()


class StillViewers:
    """Refuses requests of callers whose certificate was revoked or has expired since they connected."""

    def __init__(self, app: ASGIApp) -> None:
        """Guard an application.

        Args:
            app: the application.
        """
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        try:
            role_of(request)
        except WattfleetError as error:
            await (await refused(request, error))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def context_of(access: HttpAccess) -> ssl.SSLContext:
    """A TLS context whose handshakes always use the newest certificate of the coordinator."""
    context = access.context()

    def renewed(connection: Any, name: str | None, used: ssl.SSLContext) -> None:
        connection.context = access.context()

    context.sni_callback = renewed
    return context
