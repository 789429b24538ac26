"""Measures a workload's time and power in a sequence of modes."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable

from edge_agent.devices.device import Device, DutyNotKeptError, ModeNotAppliedError, require_in_force
from edge_agent.profiling.disturbance import DisturbedError, OverloadedError, wait_until_cool
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.journal_records import Discarded, ModeRecord
from edge_agent.profiling.mode_measurement import (
    DEFAULT_SETTINGS,
    MeasurementError,
    ModeMeasurement,
    ProfilerSettings,
)
from edge_agent.profiling.settling import level_mw
from edge_agent.workloads.step import Step
from wattfleet.errors import WattfleetError
from wattfleet.modes import PowerMode

_log = logging.getLogger(__name__)

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
        self._failed: set[PowerMode] = set()
        self.left_out: list[PowerMode] = []

    def profile(self, modes: Iterable[PowerMode], step: Step, journal: Journal) -> Generator[ModeRecord, None, None]:
        """Measure the modes missing from the journal; each record is in the journal when it is yielded.

        A disturbed mode is measured again once the board is cool, up to the number of attempts in the settings. A mode
        that does not take effect, or cannot be measured, is skipped for now. Discarded measurements are journalled too.
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
        with self._device.measuring():
            for mode in journal.remaining(modes):
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

    def measure_idle(self, mode: PowerMode, seconds: float = 20.0) -> float:
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
                journal.append(Discarded(mode, reason, minibatches, took_s, isinstance(error, OverloadedError)))
                if not isinstance(error, DisturbedError):
                    self._note_failure(mode, error)
                    return None
                self._disturbed = True
        _log.warning("skipping mode %s, disturbed %d times: %s", mode.label(), self._settings.limits.attempts, reason)
        return None

    def _note_failure(self, mode: PowerMode, error: WattfleetError) -> None:
        self._failed.add(mode)
        if len(self._failed) >= min(_FAILED_IN_A_ROW, len(self._device.modes)):
            raise error
        _log.warning("skipping mode %s for now: %s", mode.label(), error)


def _finished(measurement: ModeMeasurement, step: Step) -> ModeRecord:
    while (record := measurement.minibatch_ended(step())) is None:
        pass
    return record
