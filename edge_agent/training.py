"""One round's training on the device: put the mode in force, observe or measure, park."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.device import Device, PowerMeter, PowerTrace, SoftDevice
from edge_agent.journal import JournalError
from edge_agent.productive import ProductiveProfiler
from edge_agent.records import require_above_zero
from edge_agent.workloads.step import StepTimes
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.modes import PowerMode

_log = logging.getLogger(__name__)

_LISTENED_FOR_S = 3.0
# What an app may ask for: time is told per epoch, which has to remain a number to learn from.
_FEWEST_EPOCHS, _MOST_EPOCHS = 1e-3, 1e4
_NO_POWER = "no power sample could be read: check the power rails"


class PowerNotReadError(WattfleetError):
    """No power sample could be read while training; missing is not zero, so nothing is reported."""


@dataclass(frozen=True)
class Observed:
    """What a round's training needed.

    Attributes:
        mode: the mode in force.
        epoch_s: seconds per epoch, the warm-up minibatch left out as when profiling.
        power_w: mean watts while training.

    Raises:
        InvalidInputError: the time or the power is not finite and above 0.
    """

    mode: PowerMode
    epoch_s: float
    power_w: float

    def __post_init__(self) -> None:
        require_above_zero(epoch_s=self.epoch_s, power_w=self.power_w)


@dataclass
class _Running:
    epochs: float
    power_limit_w: float
    started_s: float
    meter: PowerMeter
    profiler: ProductiveProfiler | None = None
    measured: bool = False
    unwritable: bool = False
    stepped: int = 0


class TrainingWatch:
    """Runs a device through the trainings of a run's rounds, one at a time."""

    def __init__(
        self,
        device: Device,
        parked: PowerMode,
        minibatches_per_epoch: int,
        productive: Callable[[float], ProductiveProfiler],
    ) -> None:
        """Watch one device.

        Args:
            device: the board.
            parked: the mode between trainings.
            minibatches_per_epoch: minibatches of one pass over the device's data.
            productive: what measures modes during a training that was given so many watts.
        """
        self._device = device
        self._parked = parked
        self._minibatches_per_epoch = minibatches_per_epoch
        self._productive = productive
        self._running: _Running | None = None

    @property
    def is_training(self) -> bool:
        """Whether a training was started and has not ended."""
        return self._running is not None

    def start(self, mode: PowerMode, epochs: float, power_limit_w: float) -> None:
        """Put the mode in force and begin to observe; a training left unfinished is given up.

        Args:
            mode: the assigned mode.
            epochs: local epochs that are to be trained.
            power_limit_w: watts set aside for the device.

        Raises:
            InvalidInputError: the device does not offer the mode, or no round trains so many epochs.
            ModeNotAppliedError: another mode was read back.
        """
        if not _FEWEST_EPOCHS <= epochs <= _MOST_EPOCHS:
            raise InvalidInputError(f"a round trains {_FEWEST_EPOCHS:g} to {_MOST_EPOCHS:g} epochs, not {epochs:g}")
        self.abandon()
        self._device.apply(mode)
        if isinstance(self._device, SoftDevice):
            self._device.step()  # warm-up
        self._running = _Running(epochs, power_limit_w, self._device.clock.now_s(), self._device.start_meter())

    def minibatches_ended(self, times: Sequence[StepTimes], paused: bool) -> bool:
        """Measure modes by minibatches that the app reports; when this returns, the mode to train on in is in force.

        Where a measurement cannot be written, no more are made during this training, which goes on in its own mode.

        Args:
            times: of the minibatches since the last report, the last of which ended just now; none of them begins to
                measure.
            paused: whether the training pauses now.

        Returns:
            Whether further reports are wanted.

        Raises:
            ModeNotAppliedError: another mode was read back.
        """
        running = self._running
        assert running is not None, "minibatches follow start"
        if running.unwritable:
            return False
        if running.profiler is None:
            running.profiler = self._productive(running.power_limit_w)
        try:
            self._measure(running, running.profiler, times, paused)
        except JournalError as error:
            _log.error("no more modes are measured during this training: %s", error)
            running.unwritable = True
            running.profiler.pause()
            return False
        return running.profiler.measuring

    def _measure(
        self, running: _Running, profiler: ProductiveProfiler, times: Sequence[StepTimes], paused: bool
    ) -> None:
        if not times and not paused:
            profiler.begin()
            running.measured |= profiler.measuring
        ended_s = self._device.clock.now_s() - sum(time.fetch_stall_ms + time.compute_ms for time in times) / 1e3
        for time in times:
            if isinstance(self._device, SoftDevice):
                self._device.step()
                running.stepped += 1
                profiler.minibatch_ended(time)
                continue
            ended_s += (time.fetch_stall_ms + time.compute_ms) / 1e3
            if profiler.minibatch_ended(time, ended_s):
                # What follows in this report was trained in the mode before.
                break
        if paused:
            profiler.pause()

    def finish(self, epochs_done: float | None = None) -> Observed | None:
        """End the training that was started, and park the device.

        Args:
            epochs_done: local epochs that were trained, where a deadline ended it; 0 where nobody knows how many;
                None for as many as were assigned.

        Returns:
            What the assigned mode was seen to need; None where other modes were measured meanwhile, or too little is
            known to have been done.

        Raises:
            PowerNotReadError: not one power sample could be read.
            ModeNotAppliedError: the device could not be parked.
            InvalidInputError: the training took no time.
        """
        running = self._running
        assert running is not None, "finish follows start"
        if running.profiler is not None:
            running.profiler.pause()
        epochs = running.epochs if epochs_done is None else epochs_done
        if isinstance(self._device, SoftDevice):
            minibatches = max(1, round(epochs * self._minibatches_per_epoch))
            self._device.run(max(0, minibatches - running.stepped))
        elapsed_s = self._device.clock.now_s() - running.started_s
        mode = self._device.current_mode()
        trace = running.meter.stop()
        self._running = None
        self.park()
        if running.measured or epochs < _FEWEST_EPOCHS:
            return None
        during = (trace.at_s >= running.started_s) & _was_read(trace)
        if not during.any():
            raise PowerNotReadError(_NO_POWER)
        return Observed(mode, elapsed_s / epochs, float(np.mean(trace.power_mw[during])) / 1e3)

    def abandon(self) -> None:
        """Stop observing, learn nothing, park."""
        running, self._running = self._running, None
        if running is not None:
            running.meter.stop()
            if running.profiler is not None:
                running.profiler.pause()
            self.park()

    def recover(self) -> None:
        """Park a device that was in trouble, and make sure that its power can be read again.

        Raises:
            ModeNotAppliedError: another mode was read back.
            PowerNotReadError: not one power sample could be read.
        """
        self.abandon()
        self.park()
        meter = self._device.start_meter()
        try:
            self._device.clock.sleep_s(_LISTENED_FOR_S)
        finally:
            trace = meter.stop()
        if not _was_read(trace).any():
            raise PowerNotReadError(_NO_POWER)

    def park(self) -> None:
        """Put the mode between trainings in force.

        Raises:
            ModeNotAppliedError: another mode was read back.
        """
        self._device.apply(self._parked)


def _was_read(trace: PowerTrace) -> NDArray[np.bool_]:
    """Which samples are power: a board that runs draws some, so that 0 W is a rail that was not read."""
    return np.isfinite(trace.power_mw) & (trace.power_mw > 0)
