"""The page as a web application: its routes and its security headers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.page.device_page import device
from coordinator.page.events_page import events
from coordinator.page.failures import EXPECTED, UnexpectedErrors
from coordinator.page.fleet_page import fleet, watts_history
from coordinator.page.queries import Queries
from coordinator.page.run_pages import run, runs
from coordinator.page.snapshots import Snapshots
from coordinator.page.updates import updates
from coordinator.page.what_if_page import what_if
from wattfleet_io.tasks import background_task, stop_tasks

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


def page_application(queries: Queries, hosts: Sequence[str], has_authority: bool) -> Starlette:
    """Create the application; it takes snapshots of the fleet while it is served.

    Args:
        queries: read the fleet.
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
            Route("/devices/{device_id:path}", device, name="device"),
            Route("/what-if", what_if, name="what_if"),
            Route("/events", events, name="events"),
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
    return app
