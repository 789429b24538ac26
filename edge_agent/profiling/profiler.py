"""Measures a workload's time and power in a sequence of modes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from edge_agent.devices.device import (
    Device,
    DutyNotKeptError,
    KnobNotReachedError,
    ModeNotAppliedError,
    require_in_force,
)
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.mode_measurement import (
    DEFAULT_SETTINGS,
    DisturbedError,
    MeasurementError,
    ModeMeasurement,
    OverloadedError,
    ProfilerSettings,
    is_cool,
    level_mw,
    wait_until_cool,
)
from edge_agent.workloads.loading import Step, StepTimes
from wattfleet.common.version import wait_for_gpu
from wattfleet.common.wrapped_loader import timed_batches
from wattfleet.core.errors import WattfleetError
from wattfleet.core.modes import Discarded, ModeRecord, PowerMode

_log = logging.getLogger(__name__)

IDLE_S = 20.0
"""Time for which idle power is measured, on the device's clock, s."""

# Time after a training until the board's power is back at idle, s.
_COOL_DOWN_S = 5.0
# A single failure may be due to the mode; this many in a row are due to the board.
_FAILED_IN_A_ROW = 3


class Profiler:
    """Measures modes of one device.

    Args:
        device: the device; it stays in the mode measured last.
        settings: how long to measure each mode.

    Attributes:
        left_out: modes that were not measured, since the device would not answer its requests in time in them.
    """

    def __init__(self, device: Device, settings: ProfilerSettings = DEFAULT_SETTINGS) -> None:
        self._device = device
        self._settings = settings
        self._disturbed = False
        self._temperature_known = False
        self._failed: set[PowerMode | tuple[str, int]] = set()
        self._unreached: set[tuple[str, int]] = set()
        self.left_out: list[PowerMode] = []

    def profile(self, modes: Iterable[PowerMode], step: Step, journal: Journal) -> Generator[ModeRecord, None, None]:
        """Measure the modes missing from the journal; each record is in the journal when it is yielded.

        A disturbed mode is measured again once the board is cool, up to the number of attempts in the settings. A mode
        that does not take effect, or cannot be measured, is skipped for now. If that is due to one knob, all modes with
        its value are skipped for now, and count as one. Discarded measurements are journalled too.
        Close the iterator when leaving early: it holds the fan until its end.

        Args:
            modes: modes that the device offers.
            step: trains one minibatch.
            journal: the journal for the records.

        Raises:
            ModeNotAppliedError: three different modes in a row failed (or all, on a board with fewer), and the last one
                did not take effect or did not stay in force.
            MeasurementError: they failed, and the last one had too few settled power samples within the patience.
            TooHotError: the board did not cool down within the patience.
        """
        self._unreached.clear()
        with self._device.measuring():
            for mode in journal.remaining(modes):
                if not self._unreached.isdisjoint(mode._asdict().items()):
                    continue
                record = self._undisturbed(mode, step, journal)
                if record is not None:
                    self._failed.clear()
                    journal.append(record)
                    yield record

    def measure(self, mode: PowerMode, step: Step) -> ModeRecord:
        """Train in a mode until time and power are known.

        Args:
            mode: a mode that the device offers.
            step: trains one minibatch.

        Raises:
            DisturbedError: the board got too hot, throttled itself, or stopped reporting.
            ModeNotAppliedError: the mode did not take effect, or did not stay in force.
            MeasurementError: too few settled power samples within the patience.
        """
        with ModeMeasurement(self._device, mode, self._settings) as measurement:
            return _finished(measurement, step)

    def measure_idle(self, mode: PowerMode, seconds: float = IDLE_S) -> float:
        """Return the median board power in a mode over `seconds` while nothing is trained, mW.

        Raises:
            ModeNotAppliedError: the mode did not take effect, or did not stay in force.
            MeasurementError: too few power samples in that time.
        """
        self._device.apply(mode)
        require_in_force(self._device, mode)
        self._device.clock.sleep_s(_COOL_DOWN_S)
        meter = self._device.start_meter()
        try:
            self._device.clock.sleep_s(seconds)
        finally:
            trace = meter.stop()
        require_in_force(self._device, mode)
        level = level_mw(trace)
        if level is None:
            raise MeasurementError(
                f"{mode.label()}: too few power samples in {seconds:g} idle seconds: run `wattfleet agent doctor` "
                f"for the reason, or use a simulated board in real time, such as --device "
                f"simulated:agx-orin:real-time, which needs no meter"
            )
        return level.median

    def _undisturbed(self, mode: PowerMode, step: Step, journal: Journal) -> ModeRecord | None:
        for _ in range(self._settings.limits.attempts):
            if self._disturbed:
                wait_until_cool(self._device, self._settings.limits, self._temperature_known)
                self._disturbed = False
            begin_s = self._device.clock.now_s()
            minibatches = 0
            try:
                with ModeMeasurement(self._device, mode, self._settings) as measurement:
                    self._temperature_known |= measurement.temperature_known
                    try:
                        return _finished(measurement, step)
                    finally:
                        minibatches = measurement.minibatches
            except DutyNotKeptError as error:
                # The mode itself is fine: it is measured once requests leave enough time.
                _log.info("mode %s cannot be measured now: %s", mode.label(), error)
                self.left_out.append(mode)
                return None
            except (DisturbedError, ModeNotAppliedError, MeasurementError) as error:
                reason = str(error)
                took_s = self._device.clock.now_s() - begin_s
                discarded = _discarded(mode, error, minibatches, took_s)
                journal.append(discarded)
                if not isinstance(error, DisturbedError):
                    self._note_failure(discarded, error)
                    return None
                self._disturbed = True
        _log.warning("skipping mode %s, disturbed %d times: %s", mode.label(), self._settings.limits.attempts, reason)
        return None

    def _note_failure(self, discarded: Discarded, error: WattfleetError) -> None:
        if (unreached := discarded.unreached_value) is not None:
            self._unreached.add(unreached)
        self._failed.add(unreached or discarded.mode)
        if len(self._failed) >= min(_FAILED_IN_A_ROW, len(self._device.modes)):
            raise error
        _log.warning("skipping mode %s for now: %s", discarded.mode.label(), error)


def _discarded(mode: PowerMode, error: WattfleetError, minibatches: int, seconds: float) -> Discarded:
    """Return the record of a measurement that an error ended."""
    knob = error.knob if isinstance(error, KnobNotReachedError) else None
    return Discarded(mode, str(error), minibatches, seconds, isinstance(error, OverloadedError), knob)


def _finished(measurement: ModeMeasurement, step: Step) -> ModeRecord:
    while (record := measurement.minibatch_ended(step())) is None:
        pass
    return record


# --- Productive profiler ----------------------------------------------------------------------------------------------
# Productive profiling: measures modes during an app's own training, so that no work is wasted.

Batch = TypeVar("Batch")


class ProductiveProfiler:
    """Measures one mode after another during a training, then restores the training's own mode.

    The training continues even if a measurement fails. A measurement that is disturbed, whose power does not settle, or
    whose mode does not take effect, is journalled as discarded. The training's own mode is then restored. The mode is
    tried again once the board is cool, up to the number of attempts in the settings. A pass over the data may be too
    short for a measurement: then the measurement and its mode continue in the next pass. A measurement that the end of
    a longer pass interrupts starts again at the next `begin`.

    Args:
        device: the board.
        modes: modes to measure, in this order; those in the journal are skipped.
        journal: the journal for the records.
        settings: how long to measure each mode.
        fits: whether there is time left to measure a mode; asked before its measurement.
        why_none: why there is no mode to measure, for people; empty if there is one.

    Attributes:
        measured: number of modes measured so far.
        discarded: number of measurements discarded so far.
    """

    def __init__(
        self,
        device: Device,
        modes: Iterable[PowerMode],
        journal: Journal,
        settings: ProfilerSettings = DEFAULT_SETTINGS,
        fits: Callable[[PowerMode], bool] = lambda mode: True,
        why_none: str = "",
    ) -> None:
        self._device = device
        self._journal = journal
        self._settings = settings
        self._fits = fits
        self._pending = journal.remaining(modes)
        self.measured = self.discarded = 0
        self._attempts = 0
        self._temperature_known = False
        self._measurement: ModeMeasurement | None = None
        self._has_begun = self._spans_pass = False
        self._own_mode: PowerMode | None = None
        self._held = ExitStack()
        self._why_none = why_none

    @property
    def measuring(self) -> bool:
        """Whether there is another mode to measure."""
        return bool(self._pending)

    @property
    def is_cut_off(self) -> bool:
        """Whether the first measurement of the training was not finished."""
        return self._has_begun and not self.measured and not self.discarded

    @property
    def why_none_measured(self) -> str:
        """Why no mode was measured in this training, for people; empty if one was, or if this is not known."""
        if self.measured:
            return ""
        if self.discarded:
            return "every measurement was disturbed; the agent's log has the reasons"
        return "the training is too short to measure one" if self.is_cut_off else self._why_none

    def profiled(
        self, loader: Iterable[Batch], finish_step: Callable[[], None] = wait_for_gpu
    ) -> Generator[Batch, None, None]:
        """Yield the batches of `loader` and measure modes while the caller trains on them.

        Close the generator when leaving early: its end restores the training's own mode.

        Args:
            loader: yields minibatches.
            finish_step: waits until the caller's work on a minibatch is done; for a virtual board, its `step`.

        Raises:
            ModeNotAppliedError: the training's own mode cannot be restored.
        """
        self.begin()
        try:
            yield from timed_batches(
                loader,
                lambda: self.measuring,
                lambda times: self.minibatch_ended(StepTimes(times.fetch_stall_ms, times.compute_ms)),
                finish_step,
                self._device.clock.now_s,
            )
        finally:
            self.pause()

    def begin(self) -> None:
        """Start, or continue after a pause, in the training's own mode or the one being measured.

        Raises:
            ModeNotAppliedError: the first mode did not take effect, and the training's own cannot be restored.
        """
        self._spans_pass = True
        if self._measurement is not None:
            self._measurement.resume()
        elif self._pending and self._own_mode is None:
            self._has_begun = True
            self._own_mode = self._device.current_mode()
            self._held.enter_context(self._device.measuring())
            self._measure_next()

    def begin_no_further(self) -> None:
        """Complete the measurement in progress, and begin no other one."""
        self._pending = self._pending[:1] if self._measurement is not None else []

    def minibatch_ended(self, times: StepTimes, ended_s: float | None = None) -> bool:
        """Record the end of a minibatch; when a measurement is complete, apply the next mode.

        Args:
            times: the parts of its time.
            ended_s: when it ended, device-clock seconds; None for now.

        Returns:
            Whether the mode has changed since the minibatch.

        Raises:
            ModeNotAppliedError: the training's own mode cannot be restored.
            JournalError: the measurement could not be written; earlier ones are intact.
        """
        if self._measurement is None:
            return self._measure_once_cool()
        try:
            record = self._measurement.minibatch_ended(times, ended_s)
        except (DisturbedError, MeasurementError, ModeNotAppliedError) as error:
            measurement = self._measurement
            measurement.stop()
            self._measurement = None
            self._spans_pass = False
            self._discard(_discarded(measurement.mode, error, measurement.minibatches, measurement.seconds))
            return True
        if record is None:
            return False
        # The app has been training for a while, so its first minibatch in this mode has no warm-up.
        self._journal.append(replace(record, first_minibatch_ms=None))
        self.measured += 1
        self._spans_pass = False
        self._leave()
        self._measure_next()
        return True

    def pass_ended(self) -> bool:
        """End a pass over the data. If it was too short for a measurement, that continues in the next pass.

        Returns:
            Whether the training's own mode is restored.

        Raises:
            ModeNotAppliedError: that mode did not take effect.
        """
        if self._measurement is not None and self._spans_pass:
            return False
        self.pause()
        return True

    def pause(self) -> None:
        """Pause or end measuring: restore the training's own mode.

        Raises:
            ModeNotAppliedError: that mode did not take effect.
        """
        measurement, self._measurement = self._measurement, None
        try:
            if measurement is not None:
                measurement.stop()
        finally:
            self._rest()

    def _measure_next(self) -> None:
        while self._pending and not self._fits(self._pending[0]):
            self._leave()
        if not self._pending:
            self._rest()
            return
        begin_s = self._device.clock.now_s()
        try:
            self._measurement = ModeMeasurement(self._device, self._pending[0], self._settings)
        except DutyNotKeptError as error:
            # The mode itself is fine: it is measured once requests leave enough time.
            _log.info("mode %s cannot be measured now: %s", self._pending[0].label(), error)
            self._leave()
            self._measure_next()
        except ModeNotAppliedError as error:
            self._discard(_discarded(self._pending[0], error, 0, self._device.clock.now_s() - begin_s))
        else:
            self._temperature_known |= self._measurement.temperature_known

    def _measure_once_cool(self) -> bool:
        temperature_c = self._device.conditions().temperature_c
        cool = is_cool(temperature_c, self._settings.limits, self._temperature_known)
        if not cool or not self._pending or self._own_mode is None:
            return False
        self._measure_next()
        return True

    def _discard(self, discarded: Discarded) -> None:
        self._journal.append(discarded)
        self.discarded += 1
        self._attempts += 1
        if self._attempts >= self._settings.limits.attempts:
            _log.warning("skipping mode %s: %s, %d attempts", discarded.mode.label(), discarded.reason, self._attempts)
            self._leave()
            if (unreached := discarded.unreached_value) is not None:
                self._pending = [mode for mode in self._pending if unreached not in mode._asdict().items()]
        if self._own_mode is not None:
            self._device.apply(self._own_mode)
        if not self._pending:
            self._rest()

    def _leave(self) -> None:
        self._measurement = None
        self._attempts = 0
        del self._pending[0]

    def _rest(self) -> None:
        """Release the fan and restore the training's own mode."""
        own, self._own_mode = self._own_mode, None
        try:
            self._held.close()
        finally:
            # Restore the mode even if the fan cannot be released.
            if own is not None:
                self._device.apply(own)
