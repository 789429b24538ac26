"""Measures a workload's time and power at power modes, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from edge_agent.devices.device import Device, ModeNotAppliedError
from edge_agent.journal import Journal, ModeRecord
from edge_agent.settling import level_mw, settled_minibatch_ms, settled_power_mw
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.modes import PowerMode

# A meter has a new sample about once a second: looking after every minibatch would only slow training down.
_LOOK_EVERY_S = 0.5
# A board that was training takes this long to come to rest, s.
_COOL_DOWN_S = 5.0


class MeasurementError(WattfleetError):
    """A mode could not be measured: power did not settle, or could not be read."""


@dataclass(frozen=True)
class ProfilerSettings:
    """How thoroughly a mode is measured.

    Attributes:
        minibatches: minibatches that count, after the first one (which never does).
        power_samples: settled power samples that are needed.
        patience_s: how long to go on training for their sake once the minibatches are done, s.

    Raises:
        InvalidInputError: a number is out of range.
    """

    minibatches: int = 40
    power_samples: int = 5
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        if self.minibatches < 1 or self.power_samples < 3 or not self.patience_s >= 0:
            raise InvalidInputError(
                "a profile needs at least 1 minibatch and 3 power samples a mode, and 0 s of patience, not"
                f" {self.minibatches}, {self.power_samples} and {self.patience_s}"
            )


_USUAL = ProfilerSettings()


class Profiler:
    """Measures modes of one device.

    Args:
        device: the device; it is left in the mode that was measured last.
        settings: how thoroughly.
    """

    def __init__(self, device: Device, settings: ProfilerSettings = _USUAL) -> None:
        self._device = device
        self._settings = settings

    def profile(self, modes: Iterable[PowerMode], step: Callable[[], None], journal: Journal) -> Iterator[ModeRecord]:
        """Measure those of `modes` that the journal lacks; each is in the journal when it is yielded.

        Args:
            modes: modes that the device offers.
            step: trains one minibatch and returns when it is done.
            journal: where the records go.
        """
        for mode in journal.remaining(modes):
            record = self.measure(mode, step)
            journal.append(record)
            yield record

    def measure(self, mode: PowerMode, step: Callable[[], None]) -> ModeRecord:
        """Train at a mode until time and power are known.

        Args:
            mode: a mode that the device offers.
            step: trains one minibatch and returns when it is done.

        Raises:
            ModeNotAppliedError: the mode did not take effect, or did not last.
            MeasurementError: too few settled power samples within the patience.
        """
        clock = self._device.clock
        begin_s = clock.now_s()
        self._apply(mode)
        meter = self._device.start_meter()
        try:
            end_s = [clock.now_s()]
            for _ in range(1 + self._settings.minibatches):
                step()
                end_s.append(clock.now_s())
            give_up_s = clock.now_s() + self._settings.patience_s
            power = settled_power_mw(meter.read(), np.array(end_s[1:]))
            while power is None or power.count < self._settings.power_samples:
                if clock.now_s() >= give_up_s:
                    raise MeasurementError(
                        f"{mode.label()}: {power.count if power else 0} settled power samples after"
                        f" {clock.now_s() - begin_s:.0f} s, {self._settings.power_samples} are needed"
                    )
                look_s = clock.now_s() + _LOOK_EVERY_S
                while clock.now_s() < look_s:
                    step()
                    end_s.append(clock.now_s())
                power = settled_power_mw(meter.read(), np.array(end_s[1:]))
        finally:
            meter.stop()
        self._require(mode)
        time = settled_minibatch_ms(np.diff(end_s) * 1e3)
        return ModeRecord(
            mode=mode,
            minibatch_ms=time.median,
            power_mw=power.median,
            minibatch_spread=time.spread,
            power_spread=power.spread,
            minibatches=time.count,
            power_samples=power.count,
            seconds=clock.now_s() - begin_s,
        )

    def measure_idle(self, mode: PowerMode, seconds: float = 20.0) -> float:
        """Median board power, mW, over `seconds` at a mode while nothing is trained.

        Raises:
            ModeNotAppliedError: the mode did not take effect, or did not last.
            MeasurementError: too few power samples in that time.
        """
        self._apply(mode)
        self._device.clock.sleep_s(_COOL_DOWN_S)
        meter = self._device.start_meter()
        try:
            self._device.clock.sleep_s(seconds)
        finally:
            trace = meter.stop()
        self._require(mode)
        level = level_mw(trace)
        if level is None:
            raise MeasurementError(f"{mode.label()}: too few power samples in {seconds:g} s of idling")
        return level.median

    def _apply(self, mode: PowerMode) -> None:
        self._device.apply(mode)
        self._require(mode)

    def _require(self, mode: PowerMode) -> None:
        in_force = self._device.current_mode()
        if in_force != mode:
            raise ModeNotAppliedError(f"{mode.label()} was set, but {in_force.label()} is in force")
