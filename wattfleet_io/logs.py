"""The log of a service on standard error, as plain text: what a peer sends may be in a line."""

from __future__ import annotations

import logging
from types import TracebackType

from wattfleet_io.console import plain_text

_FORMAT = "%(asctime)s %(name)s: %(message)s"

_ErrorInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def start_logging() -> None:
    """Log to standard error from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainTextFormatter(_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class PlainTextFormatter(logging.Formatter):
    """Leaves control characters out of messages and tracebacks; a message stays one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - named by logging
        """The record's line, without its traceback."""
        return plain_text(super().formatMessage(record))

    def formatException(self, ei: _ErrorInfo) -> str:  # noqa: N802 - named by logging
        """The record's traceback."""
        return plain_text(super().formatException(ei), keep_newlines=True)
