"""The log of a service: what a peer sends neither moves the cursor nor looks like another line."""

from __future__ import annotations

import io
import logging

import pytest

from wattfleet_io.logs import PlainTextFormatter

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\n2026-01-01 coordinator: all is well"


@pytest.fixture
def written() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(written: io.StringIO) -> logging.Logger:
    handler = logging.StreamHandler(written)
    handler.setFormatter(PlainTextFormatter("%(name)s: %(message)s"))
    log = logging.Logger("fleet")
    log.addHandler(handler)
    return log


def test_a_message_is_one_line_of_plain_text(log: logging.Logger, written: io.StringIO) -> None:
    log.warning("orin: %s", HOSTILE)
    assert written.getvalue() == "fleet: orin: [2J]0;title31m 2026-01-01 coordinator: all is well\n"


def test_a_traceback_keeps_its_lines_and_has_no_escapes(log: logging.Logger, written: io.StringIO) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("failed")
    lines = written.getvalue().splitlines()
    assert lines[:2] == ["fleet: failed", "Traceback (most recent call last):"]
    assert all(line.isprintable() for line in lines) and len(lines) >= 5
