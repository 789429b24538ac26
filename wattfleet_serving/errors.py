"""The errors that a request may get instead of an answer, in addition to the model's own errors."""

from __future__ import annotations

from wattfleet.errors import InvalidInputError, WattfleetError


class RequestRefusedError(InvalidInputError):
    """The request's shape differs from that of earlier ones, or too many requests are already waiting."""


class ServerClosedError(WattfleetError):
    """The server was closed before the request was answered."""
