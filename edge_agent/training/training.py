"""One round's training on the device: apply the mode, observe the training or measure modes, park."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from edge_agent.devices.device import AppTraining, Device, KnobNotReachedError, PowerMeter, PowerTrace
from edge_agent.learning.online_learner import Observed
from edge_agent.profiling.journal import JournalError
from edge_agent.profiling.profiler import ProductiveProfiler
from edge_agent.workloads.loading import StepTimes
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import ASSUMED_MINIBATCHES_PER_EPOCH, PowerMode, Workload
from wattfleet.core.prediction import first_minibatch_s, steady_minibatch_s
from wattfleet_proto.limits import LONGEST_FACTOR, SURVEY_MODES, MeasuringLimits

_log = logging.getLogger(__name__)


# --- Trained workload -------------------------------------------------------------------------------------------------
# The information on a training's workload that the device needs.


class TrainedWorkload(Protocol):
    """The information on a training's workload that the device needs."""

    @property
    def paced(self) -> Workload | None:
        """The workload whose times a virtual board simulates; None for its built-in workload."""
        ...

    @property
    def minibatches_per_epoch(self) -> int:
        """Minibatches of one pass over the device's data."""
        ...

    @property
    def is_length_known(self) -> bool:
        """Whether that number is the device's own rather than assumed."""
        ...

    @property
    def is_length_estimated(self) -> bool:
        """Whether that number is estimated from whole trainings, because the app reports no minibatches."""
        ...

    @property
    def profiled_modes(self) -> int:
        """Number of modes measured so far."""
        ...

    @property
    def first_gcycles(self) -> float:
        """CPU cycles of a training's first minibatch, in units of 1e9; 0 if unknown."""
        ...

    def predicted_minibatch_s(self, mode: PowerMode) -> float:
        """Return the predicted seconds of a minibatch in a mode."""
        ...

    def productive(
        self, power_limit_w: float, minibatches: float, spare_s: Callable[[], float], own_minibatch_s: float
    ) -> ProductiveProfiler:
        """Return the profiler for a training.

        Args:
            power_limit_w: watts reserved for the device.
            minibatches: number of minibatches of the training; infinite if unknown.
            spare_s: returns the seconds that are left for measurements now, beyond the app's own work.
            own_minibatch_s: seconds that a minibatch takes without measurements; 0 if nobody waits for the app's work.
        """
        ...

    def training_was_too_short(self, minibatches: float) -> None:
        """Note that a training with this number of minibatches ended before a mode was measured."""
        ...

    def knob_was_not_reached(self, mode: PowerMode, error: KnobNotReachedError) -> None:
        """Note that a knob stood at another value when a training's mode was set."""
        ...


# --- Training power ---------------------------------------------------------------------------------------------------
# The mean power of a training.

MAX_SILENCE_S = 3.0
"""A working power meter delivers samples within this time, s."""

MIN_SAMPLES = 2
"""Minimum number of samples for a mean."""

# With fewer samples, the mean would depend on the moments at which the rails were read.
_MIN_SHARE_READ = 0.5


class PowerNotReadError(WattfleetError):
    """Too few power samples could be read during the training, so no power is reported."""


def mean_power_w(trace: PowerTrace, begun_s: float, ended_s: float) -> float | None:
    """Return the mean power of a training, W; None if it ended before there were enough samples.

    Args:
        trace: power samples of the training, and perhaps of the time before and after it.
        begun_s: when the training began, device-clock seconds.
        ended_s: when it ended.

    Raises:
        PowerNotReadError: too many samples are missing.
    """
    during = (trace.at_s >= begun_s) & (trace.at_s <= ended_s)
    # A running board draws power, so 0 W means that the rail was not read.
    was_read = during & np.isfinite(trace.power_mw) & (trace.power_mw > 0)
    # A sampler without a new value repeats the last one.
    read_at_s = np.unique(trace.at_s[was_read])
    taken, read, lasted_s = int(during.sum()), int(was_read.sum()), ended_s - begun_s
    silent_s = float(np.diff(read_at_s, prepend=begun_s, append=ended_s).max())
    enough = len(read_at_s) >= MIN_SAMPLES
    if not enough and 0 < taken == read and lasted_s < MAX_SILENCE_S:
        return None
    # A meter that has stopped leaves a gap instead of missing samples.
    silent = silent_s > max(MAX_SILENCE_S, (1 - _MIN_SHARE_READ) * lasted_s)
    if not enough or read < _MIN_SHARE_READ * taken or silent:
        raise PowerNotReadError(
            f"power was read only {read} of {taken} times in {lasted_s:.0f} s, with a gap of {silent_s:.0f} s: check"
            " the power rails"
        )
    return float(np.mean(trace.power_mw[was_read])) / 1e3


@dataclass(frozen=True)
class Drawn:
    """The energy of a training, from when its mode was set until the board was parked.

    Attributes:
        energy_j: joules that the board has drawn, its idle power included.
        lasted_s: seconds.
    """

    energy_j: float
    lasted_s: float


def drawn_of(trace: PowerTrace, began_s: float, ended_s: float) -> Drawn | None:
    """Return the energy of a training; None if its power could not be read.

    Args:
        trace: power samples of the training.
        began_s: when the training began, device-clock seconds.
        ended_s: when it ended.
    """
    try:
        power_w = mean_power_w(trace, began_s, ended_s)
    except PowerNotReadError as error:
        _log.warning("the energy of the training is unknown: %s", error)
        return None
    return None if power_w is None else Drawn(power_w * (ended_s - began_s), ended_s - began_s)


# --- Training ---------------------------------------------------------------------------------------------------------

# Limits on what an app may request, so that seconds per epoch remain usable numbers.
_MIN_EPOCHS, _MAX_EPOCHS = 1e-3, 1e4
# After this share of a training, no further mode is measured, so that the training's own mode is observed.
_MEASURING_SHARE = 0.5
# A device that has measured fewer modes than a survey may make a round longer by this share of its planned time.
_LEARNING_SHARE = 0.25
# Measurements end when they are expected to make a round longer than that by this share of its planned time.
_OVERTIME_SHARE = 0.05
# A shorter part of a training after measurements shows too little of the assigned mode.
_FEWEST_MINIBATCHES = 40
# The observation starts again if the app waited longer than this for the agent before its first report, s.
_NEGLIGIBLE_S = 0.1
_LOADER_UNKNOWN = (
    "the app has reported no data loader, so whole trainings are learned from; if it has a loop over minibatches but no"
    " PyTorch DataLoader, wrap the loop's data in `wattfleet.flower.profiled`"
)
_NOT_REPORTED = (
    "the app has reported no minibatches, so whole trainings are learned from; if it has a loop over them, wrap the"
    " loop's data in `wattfleet.flower.profiled`"
)


@dataclass
class _Undisturbed:
    """The last part of a training, which is entirely in the training's own mode.

    Attributes:
        since_s: when it began, device-clock seconds.
        minibatches_before: minibatches trained before this part.
    """

    since_s: float
    minibatches_before: int = 0


@dataclass
class _LoaderHandled:
    """The period in which the agent handled a report of a loader, device-clock seconds.

    Attributes:
        since_s: when it began.
        until_s: when it ended; infinite before that.
    """

    since_s: float
    until_s: float = math.inf


@dataclass
class _Running:
    trained: TrainedWorkload
    mode: PowerMode
    epochs: float
    power_limit_w: float
    app: AppTraining
    undisturbed: _Undisturbed | None
    meter: PowerMeter
    metered_from_s: float
    profiler: ProductiveProfiler | None = None
    reported: int = 0
    passes: int = 0
    unobservable: bool = False
    loader: _LoaderHandled | None = None
    measurements_ended: bool = False
    shared: Hashable = None
    measuring: MeasuringLimits | None = None
    planned_s: float = 0.0
    own_minibatch_s: float = 0.0
    began_s: float = 0.0
    first_ended_s: float | None = None
    measured_before: int = 0

    @property
    def measured(self) -> int:
        """Number of modes measured so far."""
        return self.measured_before + (self.profiler.measured if self.profiler is not None else 0)


class TrainingRunner:
    """Runs the trainings of a device, one at a time.

    Attributes:
        drawn: the energy of the newest training: 0 J between `expect` and `start`; None while it runs, or if its energy
            is unknown.
    """

    def __init__(
        self,
        device: Device,
        parked: PowerMode,
        resting: Callable[[PowerMode], PowerMode] = lambda parked: parked,
        sharing: Callable[[], Hashable] = lambda: None,
        granted: Callable[[float | None], None] = lambda power_limit_w: None,
    ) -> None:
        """Set up the trainings of one device.

        Args:
            device: the board.
            parked: the mode between trainings.
            resting: maps `parked` to the mode to use between trainings, which is higher while requests are answered.
            sharing: returns a value that identifies what trainings share the device with; None if nothing. In a shared
                training, no modes are measured, as the app's times contain waiting for others.
            granted: called with the watts reserved for the training before its mode is applied, and with None once
                nothing is trained.
        """
        self._device = device
        self._sharing = sharing
        self._lowest = parked
        self._resting = resting
        self._granted = granted
        self._running: _Running | None = None
        self.drawn: Drawn | None = None

    @property
    def _parked(self) -> PowerMode:
        return self._resting(self._lowest)

    @property
    def is_training(self) -> bool:
        """Whether a training has started and not ended."""
        return self._running is not None

    def expect(self) -> None:
        """Note that another training is expected: until `start`, it has drawn nothing."""
        self.drawn = Drawn(0.0, 0.0)

    def start(
        self,
        trained: TrainedWorkload,
        mode: PowerMode,
        epochs: float,
        power_limit_w: float,
        measuring: MeasuringLimits | None = None,
        planned_s: float = 0.0,
    ) -> None:
        """Apply the mode and start to observe; an unfinished training is abandoned.

        Args:
            trained: the workload that is trained.
            mode: the assigned mode.
            epochs: local epochs to train.
            power_limit_w: watts reserved for the device.
            measuring: limits of the measurements in a training that is run in order to measure; None to measure during
                the first part of a training.
            planned_s: seconds that the round is planned to take. Measurements that would make it longer are left out. 0
                if it is unknown.

        Raises:
            InvalidInputError: the device does not offer the mode, or the number of epochs is out of range.
            ModeNotAppliedError: another mode was read back.
        """
        if not _MIN_EPOCHS <= epochs <= _MAX_EPOCHS:
            raise InvalidInputError(f"epochs must be {_MIN_EPOCHS:g} to {_MAX_EPOCHS:g}, not {epochs:g}")
        self.abandon()
        self.drawn = None
        self._granted(power_limit_w)
        self._apply(mode, trained)
        app = self._device.begin_training(trained.paced)
        metered_from_s = self._device.clock.now_s()
        self._running = _Running(
            trained,
            mode,
            epochs,
            power_limit_w,
            app,
            _Undisturbed(self._device.clock.now_s()),
            self._device.start_meter(),
            metered_from_s,
            shared=self._sharing(),
            measuring=measuring,
            planned_s=planned_s,
            began_s=self._device.clock.now_s(),
        )
        is_for_facts = measuring is not None and measuring.modes == 0
        self._running.measurements_ended = is_for_facts or self._running.shared is not None

    @property
    def mode(self) -> PowerMode:
        """The training's own mode; another mode may be in force while it is measured."""
        assert self._running is not None, "a training has a mode"
        return self._running.mode

    def loader_seen(self, changed: bool, after_minibatch: bool = False) -> None:
        """Note that the app has started to read from a loader, and that more may be known of its workload.

        The app may wait until `loader_handled`.

        Args:
            changed: whether this has changed the workload. If it changes during a training, the training has several
                kinds of minibatches: it gives no observation, and no further mode is measured.
            after_minibatch: whether the training's first minibatch has just ended.

        Raises:
            ModeNotAppliedError: the training's own mode cannot be restored after measurements.
        """
        running = self._running
        assert running is not None, "a loader follows start"
        since_s = self._device.clock.now_s()
        if after_minibatch and running.app.first_minibatch_observed:
            running.first_ended_s = since_s
        if changed and (running.loader is not None or running.profiler is not None):
            running.unobservable = running.measurements_ended = True
            if running.profiler is not None:
                running.profiler.pause()
        running.app.learned(running.trained.paced)
        running.loader = _LoaderHandled(since_s)

    def loader_handled(self, app_has_finished: bool = False) -> None:
        """Note that the agent has handled a report of a loader.

        Args:
            app_has_finished: whether the app has ended its training meanwhile. If so, there is no observation, since
                the time of its end is unknown.
        """
        running = self._running
        assert running is not None and running.loader is not None, "a loader was seen"
        running.loader.until_s = self._device.clock.now_s()
        running.unobservable |= app_has_finished

    def minibatches_ended(self, times: Sequence[StepTimes], paused: bool, is_pass_over: bool = False) -> bool:
        """Use the app's reported minibatches to measure modes, and apply the mode for the next ones.

        If a measurement cannot be written, the training continues in its own mode without further measurements.

        Args:
            times: the times of the minibatches since the last report, the last of which ended just now; empty to start
                measuring.
            paused: whether the training pauses now.
            is_pass_over: whether it pauses at the end of a pass over the data, so that another pass may follow.

        Returns:
            Whether further reports are wanted.

        Raises:
            ModeNotAppliedError: another mode was read back.
        """
        running = self._running
        assert running is not None, "minibatches follow start"
        if self._sharing() != running.shared:
            running.unobservable = running.measurements_ended = True
            if running.profiler is not None:
                running.profiler.pause()
        if running.measurements_ended:
            return False
        if running.profiler is None:
            asked_s = self._waiting_since_s(running)
            assigned = running.epochs * running.trained.minibatches_per_epoch
            is_limited = running.trained.is_length_known and running.measuring is None
            minibatches = assigned if is_limited else math.inf
            if is_limited and running.planned_s:
                running.own_minibatch_s = running.trained.predicted_minibatch_s(running.mode)
            running.profiler = self._profiler(running, minibatches)
            if self._device.clock.now_s() - asked_s > _NEGLIGIBLE_S:
                # The app has waited for the agent instead of training.
                running.undisturbed = _Undisturbed(self._device.clock.now_s())
        try:
            self._measure(running, running.profiler, times, paused, is_pass_over)
        except JournalError as error:
            _log.error("measuring modes ended for this training: %s", error)
            self._end_measurements(running, running.profiler)
        return running.profiler.measuring and not running.measurements_ended

    def why_unmeasured(self) -> str | None:
        """Return why the training in progress has measured no mode, with the remedy; None if it has measured one."""
        running = self._running
        assert running is not None, "a training is asked before its finish"
        if running.shared is not None:
            return "none is measured while the device answers requests"
        if running.profiler is None:
            return _NOT_REPORTED if running.loader is not None else _LOADER_UNKNOWN
        why = running.profiler.why_none_measured
        return "the training was changed too early" if why and running.measurements_ended else why or None

    def _waiting_since_s(self, running: _Running) -> float:
        """Return since when the app has waited for the answer to its first report, device-clock seconds."""
        now_s, loader = self._device.clock.now_s(), running.loader
        # An app that reports at once has waited since it reported its loader; otherwise it has trained meanwhile.
        return loader.since_s if loader is not None and 0 <= now_s - loader.until_s <= _NEGLIGIBLE_S else now_s

    def reassign(self, mode: PowerMode | None, power_limit_w: float) -> None:
        """Continue in another mode, since the granted watts have changed; observation and measurements end.

        Args:
            mode: the new mode; None for the parking mode, if the training is to stop.
            power_limit_w: watts now reserved for the device.

        Raises:
            InvalidInputError: the device does not offer the mode.
            ModeNotAppliedError: another mode was read back.
        """
        running = self._running
        assert running is not None, "reassign follows start"
        if (mode, power_limit_w) == (running.mode, running.power_limit_w):
            return  # The coordinator repeats orders when a session starts.
        running.measurements_ended = True
        running.power_limit_w = power_limit_w
        self._granted(None if mode is None else power_limit_w)
        self._continue_in(mode or self._parked, running)

    def lower(self, mode: PowerMode) -> None:
        """Continue in another mode, since the app's minibatches draw more than planned; there is no observation.

        Modes may still be measured within this training's watts.

        Args:
            mode: the new mode.

        Raises:
            InvalidInputError: the device does not offer the mode.
            ModeNotAppliedError: another mode was read back.
        """
        running = self._running
        assert running is not None, "lower follows start"
        self._continue_in(mode, running)

    def _continue_in(self, mode: PowerMode, running: _Running) -> None:
        # The coordinator would take an observation to be one of the planned mode.
        running.unobservable = True
        running.mode = mode
        try:
            if running.profiler is not None:
                running.profiler.pause()
        finally:
            self._apply(running.mode, running.trained)

    def _apply(self, mode: PowerMode, trained: TrainedWorkload) -> None:
        """Apply a training's mode; what a knob does not reach counts like in a measurement.

        Raises:
            ModeNotAppliedError: another mode was read back.
        """
        try:
            self._device.apply(mode)
        except KnobNotReachedError as error:
            trained.knob_was_not_reached(mode, error)
            raise

    def _profiler(self, running: _Running, minibatches: float) -> ProductiveProfiler:
        """Return a profiler for the training.

        Args:
            running: the training.
            minibatches: number of its minibatches; infinite if unknown.
        """
        spare_s = partial(self._spare_s, running, minibatches)
        return running.trained.productive(running.power_limit_w, minibatches, spare_s, running.own_minibatch_s)

    def _spare_s(self, running: _Running, minibatches: float) -> float:
        """Return the seconds that a training may still spend on measurements beyond its own work."""
        lasted_s = self._device.clock.now_s() - running.began_s
        if running.measuring is not None:
            return LONGEST_FACTOR * running.measuring.longest_s - lasted_s
        if not running.own_minibatch_s:
            return math.inf
        learning = _LEARNING_SHARE if running.trained.profiled_modes < SURVEY_MODES else 0.0
        left_s = max(0.0, minibatches - running.reported) * running.own_minibatch_s
        return (1 + learning) * running.planned_s - lasted_s - left_s

    def _measure(
        self,
        running: _Running,
        profiler: ProductiveProfiler,
        times: Sequence[StepTimes],
        paused: bool,
        is_pass_over: bool,
    ) -> None:
        if not times and not paused:
            profiler.begin()
            if profiler.measuring:
                running.undisturbed = None
        running.reported += len(times)
        running.passes += is_pass_over
        running.app.minibatches_ended(
            [(time.fetch_stall_ms + time.compute_ms) / 1e3 for time in times],
            lambda index, ended_s: profiler.minibatch_ended(times[index], ended_s),
        )
        assigned = running.epochs * running.trained.minibatches_per_epoch
        has_tried, in_own_mode = profiler.measured + profiler.discarded > 0, False
        if running.measuring is not None:
            self._measure_on(running, running.measuring)
        elif running.trained.is_length_known and has_tried and running.reported >= _MEASURING_SHARE * assigned:
            self._end_measurements(running, profiler)
        elif self._spare_s(running, assigned) < -_OVERTIME_SHARE * running.planned_s:
            self._end_measurements(running, profiler)
        assert running.profiler is not None, "modes are measured"
        if running.measurements_ended:
            pass
        elif is_pass_over and running.passes < running.epochs:
            in_own_mode = running.profiler.pass_ended()
        elif paused:
            running.profiler.pause()
            in_own_mode = True
        if running.undisturbed is None and (in_own_mode or not running.profiler.measuring):
            running.undisturbed = _Undisturbed(self._device.clock.now_s(), running.reported)

    def _measure_on(self, running: _Running, measuring: MeasuringLimits) -> None:
        """Continue a training that is run in order to measure with the next modes, or end its measurements."""
        profiler = running.profiler
        assert profiler is not None, "modes are measured"
        lasted_s = self._device.clock.now_s() - running.began_s
        if running.measured >= measuring.modes or lasted_s >= LONGEST_FACTOR * measuring.longest_s:
            self._end_measurements(running, profiler)
        elif lasted_s >= measuring.longest_s:
            profiler.begin_no_further()
        if profiler.measuring or running.measurements_ended:
            return
        profiler.pause()
        if lasted_s < measuring.longest_s:
            running.measured_before += profiler.measured
            running.profiler = self._profiler(running, math.inf)
            running.profiler.begin()
        if not running.profiler or not running.profiler.measuring:
            running.measurements_ended = True

    def _end_measurements(self, running: _Running, profiler: ProductiveProfiler) -> None:
        """End the measurements: the rest is trained in the training's own mode."""
        running.measurements_ended = True
        profiler.pause()
        running.undisturbed = running.undisturbed or _Undisturbed(self._device.clock.now_s(), running.reported)

    def finish(self, epochs_done: float | None = None) -> Observed | None:
        """End the training that was started, and park the device.

        Args:
            epochs_done: trained local epochs, if a deadline ended the training; 0 if unknown; None for all assigned
                epochs.

        Returns:
            The observation of the assigned mode, after measurements of other modes. None if too little of the training
            was left for it, another grant was in force, too few epochs were trained, or the training was too short to
            sample its power or to separate its warm-up.

        Raises:
            PowerNotReadError: too few power samples could be read.
            ModeNotAppliedError: the device could not be parked.
        """
        running, self._running = self._running, None
        assert running is not None, "finish follows start"
        per_epoch = running.trained.minibatches_per_epoch
        epochs = running.epochs if epochs_done is None else epochs_done
        with self._ending(running):
            if running.profiler is not None:
                is_whole = running.measuring is None and running.trained.is_length_known
                if is_whole and running.profiler.is_cut_off:
                    running.trained.training_was_too_short(epochs * per_epoch)
                running.profiler.pause()
            # A virtual board trains what the app does not report. An estimate of it must not change the work.
            unreported = ASSUMED_MINIBATCHES_PER_EPOCH if running.trained.is_length_estimated else per_epoch
            running.app.finish(max(1, round(epochs * unreported)))
            ended_s = self._device.clock.now_s()
            changed = self._device.differences(running.mode)
        trace = running.meter.read()
        if changed:
            _log.warning(
                "the observation of %s is discarded, as another process changed the mode: %s",
                running.mode.label(),
                changed[0],
            )
        if self._sharing() != running.shared:
            _log.info("no observation: the device's duty changed during the training")
            return None
        if running.unobservable or changed or epochs < _MIN_EPOCHS:
            return None
        trained = max(1.0, epochs * per_epoch)
        part = running.undisturbed
        if part is None:
            return None
        left, lasted_s = trained - part.minibatches_before, ended_s - part.since_s
        is_rest = part.minibatches_before > 0
        if is_rest and (not running.trained.is_length_known or left < _FEWEST_MINIBATCHES or lasted_s < MAX_SILENCE_S):
            _log.info("no observation: too little of the training was left after the measurements of other modes")
            return None
        first_s = 0.0 if is_rest else self._first_s(running, part.since_s)
        # The warm-up is work of the CPU, so its power is not that of training.
        power_w = mean_power_w(trace, part.since_s + min(first_s, lasted_s / 2), ended_s)
        if power_w is None:
            _log.warning("no observation: the training ended before power was sampled %d times", MIN_SAMPLES)
            return None
        steady_s = steady_minibatch_s(lasted_s, left, first_s)
        if steady_s is None:
            _log.warning("no observation: warm-up may have taken half of the training or more")
            return None
        first_ended_s = running.first_ended_s
        return Observed(
            running.mode,
            steady_s * trained / epochs,
            power_w,
            running.shared is not None,
            None if first_ended_s is None else first_ended_s - running.began_s,
        )

    @staticmethod
    def _first_s(running: _Running, since_s: float) -> float:
        """Return the seconds since a time in which the training's first minibatch, with its warm-up, was trained."""
        if not running.app.first_minibatch_observed:
            return 0.0
        if running.first_ended_s is not None:
            return max(0.0, running.first_ended_s - since_s)
        # The app has not reported when it ended; its time is known from the profile.
        return first_minibatch_s(running.mode, running.trained.first_gcycles)

    def abandon(self) -> None:
        """Stop the training without an observation, and park."""
        running, self._running = self._running, None
        if running is not None:
            with self._ending(running):
                pass

    @contextmanager
    def _ending(self, running: _Running) -> Iterator[None]:
        """End measurements, park, and note the energy until then, even after an error."""
        with ExitStack() as last:
            last.callback(self._park_metered, running)
            if running.profiler is not None:
                last.callback(running.profiler.pause)
            yield

    def _park_metered(self, running: _Running) -> None:
        """Park, stop the power meter, and note the energy of the training.

        If the board cannot be parked, it may go on drawing the training's power. So its energy remains unknown.
        """
        try:
            self.park()
        except BaseException:
            running.meter.stop()
            raise
        ended_s = self._device.clock.now_s()
        self.drawn = drawn_of(running.meter.stop(), running.metered_from_s, ended_s)

    def recover(self) -> None:
        """Park a degraded device, and check that its power can be read again.

        Raises:
            ModeNotAppliedError: another mode was read back.
            PowerNotReadError: too few power samples could be read.
        """
        self.abandon()
        self.park()
        begun_s, meter = self._device.clock.now_s(), self._device.start_meter()
        try:
            self._device.clock.sleep_s(MAX_SILENCE_S)
        finally:
            trace = meter.stop()
        mean_power_w(trace, begun_s, self._device.clock.now_s())

    def park(self) -> None:
        """Apply the mode between trainings.

        Raises:
            ModeNotAppliedError: another mode was read back.
        """
        self._granted(None)
        self._device.apply(self._parked)
