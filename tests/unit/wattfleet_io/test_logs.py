"""The log of a service: whatever peers send, its lines stay short and their rate limited."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import time

import pytest

from wattfleet.errors import InvalidInputError
from wattfleet_io.logs import (
    DEVICE_LINES_AT_ONCE,
    FORMAT_VARIABLE,
    LEVEL_VARIABLE,
    LINES_AT_ONCE,
    LINES_PER_S,
    MAX_LINE_BYTES,
    BoundedPlainText,
    RateLimit,
    fields,
    log_level,
    service_handler,
)

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\n2026-01-01 coordinator: all is well"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def written(clock: Clock) -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(clock: Clock, written: io.StringIO) -> logging.Logger:
    logger = logging.Logger("test")
    handler = logging.StreamHandler(written)
    handler.setFormatter(BoundedPlainText("%(name)s: %(message)s"))
    handler.addFilter(RateLimit(clock))
    logger.addHandler(handler)
    return logger


def test_a_long_line_is_cut(log: logging.Logger, written: io.StringIO) -> None:
    log.warning("refused %r", "\0" * 1_000_000)
    line = written.getvalue()
    assert len(line.encode()) <= MAX_LINE_BYTES + 1
    assert line.startswith("test: refused '") and line.endswith("bytes in all)\n")


def test_the_limit_counts_bytes(log: logging.Logger, written: io.StringIO) -> None:
    log.warning("ä" * MAX_LINE_BYTES)
    assert len(written.getvalue().encode()) <= MAX_LINE_BYTES + 1


def test_a_traceback_is_cut_in_its_middle_and_keeps_its_error(log: logging.Logger, written: io.StringIO) -> None:
    try:
        raise RuntimeError("x" * 100_000 + " the end")
    except RuntimeError:
        log.exception("failed")
    text = written.getvalue()
    assert len(text.encode()) <= MAX_LINE_BYTES + 1
    assert text.startswith("test: failed\nTraceback") and "the end" in text


def warn(log: logging.Logger, text: str) -> None:
    log.warning("refused: %s", text)


def test_lines_of_one_place_are_limited_and_the_others_are_counted(
    log: logging.Logger, written: io.StringIO, clock: Clock
) -> None:
    for k in range(100_000):
        warn(log, str(k))
    lines = written.getvalue().splitlines()
    assert len(lines) == LINES_AT_ONCE
    assert "further lines like this one are left out" in lines[-1] and "left out" not in lines[-2]
    clock.now_s += 1.0
    warn(log, "later")
    assert written.getvalue().splitlines()[-1].startswith("test: refused: later (99,980 lines like this one")


def test_another_place_is_not_affected(log: logging.Logger, written: io.StringIO) -> None:
    for _ in range(1000):
        warn(log, "again")
    log.warning("another")
    assert written.getvalue().splitlines()[-1] == "test: another"


def test_lines_come_back_as_time_passes(log: logging.Logger, written: io.StringIO, clock: Clock) -> None:
    for _ in range(LINES_AT_ONCE * 3):
        warn(log, "slow")
        clock.now_s += 1.0
    assert len(written.getvalue().splitlines()) == LINES_AT_ONCE * 3
    assert "left out" not in written.getvalue()


def test_a_service_logs_within_the_limits() -> None:
    program = (
        "import logging; from wattfleet_io.logs import start_logging; start_logging()\n"
        "for _ in range(1000): logging.warning('x' * 1_000_000)"
    )
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    most = LINES_AT_ONCE + LINES_PER_S * (time.monotonic() - began_s)
    lines = done.stderr.splitlines()
    assert LINES_AT_ONCE <= len(lines) <= most and all(len(line) <= MAX_LINE_BYTES for line in lines)


def test_a_client_that_has_gone_leaves_no_traceback_of_grpc(written: io.StringIO) -> None:
    class ExecuteBatchError(Exception):
        """Stands in for gRPC's own error, which gRPC does not export."""

    for error in (ExecuteBatchError("Failed execute_batch"), ValueError("told")):
        caught = type(error), error, None
        service_handler(written).handle(
            logging.LogRecord("grpc._cython.cygrpc", logging.ERROR, __file__, 1, "raised", (), caught)
        )
    assert "execute_batch" not in written.getvalue() and "told" in written.getvalue()


def test_a_damaged_answer_leaves_no_traceback_of_grpc(written: io.StringIO) -> None:
    handler = service_handler(written)
    logged = logging.LogRecord("grpc._common", logging.ERROR, __file__, 1, "Exception deserializing message!", (), None)
    handler.handle(logged)
    assert written.getvalue() == ""


def test_a_message_is_one_line_of_plain_text(log: logging.Logger, written: io.StringIO) -> None:
    log.warning("orin: %s", HOSTILE)
    assert written.getvalue() == "test: orin: [2J]0;title31m 2026-01-01 coordinator: all is well\n"


def test_a_traceback_keeps_its_lines_and_has_no_escapes(log: logging.Logger, written: io.StringIO) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("failed")
    lines = written.getvalue().splitlines()
    assert lines[:2] == ["test: failed", "Traceback (most recent call last):"]
    assert all(line.isprintable() for line in lines) and len(lines) >= 5


@pytest.fixture
def json_log(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    logger = logging.Logger("test")
    logger.addHandler(service_handler(written))
    return logger


def test_json_has_the_message_in_words_and_its_fields(json_log: logging.Logger, written: io.StringIO) -> None:
    json_log.warning("%s is ready", "orin-1", extra=fields(device="orin-1", modes=12, detail=None))
    content = json.loads(written.getvalue())
    assert content.pop("time").endswith("Z")
    assert content == {
        "level": "warning", "logger": "test", "message": "orin-1 is ready", "device": "orin-1", "modes": 12,
    }  # fmt: skip


def test_json_is_one_short_line_of_plain_text_whatever_is_logged(
    json_log: logging.Logger, written: io.StringIO
) -> None:
    for text in (HOSTILE, "ä" * 100_000, "\U0001f600" * 100_000, '"' * 100_000):
        try:
            raise ValueError(text)
        except ValueError:
            json_log.exception("refused: %s", text, extra=fields(detail=text))
    lines = written.getvalue().splitlines()
    assert len(lines) == 4 and all(len(line.encode()) <= MAX_LINE_BYTES for line in lines)
    assert all(json.loads(line)["traceback"].startswith("Traceback") for line in lines)
    assert json.loads(lines[0])["message"].isprintable()


def test_a_fleet_that_starts_at_once_has_a_line_for_each_device(json_log: logging.Logger, written: io.StringIO) -> None:
    for k in range(10 * DEVICE_LINES_AT_ONCE):
        json_log.info("%d is ready", k, extra=fields(device=str(k)))
    assert DEVICE_LINES_AT_ONCE <= len(written.getvalue().splitlines()) < 2 * DEVICE_LINES_AT_ONCE


@pytest.mark.parametrize("variable", [FORMAT_VARIABLE, LEVEL_VARIABLE])
def test_an_unknown_choice_in_the_environment_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "loud")
    with pytest.raises(InvalidInputError, match=f"{variable} is 'loud': set it to "):
        (service_handler if variable == FORMAT_VARIABLE else log_level)()


def test_a_process_that_a_service_starts_logs_as_the_service_does() -> None:
    child = (
        "import logging; from wattfleet_io.logs import start_logging; start_logging(); logging.debug('of the child')"
    )
    program = (
        "import subprocess, sys; from wattfleet_io.logs import start_logging; start_logging('json', 'debug')\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == ["of the child"]


def test_what_python_prints_of_failures_is_an_object_in_json() -> None:
    program = (
        "import threading, warnings; from wattfleet_io.logs import start_logging; start_logging('json')\n"
        "def fail(): raise ValueError('in a thread')\n"
        "warnings.warn('a warning')\n"
        "thread = threading.Thread(target=fail, name='worker'); thread.start(); thread.join()\n"
        "raise RuntimeError('in the main thread')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    warning, of_thread, of_process = (json.loads(line) for line in done.stderr.splitlines())
    assert done.returncode == 1
    assert warning["level"] == "warning" and "a warning" in warning["message"]
    assert of_thread["message"] == "thread worker ends: ValueError: in a thread"
    assert of_process["message"] == "the process ends: RuntimeError: in the main thread"
    assert all(each["traceback"].startswith("Traceback") for each in (of_thread, of_process))
