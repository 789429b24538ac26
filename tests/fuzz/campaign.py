"""Feeds inputs to a target for a limited time, and checks the outcome of each.

`FUZZ_S` is the time for each target in seconds, and `FUZZ_SEED` the seed of the first input. Each further input has the
next seed, so a failing input can be replayed by its own seed.
"""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.fuzz.hostile_input import Hostile
from wattfleet.common.logs import MAX_LINE_BYTES, service_handler

FUZZ_S = float(os.environ.get("FUZZ_S", "0.25"))
FIRST_SEED = int(os.environ.get("FUZZ_SEED", "1"))

ANSWER_S = 20.0
"""An input that takes longer counts as a hang; a slow machine takes a fraction of it."""

MAX_GROWTH_BYTES = 200 * 2**20
"""Growth of the process during one campaign, its client and the generator included."""


LEAST_PER_S = 0.5
"""A campaign with fewer inputs per second has not tested much, whatever it has waited for."""


class Campaign:
    """The inputs of one test.

    Attributes:
        count: the number of inputs so far.
        seed: the seed of the current input.
        what: the current input, for the report of a failure.
        took_s: the time that the campaign took, s; 0 before its end.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seed = FIRST_SEED
        self.what: object = "not made yet"
        self.took_s = 0.0

    def inputs(self, at_least: int = 1) -> Iterator[Hostile]:
        """The sources of random values, one for each input, until the time is over.

        Args:
            at_least: the minimum number of inputs.
        """
        began_s = time.monotonic()
        while self.count < at_least or time.monotonic() < began_s + FUZZ_S:
            self.seed, self.what = FIRST_SEED + self.count, "not made yet"
            yield Hostile(self.seed)
            self.count += 1
        self.took_s = time.monotonic() - began_s
        assert self.count >= LEAST_PER_S * FUZZ_S, f"only {self.count} inputs in {self.took_s:.0f} s"

    @contextmanager
    def judged(self, what: object, log: ServiceLog) -> Iterator[None]:
        """Make sure that an input is handled in time and without a traceback in the log.

        Args:
            what: the input.
            log: the log of the service.
        """
        self.what = what
        began_s = time.monotonic()
        yield
        took_s = time.monotonic() - began_s
        assert took_s < ANSWER_S, f"it took {took_s:.1f} s"
        log.require_clean()

    def failure(self) -> str:
        """Describe the current input, and how to replay it."""
        return f"input {self.count + 1}: {self.what}\nreplay it with FUZZ_SEED={self.seed}"


class ServiceLog:
    """Records problems in the log that a service writes."""

    def __init__(self) -> None:
        self._written = io.StringIO()
        self.handler = service_handler(self._written)

    def require_clean(self) -> None:
        """Make sure that no traceback and no overlong line was written since the last call."""
        written = self._written.getvalue()
        self._written.seek(0)
        self._written.truncate()
        assert "Traceback" not in written, written
        assert all(len(line.encode(errors="replace")) <= MAX_LINE_BYTES for line in written.splitlines())


@contextmanager
def service_log() -> Iterator[ServiceLog]:
    """The log as a service writes it."""
    log, root = ServiceLog(), logging.getLogger()
    # Pytest's handlers would keep each record until the end of the campaign, and the input in its traceback.
    handlers, level = root.handlers, root.level
    root.handlers = [log.handler]
    root.setLevel(logging.INFO)
    try:
        yield log
    finally:
        root.handlers = handlers
        root.setLevel(level)
    log.require_clean()


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Make sure that a campaign does not make the process much larger."""
    before = _held_bytes()
    yield
    grown = _held_bytes() - before
    assert grown < MAX_GROWTH_BYTES, f"the process has grown by {grown / 2**20:.0f} MiB"


def _held_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    held: int = psutil.Process().memory_info().rss
    return held
