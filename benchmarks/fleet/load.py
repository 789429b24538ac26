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
        server_s: processor seconds that the server used, known afterwards.
        generator_s: those of this process.
        took_s: how long it was open, s.
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
        """Processor seconds a second that the server used."""
        return self.server_s / self.took_s

    @property
    def generator_cores(self) -> float:
        """Processor seconds a second that this process used."""
        return self.generator_s / self.took_s

    def _wake_later(self) -> None:
        due_s = self._loop.time() + _WAKE_EVERY_S
        self._timer = self._loop.call_at(due_s, self._wake, due_s)

    def _wake(self, due_s: float) -> None:
        self._late_s.append(self._loop.time() - due_s)
        self._wake_later()
