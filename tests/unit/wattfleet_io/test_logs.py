"""The log of a service: what peers send can make it neither long nor fast."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import time

import pytest

from wattfleet_io.logs import LINES_AT_ONCE, LINES_PER_S, MAX_LINE_BYTES, BoundedPlainText, RateLimit, service_handler

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
        """Stands in for gRPC's own, which it does not export."""

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
