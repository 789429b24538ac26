"""One round's training on the device: put the mode in force, observe, park."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_agent.devices.device import Device, PowerMeter, SoftDevice
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.modes import PowerMode


class PowerNotReadError(WattfleetError):
    """No power sample could be read while training; missing is not zero, so nothing is reported."""


@dataclass(frozen=True)
class Observed:
    """What a round's training needed.

    Attributes:
        mode: the mode in force.
        epoch_s: seconds per epoch, the warm-up minibatch left out as when profiling.
        power_w: mean watts while training.
    """

    mode: PowerMode
    epoch_s: float
    power_w: float


@dataclass(frozen=True)
class _Running:
    epochs: float
    started_s: float
    meter: PowerMeter


class TrainingWatch:
    """Runs a device through the trainings of a run's rounds, one at a time."""

    def __init__(self, device: Device, parked: PowerMode, minibatches_per_epoch: int) -> None:
        """Watch one device.

        Args:
            device: the board.
            parked: the mode between trainings.
            minibatches_per_epoch: minibatches of one pass over the device's data.
        """
        self._device = device
        self._parked = parked
        self._minibatches_per_epoch = minibatches_per_epoch
        self._running: _Running | None = None

    def start(self, mode: PowerMode, epochs: float) -> None:
        """Put the mode in force and begin to observe; a training left unfinished is given up.

        Raises:
            InvalidInputError: the device does not offer the mode, or there is nothing to train.
            ModeNotAppliedError: another mode was read back.
        """
        if not 0 < epochs < float("inf"):
            raise InvalidInputError(f"a round trains more than 0 epochs, not {epochs:g}")
        self.abandon()
        self._device.apply(mode)
        if isinstance(self._device, SoftDevice):
            self._device.step()  # warm-up
        self._running = _Running(epochs, self._device.clock.now_s(), self._device.start_meter())

    def finish(self) -> Observed:
        """End the training that was started, and park the device.

        Raises:
            PowerNotReadError: not one power sample could be read.
            ModeNotAppliedError: the device could not be parked.
        """
        running = self._running
        assert running is not None, "finish follows start"
        if isinstance(self._device, SoftDevice):
            self._device.run(max(1, round(running.epochs * self._minibatches_per_epoch)))
        elapsed_s = self._device.clock.now_s() - running.started_s
        mode = self._device.current_mode()
        trace = running.meter.stop()
        self._running = None
        self.park()
        during = (trace.at_s >= running.started_s) & np.isfinite(trace.power_mw)
        if not during.any():
            raise PowerNotReadError("no power sample could be read during the training: check the power rails")
        return Observed(mode, elapsed_s / running.epochs, float(np.mean(trace.power_mw[during])) / 1e3)

    def abandon(self) -> None:
        """Stop observing, learn nothing, park."""
        if self._running:
            self._running.meter.stop()
            self._running = None
            self.park()

    def park(self) -> None:
        """Put the mode between trainings in force.

        Raises:
            ModeNotAppliedError: another mode was read back.
        """
        self._device.apply(self._parked)
