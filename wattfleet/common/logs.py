"""The log of a service on standard error: plain text or JSON, with limits on lengths and on each statement's rate.

A peer's input may be part of a line, or cause one. Neither must fill a disk.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from types import TracebackType
from typing import Any, Literal, TextIO, get_args

from wattfleet.common.console import json_text, plain_text
from wattfleet.common.tasks import TokenBucket
from wattfleet.core.errors import InvalidInputError

_log = logging.getLogger(__name__)


# --- Log choices ------------------------------------------------------------------------------------------------------
# The formats and levels of a service's log, and the environment variables that choose them for every process.


LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

FORMAT_VARIABLE = "WATTFLEET_LOG_FORMAT"
"""The default format."""

LEVEL_VARIABLE = "WATTFLEET_LOG_LEVEL"
"""The default minimum level."""


# --- Logs -------------------------------------------------------------------------------------------------------------

MAX_LINE_BYTES = 10_000
"""Maximum length of a line, or of a record with its traceback, bytes."""

LINES_AT_ONCE = 20
"""Maximum of lines that one logging statement may write at once."""

LINES_PER_S = 1.0
"""Maximum of lines per second that one logging statement may write in the long run."""

DEVICE_LINES_AT_ONCE = 1_000
"""Maximum of lines about devices that one logging statement may write at once."""

DEVICE_LINES_PER_S = 20.0
"""Maximum of lines about devices per second that one logging statement may write in the long run."""

_QUIET_LIBRARIES = ("alembic", "httpcore", "httpx", "securesystemslib", "tuf", "uvicorn")
"""Libraries whose warnings only are logged: they report routine work, such as each query of a budget with its URL."""

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FIELDS = "wattfleet_fields"

_OF_DAMAGED_ANSWERS = "grpc._common"
"""gRPC's logger that writes a traceback for each damaged answer; the caller already reports it in one line."""

_OF_CALLS = "grpc._cython.cygrpc"
_CLIENT_GONE = "ExecuteBatchError"
"""The text of gRPC's logger of calls when a client disconnected before it was sent its status."""

_ErrorInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def fields(**values: Any) -> dict[str, Any]:
    """Return the argument `extra` of a logging statement, for fields in JSON such as `device` or `run`.

    The message has to contain the same information, since the text format has no fields. The limits of lines about
    devices apply to lines with the field `device`.

    Args:
        **values: plain values; None leaves a field out.
    """
    return {_FIELDS: {name: value for name, value in values.items() if value is not None}}


def start_logging(form: LogFormat | None = None, level: LogLevel | None = None) -> None:
    """Start to log to standard error within the limits; processes started by this one do the same.

    Libraries log warnings and above only, at every level.

    Args:
        form: the format; None uses the environment's, or else text.
        level: the minimum level; None uses the environment's, or else info.

    Raises:
        InvalidInputError: the environment names an unknown format or level.
    """
    for variable, value in ((FORMAT_VARIABLE, form), (LEVEL_VARIABLE, level)):
        if value is not None:
            os.environ[variable] = value
    logging.basicConfig(level=log_level(), handlers=[service_handler()])
    for library in _QUIET_LIBRARIES:
        logging.getLogger(library).setLevel(max(logging.WARNING, log_level()))
    if log_format() == "json":
        log_failures()


def log_failures() -> None:
    """Log Python's warnings and uncaught errors of threads and the process, which Python would print as text."""
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def logs_json() -> bool:
    """Return whether this process logs in JSON, so that nothing else may be printed to standard error."""
    return any(isinstance(handler.formatter, BoundedJson) for handler in logging.getLogger().handlers)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    _log.critical("the process ends: %s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is None or issubclass(failed.exc_type, SystemExit):
        return
    name = "" if failed.thread is None else failed.thread.name
    caught = failed.exc_type, failed.exc_value, failed.exc_traceback
    _log.error("thread %s ends: %s: %s", name, failed.exc_type.__name__, failed.exc_value, exc_info=caught)


def log_format() -> str:
    """Return the environment's format, or else text.

    Raises:
        InvalidInputError: the environment names an unknown one.
    """
    return _from_environment(FORMAT_VARIABLE, get_args(LogFormat), "text")


def log_level() -> int:
    """Return the environment's minimum level, as a number of `logging`, or else that of info.

    Raises:
        InvalidInputError: the environment names an unknown one.
    """
    level: int = getattr(logging, _from_environment(LEVEL_VARIABLE, get_args(LogLevel), "info").upper())
    return level


def _from_environment(variable: str, choices: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable) or default
    if value not in choices:
        raise InvalidInputError(f"{variable} is {value!r}: set it to {', '.join(choices[:-1])} or {choices[-1]}")
    return value


def service_handler(stream: TextIO | None = None) -> logging.Handler:
    """Return a handler that writes a service's log within the limits, in the environment's format.

    Args:
        stream: the stream to write to; None is standard error.

    Raises:
        InvalidInputError: the environment names an unknown format.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(BoundedJson() if log_format() == "json" else BoundedPlainText(_FORMAT))
    handler.addFilter(should_log)
    handler.addFilter(RateLimit())
    return handler


def should_log(record: logging.LogRecord) -> bool:
    """Return False for gRPC's tracebacks of expected events, and of errors that are already reported."""
    caught = record.exc_info[0] if isinstance(record.exc_info, tuple) else None
    has_gone = record.name == _OF_CALLS and caught is not None and caught.__name__ == _CLIENT_GONE
    return record.name != _OF_DAMAGED_ANSWERS and not has_gone


class BoundedPlainText(logging.Formatter):
    """Removes control characters, and shortens long records in their middle, since a traceback ends with its error."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - named by logging
        """Return the record's line, without its traceback."""
        return plain_text(super().formatMessage(record))

    def formatException(self, ei: _ErrorInfo) -> str:  # noqa: N802 - named by logging
        """Return the record's traceback."""
        return plain_text(super().formatException(ei), keep_newlines=True)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text, within the limit."""
        return _cut(super().format(record), MAX_LINE_BYTES)


class BoundedJson(logging.Formatter):
    """One JSON object for each record: time (UTC), level, logger, message, its fields, and traceback if there is one.

    Long texts are shortened in their middle.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's object on one line, within the limit."""
        at = datetime.fromtimestamp(record.created, timezone.utc)
        content = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": plain_text(record.getMessage()),
            **{name: plain_text(str(v)) if isinstance(v, str) else v for name, v in _fields_of(record).items()},
        }
        if isinstance(record.exc_info, tuple) and record.exc_info[0] is not None:
            content["traceback"] = plain_text(self.formatException(record.exc_info), keep_newlines=True)
        line = json_text(content)
        texts = [name for name, value in content.items() if isinstance(value, str)]
        longest = MAX_LINE_BYTES // 2
        while len(line) > MAX_LINE_BYTES:  # JSON is ASCII here, and may need twelve characters for one
            content.update({name: _cut(content[name], longest) for name in texts})
            line, longest = json_text(content), longest // 2
        return line


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = getattr(record, _FIELDS, {})
    return found


def _cut(text: str, max_bytes: int) -> str:
    """Return a text within a limit; the middle of a longer one is left out."""
    if len(text) * 4 <= max_bytes:  # a character has up to four bytes
        return text
    whole = text.encode(errors="backslashreplace")
    if len(whole) <= max_bytes:
        return text
    end = f" ... (cut: {len(whole):,} bytes in all)"
    half = max(0, max_bytes - len(end) - len(" ... ")) // 2
    head, tail = (part.decode(errors="ignore") for part in (whole[:half], whole[len(whole) - half :]))
    return f"{head} ... {tail}{end}"


@dataclass(slots=True)
class _Place:
    """The state of one logging statement.

    Attributes:
        allowed: the limit on its lines.
        left_out: number of lines left out since the last written one.
    """

    allowed: TokenBucket
    left_out: int = 0


class RateLimit(logging.Filter):
    """Limits the lines of each logging statement; its next line states how many were left out."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start before any line is written.

        Args:
            now_s: a clock, s.
        """
        super().__init__()
        self._now_s = now_s
        self._places: dict[tuple[str, int], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record; extend its text if lines are left out."""
        now_s = self._now_s()
        key = record.pathname, record.lineno
        place = self._places.get(key)
        if place is None:
            is_of_device = "device" in _fields_of(record)
            per_s, at_once = (
                (DEVICE_LINES_PER_S, DEVICE_LINES_AT_ONCE) if is_of_device else (LINES_PER_S, LINES_AT_ONCE)
            )
            place = self._places[key] = _Place(TokenBucket.full(per_s, at_once, now_s))
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
