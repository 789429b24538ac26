"""Productive profiling: modes are measured while an app trains for its own sake, so that measuring wastes no work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from edge_agent.devices.device import Device, ModeNotAppliedError
from edge_agent.profiling.disturbance import DisturbedError, OverloadedError, is_cool
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.journal_records import Discarded
from edge_agent.profiling.mode_measurement import USUAL_SETTINGS, MeasurementError, ModeMeasurement, ProfilerSettings
from edge_agent.workloads.step import StepTimes
from wattfleet.modes import PowerMode
from wattfleet_io.batch_timing import timed_batches
from wattfleet_io.gpu import wait_for_gpu

_log = logging.getLogger(__name__)

Batch = TypeVar("Batch")


class ProductiveProfiler:
    """Walks through modes minibatch by minibatch, and back to the training's own mode.

    Whatever happens to a measurement, the training goes on: one that was disturbed, whose power did not settle, or
    whose mode did not take effect, is journalled as discarded, and the training's own mode is put back. The mode is
    tried again when the board is cool, and left out after as many attempts as the settings allow. A measurement that
    the training interrupts, at the end of an epoch say, is begun again at the next `begin`.

    Args:
        device: the board.
        modes: modes to measure, in this order; those that the journal knows are left out.
        journal: where the records go.
        settings: how thoroughly.
    """

    def __init__(
        self,
        device: Device,
        modes: Iterable[PowerMode],
        journal: Journal,
        settings: ProfilerSettings = USUAL_SETTINGS,
    ) -> None:
        self._device = device
        self._journal = journal
        self._settings = settings
        self._ahead = journal.remaining(modes)
        self._attempts = 0
        self._temperature_known = False
        self._measurement: ModeMeasurement | None = None
        self._own_mode: PowerMode | None = None
        self._held = ExitStack()

    @property
    def measuring(self) -> bool:
        """Whether a mode is left to be measured."""
        return bool(self._ahead)

    def profiled(
        self, loader: Iterable[Batch], finish_step: Callable[[], None] = wait_for_gpu
    ) -> Generator[Batch, None, None]:
        """The batches of `loader`; while the caller trains on them, modes are measured.

        Close it when leaving early with an error: the training's own mode comes back at its end.

        Args:
            loader: yields minibatches.
            finish_step: waits until the caller's work on a minibatch is done; that of a virtual board is its `step`.

        Raises:
            ModeNotAppliedError: the training's own mode cannot be put back.
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
        """The training begins, or goes on after a pause; the mode in force now is its own.

        Raises:
            ModeNotAppliedError: the first mode did not take effect, and its own cannot be put back.
        """
        if self._ahead and self._own_mode is None:
            self._own_mode = self._device.current_mode()
            self._held.enter_context(self._device.measuring())
            self._measure_next()

    def minibatch_ended(self, times: StepTimes, ended_s: float | None = None) -> bool:
        """Take note of a minibatch of the training; at the end of a measurement the next mode is put in force.

        Args:
            times: where its time went.
            ended_s: when it ended, device-clock seconds; None for now.

        Returns:
            Whether another mode is in force now than the one that the minibatch was trained in.

        Raises:
            ModeNotAppliedError: the training's own mode cannot be put back.
            JournalError: the measurement could not be written; nothing else is lost.
        """
        if self._measurement is None:
            return self._measure_once_cool()
        try:
            record = self._measurement.minibatch_ended(times, ended_s)
        except (DisturbedError, MeasurementError, ModeNotAppliedError) as error:
            measurement = self._measurement
            measurement.stop()
            self._measurement = None
            overloaded = isinstance(error, OverloadedError)
            self._discard(
                Discarded(measurement.mode, str(error), measurement.minibatches, measurement.seconds, overloaded)
            )
            return True
        if record is None:
            return False
        # The app's process began to train long before: its first minibatch in this mode is not that of a start.
        self._journal.append(replace(record, first_minibatch_ms=None))
        self._leave()
        self._measure_next()
        return True

    def pause(self) -> None:
        """The training pauses or has ended: its own mode is in force again.

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
        if not self._ahead:
            self._rest()
            return
        begin_s = self._device.clock.now_s()
        try:
            self._measurement = ModeMeasurement(self._device, self._ahead[0], self._settings)
        except ModeNotAppliedError as error:
            self._discard(Discarded(self._ahead[0], str(error), 0, self._device.clock.now_s() - begin_s))
        else:
            self._temperature_known |= self._measurement.temperature_known

    def _measure_once_cool(self) -> bool:
        temperature_c = self._device.conditions().temperature_c
        cool = is_cool(temperature_c, self._settings.limits, self._temperature_known)
        if not cool or not self._ahead or self._own_mode is None:
            return False
        self._measure_next()
        return True

    def _discard(self, given_up: Discarded) -> None:
        self._journal.append(given_up)
        self._attempts += 1
        if self._attempts >= self._settings.limits.attempts:
            _log.warning("%s is left out: %s, %d times", given_up.mode.label(), given_up.reason, self._attempts)
            self._leave()
        if self._own_mode is not None:
            self._device.apply(self._own_mode)
        if not self._ahead:
            self._rest()

    def _leave(self) -> None:
        self._measurement = None
        self._attempts = 0
        del self._ahead[0]

    def _rest(self) -> None:
        """Give back the fan and put the training's own mode in force."""
        own, self._own_mode = self._own_mode, None
        try:
            self._held.close()
        finally:
            # A fan that cannot be given back is no reason to leave the board in a measured mode.
            if own is not None:
                self._device.apply(own)
