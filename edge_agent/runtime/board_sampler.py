"""Samples a board's power, temperature and mode while the agent runs; each lease carries the latest sample."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from edge_agent.devices.device import Device
from wattfleet.errors import WattfleetError
from wattfleet.modes import PowerMode
from wattfleet_proto.board_sample import BoardSample

_log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Seconds between two readings of power; energy is integrated from these readings."""

_CONDITIONS_EVERY = 5
"""Only every fifth reading includes temperature and mode, since these take many files to read."""

_LONGEST_GAP_S = 30.0
"""Energy over a longer gap between readings, such as a suspended board, is unknown and not counted."""


class BoardSampler:
    """Keeps the latest sample of one board.

    Args:
        device: the board.
        sleep: waits for a number of seconds.
    """

    def __init__(self, device: Device, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._device = device
        self._sleep = sleep
        self._readings = 0
        self._latest: BoardSample | None = None
        self._temperature_c: float | None = None
        self._throttle_events: int | None = None
        self._mode: PowerMode | None = None
        self._energy_j: float | None = None
        self._own_energy_from_mj: float | None = None
        self._before: tuple[float, float] | None = None
        self._is_failing = False

    @property
    def latest(self) -> BoardSample | None:
        """The latest sample; None before the first."""
        return self._latest

    async def run(self) -> None:
        """Sample until cancelled. If the board cannot be read, log that and try again."""
        while True:
            try:
                # In a thread, since a sensor may be slow.
                await asyncio.to_thread(self.sample)
                self._is_failing = False
            except (OSError, ValueError, WattfleetError) as error:
                if not self._is_failing:
                    _log.warning("the board's sensors cannot be read: %s", error)
                self._is_failing = True
                self._latest, self._before = None, None
            await self._sleep(INTERVAL_S)

    def sample(self) -> None:
        """Take the next reading.

        Raises:
            OSError: a sensor cannot be read.
            ValueError: a sensor returns no number.
            WattfleetError: the mode cannot be read.
        """
        now_s, activity = self._device.clock.now_s(), self._device.activity()
        power_w = activity.power_mw / 1e3 if math.isfinite(activity.power_mw) else None
        if activity.energy_mj is None:
            self._add_energy(now_s, power_w)
        else:
            if self._own_energy_from_mj is None:
                self._own_energy_from_mj = activity.energy_mj
            self._energy_j = (activity.energy_mj - self._own_energy_from_mj) / 1e3
        if self._readings % _CONDITIONS_EVERY == 0:
            conditions = self._device.conditions()
            self._temperature_c, self._throttle_events = conditions.temperature_c, conditions.throttle_events
            self._mode = self._device.current_mode()
        self._readings += 1
        self._latest = BoardSample(
            power_w,
            self._temperature_c,
            self._mode,
            self._throttle_events,
            activity.fan_share,
            activity.gpu_use_share,
            self._energy_j,
        )

    def _add_energy(self, now_s: float, power_w: float | None) -> None:
        """Add the energy since the previous reading: the mean of both powers times the seconds between them."""
        if power_w is None:
            self._before = None
            return
        if self._before is not None and now_s - self._before[0] <= _LONGEST_GAP_S:
            before_s, before_w = self._before
            self._energy_j = (self._energy_j or 0.0) + (before_w + power_w) / 2 * (now_s - before_s)
        elif self._energy_j is None:
            self._energy_j = 0.0
        self._before = (now_s, power_w)
