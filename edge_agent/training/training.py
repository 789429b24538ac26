"""One round's training on the device: put the mode in force, observe or measure, park."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from edge_agent.devices.device import AppTraining, Device, PowerMeter
from edge_agent.profiling.journal import JournalError
from edge_agent.profiling.journal_records import require_above_zero
from edge_agent.profiling.productive_profiler import ProductiveProfiler
from edge_agent.training.training_power import FEWEST_READ, LISTENED_FOR_S, mean_power_w
from edge_agent.workloads.step import StepTimes
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode
from wattfleet.prediction import first_minibatch_s, steady_minibatch_s

_log = logging.getLogger(__name__)

# What an app may ask for: time is told per epoch, which has to remain a number to learn from.
_FEWEST_EPOCHS, _MOST_EPOCHS = 1e-3, 1e4
_UNNOTICED_S = 0.1


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
    app: AppTraining
    started_s: float
    meter: PowerMeter
    profiler: ProductiveProfiler | None = None
    elsewhere: bool = False
    measures_no_more: bool = False


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
        app = self._device.begin_training()
        self._running = _Running(
            mode, epochs, power_limit_w, app, self._device.clock.now_s(), self._device.start_meter()
        )

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
        running.app.minibatches_ended(
            [(time.fetch_stall_ms + time.compute_ms) / 1e3 for time in times],
            lambda index, ended_s: profiler.minibatch_ended(times[index], ended_s),
        )
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
        """
        running, self._running = self._running, None
        assert running is not None, "finish follows start"
        epochs = running.epochs if epochs_done is None else epochs_done
        with self._ending(running):
            try:
                if running.profiler is not None:
                    running.profiler.pause()
                running.app.finish(max(1, round(epochs * self._minibatches_per_epoch)))
                ended_s = self._device.clock.now_s()
                changed = self._device.differences(running.mode)
            finally:
                trace = running.meter.stop()
        if changed:
            _log.warning("nothing was observed of %s, which somebody changed: %s", running.mode.label(), changed[0])
        if running.elsewhere or changed or epochs < _FEWEST_EPOCHS:
            return None
        training_s = ended_s - running.started_s
        # An app reports no time for its first minibatch; the profile knows it.
        observed_first = running.app.first_minibatch_observed
        first_s = first_minibatch_s(running.mode, self._first_gcycles()) if observed_first else 0.0
        # The start is the CPU's work, and its power is not that of a training.
        power_w = mean_power_w(trace, running.started_s + min(first_s, training_s / 2), ended_s)
        if power_w is None:
            _log.warning("nothing was observed: training ended before power was sampled %d times", FEWEST_READ)
            return None
        trained = max(1.0, epochs * self._minibatches_per_epoch)
        steady_s = steady_minibatch_s(training_s, trained, first_s)
        if steady_s is None:
            _log.warning("nothing was observed: half of the training or more may have been its start")
            return None
        return Observed(running.mode, steady_s * trained / epochs, power_w)

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
            self._device.clock.sleep_s(LISTENED_FOR_S)
        finally:
            trace = meter.stop()
        mean_power_w(trace, begun_s, self._device.clock.now_s())

    def park(self) -> None:
        """Put the mode between trainings in force.

        Raises:
            ModeNotAppliedError: another mode was read back.
        """
        self._device.apply(self._parked)
