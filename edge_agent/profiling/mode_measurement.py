"""Measures one mode, minibatch by minibatch."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from edge_agent.devices.device import Device, require_in_force
from edge_agent.profiling.disturbance import DEFAULT_LIMITS, Guard, Limits
from edge_agent.profiling.journal_records import ModeRecord
from edge_agent.profiling.settling import RISE_S, settled_minibatch_ms, settled_power_mw
from edge_agent.workloads.step import StepTimes
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.modes import PowerMode

# Seconds between two checks. A meter has a new sample about once a second; checking more often only slows training.
_CHECK_EVERY_S = 0.5
# Power hardly falls in a shorter pause between two passes over the data. After a longer one, it has to rise again.
_NEGLIGIBLE_PAUSE_S = 0.05


class MeasurementError(WattfleetError):
    """A mode could not be measured: power did not settle, or could not be read."""


@dataclass(frozen=True)
class ProfilerSettings:
    """Settings for how long a mode is measured.

    Attributes:
        minibatches: most minibatches to use, not counting the first, which is never used.
        fewest_minibatches: fewest minibatches to use.
        time_error: between these two numbers, a median whose relative standard error is at most this suffices. On the
            26 raw logs of an Orin Nano, such medians differ from those of all minibatches by 0.2 % (median).
        power_samples: required number of settled power samples.
        patience_s: how long to continue training for the power samples once the minibatches are done, s.
        limits: temperature limits and retries.

    Raises:
        InvalidInputError: a number is out of range.
    """

    minibatches: int = 40
    fewest_minibatches: int = 10
    time_error: float = 0.01
    power_samples: int = 5
    patience_s: float = 60.0
    limits: Limits = field(default=DEFAULT_LIMITS)

    def __post_init__(self) -> None:
        if self.minibatches < 1 or self.power_samples < 3 or not self.patience_s >= 0:
            raise InvalidInputError(
                "a profile needs at least 1 minibatch and 3 power samples per mode, and at least 0 s of patience, not"
                f" {self.minibatches}, {self.power_samples} and {self.patience_s}"
            )


DEFAULT_SETTINGS = ProfilerSettings()


class ModeMeasurement:
    """Applies a mode, samples power, and detects when enough is known; a context manager.

    Args:
        device: the board.
        mode: a mode that the board offers.
        settings: how long to measure.

    Raises:
        ModeNotAppliedError: the mode did not take effect.
    """

    def __init__(self, device: Device, mode: PowerMode, settings: ProfilerSettings) -> None:
        self.mode = mode
        self._device = device
        self._settings = settings
        self._begin_s = device.clock.now_s()
        device.apply(mode)
        require_in_force(device, mode)
        self._guard = Guard(device, settings.limits)
        self._last_s = device.clock.now_s()
        self._minibatch_ms: list[float] = []
        # For each run of minibatches without a pause: when they ended.
        self._runs_s: list[list[float]] = [[]]
        self._times: list[StepTimes | None] = []
        self._next_check_s = self._last_s + _CHECK_EVERY_S
        self._give_up_s: float | None = None
        self._meter = device.start_meter()
        self._stopped = False

    @property
    def minibatches(self) -> int:
        """Minibatches trained so far."""
        return len(self._times)

    @property
    def temperature_known(self) -> bool:
        """Whether the board reported its temperature at the start."""
        return self._guard.temperature_known

    @property
    def seconds(self) -> float:
        """Time spent so far, device-clock seconds."""
        return self._device.clock.now_s() - self._begin_s

    def resume(self) -> None:
        """Continue after a pause between two passes over the data, during which no minibatch was trained.

        Neither the pause nor the following rise of power counts towards the patience.
        """
        now_s = self._device.clock.now_s()
        paused_s = now_s - self._last_s
        if paused_s > _NEGLIGIBLE_PAUSE_S and self._runs_s[-1]:
            self._runs_s.append([])
            paused_s += RISE_S
        if self._give_up_s is not None:
            self._give_up_s += paused_s
        self._last_s = now_s

    def minibatch_ended(self, times: StepTimes | None = None, ended_s: float | None = None) -> ModeRecord | None:
        """Record the end of a minibatch; return the mode's record once enough is known.

        Args:
            times: the parts of its time, if known.
            ended_s: when it ended, device-clock seconds; None for now.

        Raises:
            DisturbedError: the board got too hot, throttled itself, or stopped reporting.
            MeasurementError: too few settled power samples within the patience.
            ModeNotAppliedError: the mode did not stay in force.
        """
        now_s = self._device.clock.now_s() if ended_s is None else ended_s
        self._minibatch_ms.append((now_s - self._last_s) * 1e3)
        self._last_s = now_s
        self._runs_s[-1].append(now_s)
        self._times.append(times)
        has_all = self.minibatches == self._settings.minibatches + 1
        if now_s < self._next_check_s and not has_all:
            return None
        self._next_check_s = now_s + _CHECK_EVERY_S
        self._guard.check()
        return self._record_if_settled(now_s) if has_all or self._is_time_known() else None

    def _is_time_known(self) -> bool:
        used = self.minibatches - 1
        if self._give_up_s is not None or used >= self._settings.minibatches:
            return True
        if used < self._settings.fewest_minibatches:
            return False
        return settled_minibatch_ms(np.array(self._minibatch_ms)).error <= self._settings.time_error

    def _record_if_settled(self, now_s: float) -> ModeRecord | None:
        if self._give_up_s is None:
            self._give_up_s = now_s + self._settings.patience_s
        power = settled_power_mw(self._meter.read(), *map(np.array, self._runs_s))
        if power is None or power.count < self._settings.power_samples:
            if now_s >= self._give_up_s:
                raise MeasurementError(
                    f"{self.mode.label()}: {power.count if power else 0} settled power samples after"
                    f" {self.seconds:.0f} s; at least {self._settings.power_samples} are required"
                )
            return None
        self.stop()
        require_in_force(self._device, self.mode)
        time = settled_minibatch_ms(np.array(self._minibatch_ms))
        known = [times for times in self._times[1:] if times is not None]
        return ModeRecord(
            mode=self.mode,
            minibatch_ms=time.median,
            power_mw=power.median,
            minibatch_spread=time.spread,
            power_spread=power.spread,
            minibatches=time.count,
            power_samples=power.count,
            seconds=self.seconds,
            fetch_stall_ms=float(np.median([times.fetch_stall_ms for times in known])) if known else None,
            compute_ms=float(np.median([times.compute_ms for times in known])) if known else None,
            first_minibatch_ms=self._minibatch_ms[0],
        )

    def stop(self) -> None:
        """Stop sampling; the mode stays applied."""
        if not self._stopped:
            self._stopped = True
            self._meter.stop()

    def __enter__(self) -> ModeMeasurement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
