"""Power meters of a machine: polled sensors, and the energy counters of its CPU packages (RAPL)."""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edge_agent.devices.device import Device, PowerMeter, PowerTrace
from edge_agent.devices.tree import Tree
from wattfleet.common.clock import Clock

_log = logging.getLogger(__name__)


# --- Polled meter -----------------------------------------------------------------------------------------------------
# A power meter that polls a sensor.


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


# --- Power now --------------------------------------------------------------------------------------------------------
# Measures the current power with a meter that runs just long enough.

# jtop publishes its first sample after half a second; energy counters need two readings.
_PATIENCE_S = 1.5
_LOOK_AGAIN_S = INTERVAL_S / 2
# Every meter samples more often than this, s; an older sample means that the meter has failed.
_CURRENT_S = 2.0


def latest_power_mw(meter: PowerMeter, clock: Clock) -> float:
    """Return the latest sample of a running meter, mW; NaN if power cannot be read, or the sample is old.

    Waits briefly if the meter has only just started.

    Args:
        meter: samples the power.
        clock: the device's clock.
    """
    give_up_s = clock.now_s() + _PATIENCE_S
    trace = meter.read()
    while len(trace.at_s) < 2 and (not len(trace.at_s) or math.isnan(trace.power_mw[-1])):
        if clock.now_s() >= give_up_s:
            return math.nan
        clock.sleep_s(_LOOK_AGAIN_S)
        trace = meter.read()
    return float(trace.power_mw[-1]) if clock.now_s() - trace.at_s[-1] <= _CURRENT_S else math.nan


def power_now_mw(device: Device) -> float:
    """Return the current board power, mW; NaN if it cannot be read."""
    meter = device.start_meter()
    try:
        return latest_power_mw(meter, device.clock)
    finally:
        meter.stop()


# --- RAPL -------------------------------------------------------------------------------------------------------------
# Power of a machine's CPU packages, from the kernel's energy counters (RAPL).

# Packages only, since they include their parts, and `psys` would count the packages twice.
_PACKAGE = re.compile(r"package-\d+")


@dataclass(frozen=True)
class _Counter:
    path: str
    wraps_at_uj: int


class Rapl:
    """The energy counters of the CPU packages; most kernels let only root read them.

    Args:
        tree: the machine's files.
        clock: the time base for computing power from energy.
    """

    def __init__(self, tree: Tree, clock: Clock) -> None:
        self._tree = tree
        self._clock = clock
        self._counters: list[_Counter] = []
        self.unreadable = False
        for zone in tree.glob("/sys/class/powercap/intel-rapl:*"):
            try:
                if _PACKAGE.fullmatch(tree.read(f"{zone}/name")):
                    tree.read(f"{zone}/energy_uj")
                    self._counters.append(_Counter(f"{zone}/energy_uj", int(tree.read(f"{zone}/max_energy_range_uj"))))
            except (OSError, ValueError):
                self.unreadable = True

    @property
    def packages(self) -> int:
        """Number of packages with readable counters; 0 if any is unreadable, as the sum would be incomplete."""
        return 0 if self.unreadable else len(self._counters)

    def reader(self) -> Callable[[], float]:
        """Return a function that returns the mean power since its last call, mW; NaN at first and when unknown."""
        before: tuple[float, list[int]] | None = None

        def read_mw() -> float:
            nonlocal before
            earlier_reading = before
            try:
                before = self._clock.now_s(), [int(self._tree.read(counter.path)) for counter in self._counters]
            except (OSError, ValueError):
                before = None
            if earlier_reading is None or before is None or before[0] <= earlier_reading[0]:
                return math.nan
            energy_uj = sum(
                (now - earlier) % counter.wraps_at_uj
                for counter, earlier, now in zip(self._counters, earlier_reading[1], before[1], strict=True)
            )
            return energy_uj / 1e3 / (before[0] - earlier_reading[0])

        return read_mw
