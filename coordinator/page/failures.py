"""Error answers of the page: in its own layout, or as JSON if a script sent the request."""

from __future__ import annotations

import logging
import secrets

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from coordinator.errors import UnknownRecordError
from coordinator.page.drawing import drawn
from wattfleet.errors import InvalidInputError, WattfleetError

_log = logging.getLogger(__name__)

_ASKED_BY_SCRIPTS = ("/watts.json", "/updates")


class UnexpectedErrors:
    """Answers unexpected errors: the log gets the traceback, and the viewer an id to find it."""

    def __init__(self, app: ASGIApp) -> None:
        """Guard an application.

        Args:
            app: the application.
        """
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        has_started = False

        async def noting(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            if scope["type"] != "http" or has_started:
                raise
            error_id = noted(error, scope["path"])
            await (await _unexpected(Request(scope, receive), error_id))(scope, receive, send)


def noted(error: Exception, what: str) -> str:
    """Log an unexpected error.

    Args:
        error: the error.
        what: the part of the page that cannot be shown.

    Returns:
        The id in the log line.
    """
    error_id = secrets.token_hex(4)
    _log.error("error %s: the page cannot show %r", error_id, what, exc_info=error)
    return error_id


def unexpected_text(error_id: str) -> str:
    """The text about an unexpected error for a viewer.

    Args:
        error_id: the id in its log line.
    """
    return f"Look for error {error_id} in the coordinator's log."


async def _unexpected(request: Request, error_id: str) -> Response:
    return await _answer(request, "The coordinator could not show this", unexpected_text(error_id), 500)


async def _unknown(request: Request, error: Exception) -> Response:
    return await _answer(request, "Not found", str(error), 404)


async def _invalid(request: Request, error: Exception) -> Response:
    return await _answer(request, "Invalid request", str(error), 400)


async def _failed(request: Request, error: Exception) -> Response:
    return await _answer(request, "The coordinator cannot answer now", str(error), 503)


async def _no_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return await _answer(request, "Not found", "There is no such page: choose one above.", 404)
    if error.status_code == 405:
        text = "The page only reads: change the fleet with the commands of wattfleet coordinator."
        return await _answer(request, "Invalid request", text, 405)
    return await _answer(request, "Invalid request", error.detail, error.status_code)


async def _answer(request: Request, title: str, text: str, status: int) -> Response:
    if request.url.path in _ASKED_BY_SCRIPTS:
        return JSONResponse({"error": title, "detail": text}, status_code=status)
    return await drawn(request, "error.html", {"title": title, "text": text}, status=status)


EXPECTED: dict[type[Exception], ExceptionHandler] = {
    UnknownRecordError: _unknown,
    InvalidInputError: _invalid,
    WattfleetError: _failed,
    HTTPException: _no_page,
}
"""The handlers of errors that are not faults of the page."""
