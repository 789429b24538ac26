"""What a request may get instead of an answer, besides the model's own errors."""

from __future__ import annotations

from wattfleet.errors import InvalidInputError, WattfleetError


class RequestRefusedError(InvalidInputError):
    """The request has another shape than those before it, or too many requests wait already."""


class ServerClosedError(WattfleetError):
    """The server was closed before the request was answered."""
