"""Which power modes keep a duty."""

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
        rest: the one that draws the least while nothing is trained; None if too little is known.
    """

    @property
    def rest(self) -> PowerMode | None:
        """See the attribute."""
        ...

    def keeps_duty(self, mode: PowerMode) -> bool:
        """Whether requests are answered in time in a mode while nothing is trained, as far as is known."""
        ...


class MeasuredDutyModes:
    """Judges modes by the measured times of batches and by the clocks alone.

    Args:
        duty: to be kept.
        times: live estimates.
        largest_batch: requests that the model takes at once.
        arrivals_per_s: of requests.
        in_force: the mode in force. While no batch was measured, it and higher modes count as keeping the duty; None if
            it is unknown, and then any mode does.

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
        """Whether some batch is answered within the limit, as fast as requests arrive."""
        if not self._times.knows_inference:
            return self._in_force is None or all(knob >= now for knob, now in zip(mode, self._in_force, strict=True))
        batch = 1
        while True:
            answer_ms = self._times.inference_ms(mode, batch)
            if answer_ms is None:
                return False
            # Requests gather while the batch before them is answered.
            gathers_ms = max(answer_ms, (batch - 1) / self._arrivals_per_s * 1e3) if self._arrivals_per_s else 0.0
            keeps_up = self._arrivals_per_s * answer_ms / 1e3 <= batch
            if keeps_up and gathers_ms + answer_ms <= self._duty.latency_ms:
                return True
            if batch >= self._largest_batch:
                return False
            batch = min(2 * batch, self._largest_batch)


class KnownDutyModes:
    """Judges modes by predictions where they exist, and by measured times elsewhere.

    Args:
        known: the modes that are predicted.
        keeping: those of them that keep the duty.
        measured: judges the others.
        rest: the one that draws the least of those that keep the duty; None if none does.

    Attributes:
        rest: as given.
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
    """The highest of `[n, 4]` modes: by the clocks of the GPU, the CPU and the memory, and then the cores."""
    (highest,) = array_to_modes(modes[[int(np.lexsort((modes[:, 0], modes[:, 3], modes[:, 1], modes[:, 2]))[-1])]])
    return highest


def lowest_keeping(modes: Sequence[PowerMode], keeps_duty: Callable[[PowerMode], bool]) -> PowerMode:
    """The mode in which a device rests while its draw is unknown: the lowest that keeps it, or else the highest.

    Args:
        modes: that the device offers.
        keeps_duty: whether requests are answered in time in a mode.
    """
    ordered = sorted(modes, key=lambda mode: (mode.gpu_hz, mode.cpu_khz, mode.mem_hz, mode.cores))
    return next((mode for mode in ordered if keeps_duty(mode)), ordered[-1])
