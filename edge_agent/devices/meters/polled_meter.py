"""A power meter that asks a sensor again and again."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

import numpy as np

from edge_agent.devices.device import PowerTrace
from wattfleet_io.clock import Clock

_log = logging.getLogger(__name__)

INTERVAL_S = 0.2
"""Between two samples; the slowest board answers within a few milliseconds."""


class PolledMeter:
    """Samples power from its making until it is stopped (a `PowerMeter`).

    Args:
        read_mw: the power now, mW; NaN where it cannot be read. Called from another thread.
        clock: stamps each sample.
        interval_s: between two samples.
        stopping: is waited on between two samples; tests let time pass in it.
    """

    def __init__(
        self,
        read_mw: Callable[[], float],
        clock: Clock,
        interval_s: float = INTERVAL_S,
        stopping: threading.Event | None = None,
    ) -> None:
        self._read_mw = read_mw
        self._clock = clock
        self._interval_s = interval_s
        self._stopping = stopping or threading.Event()
        self._failed = False
        self._samples: list[tuple[float, float]] = []
        self._begun_s = clock.now_s()
        self._sample()
        self._thread = threading.Thread(target=self._poll, name="power-meter", daemon=True)
        self._thread.start()

    def read(self) -> PowerTrace:
        """What was sampled so far."""
        samples = np.array(self._samples.copy())
        return PowerTrace(at_s=samples[:, 0], power_mw=samples[:, 1])

    def stop(self) -> PowerTrace:
        """End sampling and return all of it."""
        self._stopping.set()
        self._thread.join()
        return self.read()

    def _poll(self) -> None:
        while not self._stopping.wait(self._until_next_s()):
            self._sample()

    def _until_next_s(self) -> float:
        """Seconds to the next multiple of the interval, so that slow readings do not add up."""
        return self._interval_s - (self._clock.now_s() - self._begun_s) % self._interval_s

    def _sample(self) -> None:
        at_s = self._clock.now_s()
        try:
            power_mw = self._read_mw()
        except Exception:
            # In a thread of its own nobody would see the error, and what was sampled last would stand for ever.
            power_mw = math.nan
            if not self._failed:
                _log.exception("power cannot be read; its samples are missing")
            self._failed = True
        self._samples.append((at_s, power_mw))
