"""Serves the web page from a thread with its own event loop, because rendering must not delay sessions."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from coordinator.page.application import page_application
from coordinator.page.queries import Queries
from wattfleet_identity.channels import is_loopback
from wattfleet_identity.http_access import HttpAccess
from wattfleet_identity.http_server import HttpLimits, serving_http


def page_served(
    queries: Queries,
    host: str,
    port: int,
    limits: HttpLimits,
    access: HttpAccess | None = None,
    has_authority: bool = False,
) -> AbstractAsyncContextManager[int]:
    """Serve the page until the context is left, and yield the port; port 0 picks a free one.

    Args:
        queries: read the fleet; the coordinator's event loop has to run until the context is left.
        host: the address to listen on.
        port: the port.
        limits: limits on connections.
        access: who may read over HTTPS; None lets everybody read over HTTP.
        has_authority: whether operators have certificates; if so, only they can see the audit log.

    Raises:
        InvalidInputError: the address is in use or does not exist.
    """
    hosts = ["127.0.0.1", "localhost"] if access is None and is_loopback(host) else ["*"]
    return serving_http(page_application(queries, hosts, has_authority), "the page", host, port, limits, access)
