"""The web application of the page and `/metrics`: its routes and its security headers."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import gzip_accepted
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.metrics import exposition
from coordinator.page.fleet_page import device, events, fleet, watts_history
from coordinator.page.queries import Queries
from coordinator.page.run_pages import energy, run, runs, what_if
from coordinator.page.snapshots import (
    EXPECTED,
    WHOLE_FLEET,
    Snapshot,
    Snapshots,
    UnexpectedErrors,
    noted,
    unexpected_text,
)
from wattfleet.common.identity.channels import is_loopback
from wattfleet.common.identity.http_access import HttpAccess
from wattfleet.common.identity.http_server import HttpLimits, caller_of, serving_http
from wattfleet.common.tasks import background_task, stop_tasks
from wattfleet.core.errors import WattfleetError

# --- Updates ----------------------------------------------------------------------------------------------------------
# Server-sent events: the watts of a supply with every snapshot, changes of pages, and why updates fail.


_STOP_CHECK_S = 0.5
_MAX_VIEWERS = 40


async def updates(request: Request) -> Response:
    """Answer with updates until the viewer leaves or may no longer read, or the coordinator stops."""
    snapshots: Snapshots = request.app.state.snapshots
    if snapshots.viewers >= _MAX_VIEWERS:
        text = f"{_MAX_VIEWERS} viewers already receive updates, which is the limit: close one, or reload by hand"
        return JSONResponse({"error": "Too many viewers", "detail": text}, status_code=503)
    return StreamingResponse(_stream(request, snapshots), media_type="text/event-stream")


async def _stream(request: Request, snapshots: Snapshots) -> AsyncIterator[str]:
    caller = caller_of(request.scope)
    snapshots.viewers += 1
    supply = request.query_params.get("supply", WHOLE_FLEET)
    try:
        seen: Snapshot | None = None
        failure: str | None = None
        while not caller.is_stopping():
            try:
                caller.role()
            except WattfleetError as error:
                yield _event({"text": str(error), "final": True}, "failure")
                return
            try:
                seen = await asyncio.wait_for(snapshots.after(seen), _STOP_CHECK_S)
            except (TimeoutError, asyncio.TimeoutError):
                if snapshots.failure is not None and snapshots.failure != failure:
                    failure = snapshots.failure
                    yield _event({"text": failure}, "failure")
                continue
            failure = None
            yield _event({"version": seen.version, "watts": asdict(seen.watts.get(supply, seen.watts[WHOLE_FLEET]))})
    except Exception as error:
        yield _event({"text": unexpected_text(noted(error, request.url.path))}, "failure")
    finally:
        snapshots.viewers -= 1


def _event(content: dict[str, Any], kind: str = "message") -> str:
    return f"event: {kind}\ndata: {json.dumps(content)}\n\n"


# --- Metrics ----------------------------------------------------------------------------------------------------------
# Prometheus' scrapes. One of a large fleet takes seconds, so a thread computes it, and one at a time.


async def metrics(request: Request) -> Response:
    """Answer with all metrics, in the format and the compression that the caller accepts."""
    async with request.app.state.scraping:
        return await asyncio.to_thread(_exposition, request.app.state.registry, request.headers)


def _exposition(registry: CollectorRegistry, headers: Headers) -> Response:
    content, content_type = exposition(registry, headers.get("accept", ""))
    if not gzip_accepted(headers.get("accept-encoding", "")):
        return Response(content, media_type=content_type)
    return Response(gzip.compress(content), headers={"Content-Encoding": "gzip"}, media_type=content_type)


# --- Application ------------------------------------------------------------------------------------------------------

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class _SecurityHeaders:
    """Adds headers that let a browser load only the page's own files."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)


def http_application(
    queries: Queries, registry: CollectorRegistry, hosts: Sequence[str], has_authority: bool
) -> Starlette:
    """Create the application; it takes snapshots of the fleet while it is served.

    Args:
        queries: read the fleet.
        registry: the metrics.
        hosts: the host names that requests may use; otherwise, another site could read the page under its own name.
        has_authority: whether operators have certificates.
    """

    @asynccontextmanager
    async def with_snapshots(app: Starlette) -> AsyncIterator[None]:
        snapshots = app.state.snapshots = Snapshots(queries)
        kept = background_task("page snapshots", snapshots.keep())
        try:
            yield
        finally:
            await stop_tasks(kept)

    app = Starlette(
        lifespan=with_snapshots,
        routes=[
            Route("/", fleet, name="fleet"),
            Route("/watts.json", watts_history, name="watts"),
            Route("/updates", updates, name="updates"),
            Route("/runs", runs, name="runs"),
            Route("/runs/{run_id:path}", run, name="run"),
            Route("/energy", energy, name="energy"),
            Route("/devices/{device_id:path}", device, name="device"),
            Route("/what-if", what_if, name="what_if"),
            Route("/events", events, name="events"),
            Route("/metrics", metrics, name="metrics"),
            Mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static"),
        ],
        middleware=[
            Middleware(_SecurityHeaders),
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
            Middleware(UnexpectedErrors),
        ],
        exception_handlers=dict(EXPECTED),
    )
    app.state.has_authority = has_authority
    app.state.registry = registry
    app.state.scraping = asyncio.Lock()
    return app


# --- Server -----------------------------------------------------------------------------------------------------------
# Serves the application from a thread with its own event loop, because rendering must not delay sessions.


def http_served(
    queries: Queries,
    registry: CollectorRegistry,
    host: str,
    port: int,
    limits: HttpLimits,
    access: HttpAccess | None = None,
    has_authority: bool = False,
) -> AbstractAsyncContextManager[int]:
    """Serve the page and `/metrics` until the context is left, and yield the port; port 0 picks a free one.

    Args:
        queries: read the fleet; the coordinator's event loop has to run until the context is left.
        registry: the metrics, which are collected in a thread.
        host: the address to listen on.
        port: the port.
        limits: limits on connections.
        access: who may read over HTTPS; None lets everybody read over HTTP.
        has_authority: whether operators have certificates; if so, only they can see the audit log.

    Raises:
        InvalidInputError: the address is in use or does not exist.
    """
    # Starlette cuts a host at its first colon, so that "[" is every IPv6 address, and never a name.
    hosts = ["127.0.0.1", "localhost", "["] if access is None and is_loopback(host) else ["*"]
    application = http_application(queries, registry, hosts, has_authority)
    return serving_http(application, "the page and metrics", host, port, limits, access)
