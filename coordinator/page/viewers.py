"""Who may read the page: a connection over TLS needs a viewer's or operator's certificate, as `/metrics` does."""

from __future__ import annotations

import logging
import ssl
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from wattfleet.errors import WattfleetError
from wattfleet_identity.http_access import HttpAccess

_log = logging.getLogger(__name__)

ROLE = "wattfleet.role"
"""The key of a request's scope with the caller's role; it is absent where callers need no certificate."""


def protocol_for(access: HttpAccess) -> type[H11Protocol]:
    """The HTTP protocol whose connections are closed unless the caller may read.

    Args:
        access: says who may read.
    """

    class ViewersProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            try:
                role = access.require_viewer(transport.get_extra_info("ssl_object"))
            except WattfleetError as error:
                _log.debug("a viewer of the page was refused: %s", error)
                transport.abort()
                return
            inner = self.app

            async def app(scope: Any, receive: Any, send: Any) -> None:
                await inner({**scope, ROLE: role}, receive, send)

            self.app = app

    return ViewersProtocol


def context_of(access: HttpAccess) -> ssl.SSLContext:
    """TLS whose handshakes always use the newest certificate of the coordinator."""
    context = access.context()

    def renewed(connection: Any, name: str | None, used: ssl.SSLContext) -> None:
        connection.context = access.context()

    context.sni_callback = renewed
    return context
