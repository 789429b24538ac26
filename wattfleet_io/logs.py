"""The log of a service on standard error: plain text, limited in length, and in rate for each logging statement.

What a peer sends may be in a line, and may be the reason for one. Neither must fill a disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from wattfleet_io.console import plain_text
from wattfleet_io.token_bucket import TokenBucket

MAX_LINE_BYTES = 10_000
"""Limit of a line, or of a record with its traceback."""

LINES_AT_ONCE = 20
"""Lines that one logging statement may write at once."""

LINES_PER_S = 1.0
"""Lines that one logging statement may write each second in the long run."""

_FORMAT = "%(asctime)s %(name)s: %(message)s"

_OF_DAMAGED_ANSWERS = "grpc._common"
"""gRPC's logger that writes a traceback for each damaged answer; whoever made the call tells of it in one line."""

_OF_CALLS = "grpc._cython.cygrpc"
_CLIENT_GONE = "ExecuteBatchError"
"""What gRPC's logger of calls has caught where a client has gone before it was sent its status."""

_ErrorInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def start_logging() -> None:
    """Log to standard error from now on, within the limits."""
    logging.basicConfig(level=logging.INFO, handlers=[service_handler()])


def service_handler(stream: TextIO | None = None) -> logging.Handler:
    """What writes the log of a service, within the limits.

    Args:
        stream: where it writes; None is standard error.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(BoundedPlainText(_FORMAT))
    handler.addFilter(is_worth_a_line)
    handler.addFilter(RateLimit())
    return handler


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a record is not one of gRPC's tracebacks of what is expected or told elsewhere."""
    caught = record.exc_info[0] if isinstance(record.exc_info, tuple) else None
    has_gone = record.name == _OF_CALLS and caught is not None and caught.__name__ == _CLIENT_GONE
    return record.name != _OF_DAMAGED_ANSWERS and not has_gone


class BoundedPlainText(logging.Formatter):
    """Leaves out control characters, and cuts long records in their middle: a traceback ends with its error."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - named by logging
        """The record's line, without its traceback."""
        return plain_text(super().formatMessage(record))

    def formatException(self, ei: _ErrorInfo) -> str:  # noqa: N802 - named by logging
        """The record's traceback."""
        return plain_text(super().formatException(ei), keep_newlines=True)

    def format(self, record: logging.LogRecord) -> str:
        """The record's text, within the limit."""
        text = super().format(record)
        if len(text) * 4 <= MAX_LINE_BYTES:  # a character has up to four bytes
            return text
        whole = text.encode(errors="backslashreplace")
        if len(whole) <= MAX_LINE_BYTES:
            return text
        end = f" ... (cut: {len(whole):,} bytes in all)"
        half = (MAX_LINE_BYTES - len(end) - len(" ... ")) // 2
        head, tail = (part.decode(errors="ignore") for part in (whole[:half], whole[-half:]))
        return f"{head} ... {tail}{end}"


@dataclass(slots=True)
class _Place:
    """The lines of one logging statement.

    Attributes:
        allowed: the lines that it may write.
        left_out: how many were left out since the last one that was written.
    """

    allowed: TokenBucket
    left_out: int = 0


class RateLimit(logging.Filter):
    """Limits the lines of each logging statement; its next line says how many were left out."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start without any line written.

        Args:
            now_s: a clock, in seconds.
        """
        super().__init__()
        self._now_s = now_s
        self._places: dict[tuple[str, int], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write a record; its text is extended where lines are left out."""
        now_s = self._now_s()
        key = record.pathname, record.lineno
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(TokenBucket.full(LINES_PER_S, LINES_AT_ONCE, now_s))
        if not place.allowed.take(now_s):
            place.left_out += 1
            return False
        notes = []
        if place.left_out:
            notes.append(f"{place.left_out:,} lines like this one were left out before it")
            place.left_out = 0
        if place.allowed.left < 1:
            notes.append("further lines like this one are left out for a while")
        if notes:
            record.msg, record.args = f"{record.getMessage()} ({'; '.join(notes)})", ()
        return True
