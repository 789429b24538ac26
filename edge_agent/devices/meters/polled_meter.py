"""A power meter that polls a sensor."""

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
"""Seconds between two samples; the slowest board answers within a few milliseconds."""


class PolledMeter:
    """Samples power from its creation until it is stopped (a `PowerMeter`).

    Args:
        read_mw: reads the power, mW; NaN if it cannot be read. Called from another thread.
        clock: stamps each sample.
        interval_s: seconds between two samples.
        stopping: the event to wait on between two samples; tests advance time in it.
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
        self._start_s = clock.now_s()
        self._sample()
        self._thread = threading.Thread(target=self._poll, name="power-meter", daemon=True)
        self._thread.start()

    def read(self) -> PowerTrace:
        """Return the samples so far."""
        samples = np.array(self._samples.copy())
        return PowerTrace(at_s=samples[:, 0], power_mw=samples[:, 1])

    def stop(self) -> PowerTrace:
        """Stop sampling and return all samples."""
        self._stopping.set()
        self._thread.join()
        return self.read()

    def _poll(self) -> None:
        while not self._stopping.wait(self._until_next_s()):
            self._sample()

    def _until_next_s(self) -> float:
        """Return the seconds to the next multiple of the interval, so that slow readings do not cause drift."""
        return self._interval_s - (self._clock.now_s() - self._start_s) % self._interval_s

    def _sample(self) -> None:
        at_s = self._clock.now_s()
        try:
            power_mw = self._read_mw()
        except Exception:
            # An unhandled error would end the thread silently, and the last sample would look current for ever.
            power_mw = math.nan
            if not self._failed:
                _log.exception("cannot read power; recording missing samples")
            self._failed = True
        self._samples.append((at_s, power_mw))
