"""Measures the load of the generator and of a server, and how late the generator wakes up."""

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
    """The middle, the 99th percentile and the worst of some times, ms; empty where there are none."""
    if not times_s:
        return {}
    p50, p99, worst = 1e3 * np.percentile(times_s, (50, 99, 100))
    return {"p50": float(p50), "p99": float(p99), "max": float(worst)}


class Load:
    """A context that watches both sides while it is open.

    Args:
        server: the other side.

    Attributes:
        server_cores: processor seconds a second that the server used, known afterwards.
        generator_cores: those of this process.
        generator_late_ms: how late this process's event loop woke up.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.server_cores = 0.0
        self.generator_cores = 0.0
        self.generator_late_ms: Figures = {}

    def __enter__(self) -> Load:
        self._loop = asyncio.get_running_loop()
        self._late_s = array("d")
        self._begun_s = time.perf_counter()
        self._own_s = time.process_time()
        self._server_s = self._server.cpu_s()
        self._wake_later()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if kind is not None:
            return
        took_s = time.perf_counter() - self._begun_s
        self.server_cores = (self._server.cpu_s() - self._server_s) / took_s
        self.generator_cores = (time.process_time() - self._own_s) / took_s
        self.generator_late_ms = percentiles_ms(self._late_s)

    def _wake_later(self) -> None:
        due_s = self._loop.time() + _WAKE_EVERY_S
        self._timer = self._loop.call_at(due_s, self._wake, due_s)

    def _wake(self, due_s: float) -> None:
        self._late_s.append(self._loop.time() - due_s)
        self._wake_later()
