"""Measures the CPU load of the generator and of a server, and how late the generator wakes up."""

from __future__ import annotations

import asyncio
import time
from array import array
from types import TracebackType

import numpy as np

from benchmarks.fleet.servers import Server

Figures = dict[str, float]

_WAKE_EVERY_S = 0.01


def percentiles_ms(times_s: array[float]) -> Figures:
    """Return the median, the 99th percentile and the maximum of times, ms; empty without times."""
    if not times_s:
        return {}
    p50, p99, worst = 1e3 * np.percentile(times_s, (50, 99, 100))
    return {"p50": float(p50), "p99": float(p99), "max": float(worst)}


class Load:
    """A context that measures the load of a server and of this process while it is open.

    Args:
        server: the server.

    Attributes:
        server_s: CPU seconds that the server used, set at the end.
        generator_s: CPU seconds that this process used.
        took_s: how long the context was open, s.
        generator_late_ms: how late this process's event loop woke up.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.server_s = self.generator_s = 0.0
        self.took_s = 1.0
        self.generator_late_ms: Figures = {}

    def __enter__(self) -> Load:
        self._loop = asyncio.get_running_loop()
        self._late_s = array("d")
        self._begun_s = time.perf_counter()
        self._own_before_s = time.process_time()
        self._server_before_s = self._server.cpu_s()
        self._wake_later()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if kind is not None:
            return
        self.took_s = time.perf_counter() - self._begun_s
        self.server_s = self._server.cpu_s() - self._server_before_s
        self.generator_s = time.process_time() - self._own_before_s
        self.generator_late_ms = percentiles_ms(self._late_s)

    @property
    def server_cores(self) -> float:
        """The cores that the server used: CPU seconds per second."""
        return self.server_s / self.took_s

    @property
    def generator_cores(self) -> float:
        """The cores that this process used: CPU seconds per second."""
        return self.generator_s / self.took_s

    def _wake_later(self) -> None:
        due_s = self._loop.time() + _WAKE_EVERY_S
        self._timer = self._loop.call_at(due_s, self._wake, due_s)

    def _wake(self, due_s: float) -> None:
        self._late_s.append(self._loop.time() - due_s)
        self._wake_later()
