"""One round's training on the device: put the mode in force, observe or measure, park."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from edge_agent.devices.device import Device, PowerMeter, PowerTrace, SoftDevice
from edge_agent.journal import JournalError
from edge_agent.productive import ProductiveProfiler
from edge_agent.records import require_above_zero
from edge_agent.workloads.step import StepTimes
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.modes import PowerMode
from wattfleet.start import first_minibatch_s, steady_minibatch_s

_log = logging.getLogger(__name__)

_LISTENED_FOR_S = 3.0
# What an app may ask for: time is told per epoch, which has to remain a number to learn from.
_FEWEST_EPOCHS, _MOST_EPOCHS = 1e-3, 1e4
# Where more is missing than was read, the mean tells when the rails answered rather than what the board drew.
_LEAST_READ = 0.5
_FEWEST_READ = 2
_UNNOTICED_S = 0.1


class PowerNotReadError(WattfleetError):
    """Too little of the power could be read while training; missing is not zero, so nothing is reported."""


@dataclass(frozen=True)
class Observed:
    """What a round's training needed.

    Attributes:
        mode: the mode in force.
        epoch_s: seconds per epoch at the pace of steady minibatches; the training's start is not in it.
        power_w: mean watts while training, without the start.

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
    mode: PowerMode
    epochs: float
    power_limit_w: float
    started_s: float
    meter: PowerMeter
    profiler: ProductiveProfiler | None = None
    elsewhere: bool = False
    measures_no_more: bool = False
    stepped: int = 0


class TrainingWatch:
    """Runs a device through the trainings of a run's rounds, one at a time."""

    def __init__(
        self,
        device: Device,
        parked: PowerMode,
        minibatches_per_epoch: int,
        productive: Callable[[float], ProductiveProfiler],
        first_gcycles: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Watch one device.

        Args:
            device: the board.
            parked: the mode between trainings.
            minibatches_per_epoch: minibatches of one pass over the device's data.
            productive: what measures modes during a training that was given so many watts.
            first_gcycles: CPU cycles of a training's first minibatch as far as is known, in units of 1e9.
        """
        self._device = device
        self._parked = parked
        self._minibatches_per_epoch = minibatches_per_epoch
        self._productive = productive
        self._first_gcycles = first_gcycles
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
            self._device.step()  # the first minibatch, and with it the start, before anything is observed
        self._running = _Running(mode, epochs, power_limit_w, self._device.clock.now_s(), self._device.start_meter())

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
        if running.measures_no_more:
            return False
        if running.profiler is None:
            asked_s = self._device.clock.now_s()
            running.profiler = self._productive(running.power_limit_w)
            # The app has waited for it, which is no training.
            running.elsewhere |= self._device.clock.now_s() - asked_s > _UNNOTICED_S
        try:
            self._measure(running, running.profiler, times, paused)
        except JournalError as error:
            _log.error("no more modes are measured during this training: %s", error)
            running.measures_no_more = True
            running.profiler.pause()
            return False
        return running.profiler.measuring

    def reassign(self, mode: PowerMode | None, power_limit_w: float) -> None:
        """Go on in another mode, as the watts have changed; no modes are measured, and nothing is observed any more.

        Args:
            mode: the new mode; None for that between trainings, where the training is to stop.
            power_limit_w: watts set aside for the device now.

        Raises:
            InvalidInputError: the device does not offer the mode.
            ModeNotAppliedError: another mode was read back.
        """
        running = self._running
        assert running is not None, "reassign follows start"
        if (mode, power_limit_w) == (running.mode, running.power_limit_w):
            return  # told again at the start of a session
        running.elsewhere = running.measures_no_more = True
        running.mode = mode or self._parked
        running.power_limit_w = power_limit_w
        try:
            if running.profiler is not None:
                running.profiler.pause()
        finally:
            self._device.apply(running.mode)

    def _measure(
        self, running: _Running, profiler: ProductiveProfiler, times: Sequence[StepTimes], paused: bool
    ) -> None:
        if not times and not paused:
            profiler.begin()
            running.elsewhere |= profiler.measuring
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
            What the assigned mode was seen to need; None where other modes were in force meanwhile, too little is known
            to have been done, or the training was too short for its power to be sampled or its start to be told from
            the rest.

        Raises:
            PowerNotReadError: too few power samples could be read to tell what the board drew.
            ModeNotAppliedError: the device could not be parked.
            InvalidInputError: the training took no time.
        """
        running, self._running = self._running, None
        assert running is not None, "finish follows start"
        epochs = running.epochs if epochs_done is None else epochs_done
        with self._ending(running):
            try:
                if running.profiler is not None:
                    running.profiler.pause()
                if isinstance(self._device, SoftDevice):
                    minibatches = max(1, round(epochs * self._minibatches_per_epoch))
                    self._device.run(max(0, minibatches - running.stepped))
                ended_s = self._device.clock.now_s()
                changed = self._device.differences(running.mode)
            finally:
                trace = running.meter.stop()
        if changed:
            _log.warning("nothing was observed of %s, which somebody changed: %s", running.mode.label(), changed[0])
        if running.elsewhere or changed or epochs < _FEWEST_EPOCHS:
            return None
        training_s, first_s = ended_s - running.started_s, self._first_s(running.mode)
        # The start is the CPU's work, and its power is not that of a training.
        power_w = _mean_power_w(trace, running.started_s + min(first_s, training_s / 2), ended_s)
        if power_w is None:
            _log.warning("nothing was observed: training ended before power was sampled %d times", _FEWEST_READ)
            return None
        trained = max(1.0, epochs * self._minibatches_per_epoch)
        steady_s = steady_minibatch_s(training_s, trained, first_s)
        if steady_s is None:
            _log.warning("nothing was observed: half of the training or more may have been its start")
            return None
        return Observed(running.mode, steady_s * trained / epochs, power_w)

    def _first_s(self, mode: PowerMode) -> float:
        """Seconds of what is observed that the first minibatch took: an app shows none, the profile tells it."""
        return 0.0 if isinstance(self._device, SoftDevice) else first_minibatch_s(mode, self._first_gcycles())

    def abandon(self) -> None:
        """Stop observing, learn nothing, park."""
        running, self._running = self._running, None
        if running is not None:
            with self._ending(running):
                running.meter.stop()

    @contextmanager
    def _ending(self, running: _Running) -> Iterator[None]:
        """Whatever happens meanwhile, end what is being measured, and park."""
        with ExitStack() as last:
            last.callback(self.park)
            if running.profiler is not None:
                last.callback(running.profiler.pause)
            yield

    def recover(self) -> None:
        """Park a device that was in trouble, and make sure that its power can be read again.

        Raises:
            ModeNotAppliedError: another mode was read back.
            PowerNotReadError: too few power samples could be read to train by.
        """
        self.abandon()
        self.park()
        begun_s, meter = self._device.clock.now_s(), self._device.start_meter()
        try:
            self._device.clock.sleep_s(_LISTENED_FOR_S)
        finally:
            trace = meter.stop()
        _mean_power_w(trace, begun_s, self._device.clock.now_s())

    def park(self) -> None:
        """Put the mode between trainings in force.

        Raises:
            ModeNotAppliedError: another mode was read back.
        """
        self._device.apply(self._parked)


def _mean_power_w(trace: PowerTrace, begun_s: float, ended_s: float) -> float | None:
    """Mean watts of a training; None where it ended before there were enough samples.

    Args:
        trace: sampled while it lasted.
        begun_s: when it began, device-clock seconds.
        ended_s: when it ended.

    Raises:
        PowerNotReadError: too much of it is missing.
    """
    during = trace.at_s >= begun_s
    # A board that runs draws some power, so that 0 W is a rail that was not read.
    was_read = during & np.isfinite(trace.power_mw) & (trace.power_mw > 0)
    # A sampler that has nothing new repeats itself.
    read_at_s = np.unique(trace.at_s[was_read])
    taken, read, lasted_s = int(during.sum()), int(was_read.sum()), ended_s - begun_s
    silent_s = float(np.diff(read_at_s, prepend=begun_s, append=ended_s).max())
    enough = len(read_at_s) >= _FEWEST_READ
    if not enough and 0 < taken == read and lasted_s < _LISTENED_FOR_S:
        return None
    # A meter that has stopped altogether leaves no missing samples, but silence.
    silent = silent_s > max(_LISTENED_FOR_S, (1 - _LEAST_READ) * lasted_s)
    if not enough or read < _LEAST_READ * taken or silent:
        raise PowerNotReadError(
            f"power was read only {read} of {taken} times in {lasted_s:.0f} s, and for {silent_s:.0f} s not once: check"
            " the power rails"
        )
    return float(np.mean(trace.power_mw[was_read])) / 1e3
