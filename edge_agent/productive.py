"""Productive profiling: modes are measured while an app trains for its own sake, so that measuring wastes no work."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from typing import TypeVar

from edge_agent.devices.device import Device, SoftDevice
from edge_agent.disturbance import DisturbedError
from edge_agent.journal import Journal
from edge_agent.mode_measurement import USUAL_SETTINGS, MeasurementError, ModeMeasurement, ProfilerSettings
from edge_agent.records import Discarded
from edge_agent.workloads.step import StepTimes
from wattfleet.modes import PowerMode

_log = logging.getLogger(__name__)

Batch = TypeVar("Batch")


def wait_for_gpu() -> None:
    """Wait until the GPU has done what torch has queued, if this process uses torch on a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


class ProductiveProfiler:
    """Walks through modes minibatch by minibatch, and back to the training's own mode.

    Whatever happens to a measurement, the training goes on: one that was disturbed, or whose power did not settle, is
    journalled as discarded. Its mode is tried again when the board is cool, and left out after as many attempts as
    the settings allow. A measurement that the training interrupts, at the end of an epoch say, is begun again at
    the next `begin`.

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
            finish_step: waits until what the caller did with a minibatch is done.

        Raises:
            ModeNotAppliedError: a mode did not take effect, or did not last.
        """
        clock = self._device.clock
        batches = iter(loader)
        self.begin()
        try:
            while True:
                asked_s = clock.now_s()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                fetched_s = clock.now_s()
                yield batch
                if self.measuring:
                    finish_step()
                    if isinstance(self._device, SoftDevice):
                        self._device.step()
                    ended_s = clock.now_s()
                    self.minibatch_ended(StepTimes((fetched_s - asked_s) * 1e3, (ended_s - fetched_s) * 1e3))
        finally:
            self.pause()

    def begin(self) -> None:
        """The training begins, or goes on after a pause; the mode in force now is its own.

        Raises:
            ModeNotAppliedError: the first mode did not take effect.
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
            ModeNotAppliedError: a mode did not take effect, or did not last.
            JournalError: the measurement could not be written; nothing else is lost.
        """
        if self._measurement is None:
            return self._measure_once_cool()
        try:
            record = self._measurement.minibatch_ended(times, ended_s)
        except (DisturbedError, MeasurementError) as error:
            self._discard(self._measurement, str(error))
            return True
        if record is None:
            return False
        self._journal.append(record)
        self._leave()
        self._measure_next()
        return True

    def pause(self) -> None:
        """The training pauses or has ended: its own mode is in force again.

        Raises:
            ModeNotAppliedError: that mode did not take effect.
        """
        if self._measurement is not None:
            self._measurement.stop()
            self._measurement = None
        self._rest()

    def _measure_next(self) -> None:
        if self._ahead:
            self._measurement = ModeMeasurement(self._device, self._ahead[0], self._settings)
        else:
            self._rest()

    def _measure_once_cool(self) -> bool:
        temperature_c = self._device.conditions().temperature_c
        cool = temperature_c is None or temperature_c < self._settings.limits.cool_c
        if not cool or not self._ahead or self._own_mode is None:
            return False
        self._measure_next()
        return True

    def _discard(self, measurement: ModeMeasurement, reason: str) -> None:
        measurement.stop()
        self._measurement = None
        self._journal.append(Discarded(measurement.mode, reason, measurement.minibatches, measurement.seconds))
        self._attempts += 1
        if self._attempts >= self._settings.limits.attempts:
            _log.warning("%s is left out: %s, %d times", measurement.mode.label(), reason, self._attempts)
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
        self._held.close()
        if self._own_mode is not None:
            own, self._own_mode = self._own_mode, None
            self._device.apply(own)
