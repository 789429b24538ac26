"""Decides which power modes keep a duty."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Protocol

import numpy as np

from edge_agent.serving.live_times import LiveTimes
from wattfleet.duties import Duty
from wattfleet.modes import ModeArray, PowerMode, array_to_modes


class DutyModes(Protocol):
    """Knows which power modes keep a duty.

    Attributes:
        rest: the mode that draws the least power while nothing is trained; None if too little is known.
    """

    @property
    def rest(self) -> PowerMode | None:
        """See the attribute."""
        ...

    def keeps_duty(self, mode: PowerMode) -> bool:
        """Return whether a mode is known to answer requests in time while nothing is trained."""
        ...


class MeasuredDutyModes:
    """Decides from the measured times of batches and the modes' clocks only.

    Args:
        duty: the duty to keep.
        times: live estimates.
        largest_batch: maximum number of requests that the model accepts at once.
        arrivals_per_s: rate of requests.
        in_force: the mode in force; None if unknown. Until a batch is measured, this mode and higher ones count as
            keeping the duty; if it is unknown, all modes do.

    Attributes:
        rest: None, as no power was measured.
    """

    rest: PowerMode | None = None

    def __init__(
        self, duty: Duty, times: LiveTimes, largest_batch: int, arrivals_per_s: float, in_force: PowerMode | None
    ) -> None:
        self._duty = duty
        self._times = times
        self._largest_batch = largest_batch
        self._arrivals_per_s = arrivals_per_s
        self._in_force = in_force

    def keeps_duty(self, mode: PowerMode) -> bool:
        """Return whether some batch size answers requests within the limit, and as fast as they arrive."""
        if not self._times.knows_inference:
            return self._in_force is None or all(knob >= now for knob, now in zip(mode, self._in_force, strict=True))
        batch = 1
        while True:
            answer_ms = self._times.inference_ms(mode, batch)
            if answer_ms is None:
                return False
            # Requests gather while the previous batch is answered.
            gathers_ms = max(answer_ms, (batch - 1) / self._arrivals_per_s * 1e3) if self._arrivals_per_s else 0.0
            keeps_up = self._arrivals_per_s * answer_ms / 1e3 <= batch
            if keeps_up and gathers_ms + answer_ms <= self._duty.latency_ms:
                return True
            if batch >= self._largest_batch:
                return False
            batch = min(2 * batch, self._largest_batch)


class KnownDutyModes:
    """Decides from predictions where they exist, and otherwise from measured times.

    Args:
        known: the predicted modes.
        keeping: those predicted modes that keep the duty.
        measured: decides for all other modes.
        rest: the mode that keeps the duty with the least power; None if no mode keeps it.

    Attributes:
        rest: the given mode.
    """

    def __init__(
        self, known: Set[PowerMode], keeping: Set[PowerMode], measured: DutyModes, rest: PowerMode | None
    ) -> None:
        self.rest = rest
        self._known = known
        self._keeping = keeping
        self._measured = measured

    def keeps_duty(self, mode: PowerMode) -> bool:
        """See `DutyModes.keeps_duty`."""
        return mode in self._keeping if mode in self._known else self._measured.keeps_duty(mode)


def highest_mode(modes: ModeArray) -> PowerMode:
    """Return the highest of `[n, 4]` modes, compared by GPU clock, then CPU clock, memory clock and cores."""
    (highest,) = array_to_modes(modes[[int(np.lexsort((modes[:, 0], modes[:, 3], modes[:, 1], modes[:, 2]))[-1])]])
    return highest


def lowest_keeping(modes: Sequence[PowerMode], keeps_duty: Callable[[PowerMode], bool]) -> PowerMode:
    """Return the resting mode while power is unknown: the lowest mode that keeps the duty, or else the highest mode.

    Args:
        modes: the modes that the device offers.
        keeps_duty: returns whether requests are answered in time in a mode.
    """
    ordered = sorted(modes, key=lambda mode: (mode.gpu_hz, mode.cpu_khz, mode.mem_hz, mode.cores))
    return next((mode for mode in ordered if keeps_duty(mode)), ordered[-1])
