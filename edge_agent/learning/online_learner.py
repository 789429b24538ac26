"""Online learning of one workload: rounds refine the predictor, and a changed board is profiled again."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np

from edge_agent.devices.device import Device, KnobNotReachedError
from edge_agent.learning.fitting import Beside, Fitted, FittedModes, Fitting, Mask, OpenFittingTo, alone
from edge_agent.learning.fitting_process import FittingFailedError
from edge_agent.learning.profiling_plan import BATCH, ProfilingProgress, profile_device
from edge_agent.profiling.journal import Journal, JournalError
from edge_agent.profiling.known_workload import BUILT_IN, KnownWorkload
from edge_agent.profiling.mode_measurement import DEFAULT_SETTINGS, ExcludedModes, measuring_s
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.profiling.profiler import ProductiveProfiler
from edge_agent.profiling.stored_profile import own_rows
from edge_agent.workloads.loading import OpenSteps
from wattfleet.core.choosing import POWER_QUANTILE, Front, SamplingSettings
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    BatchOptions,
    Discarded,
    JournalledRound,
    Measurement,
    ModeArray,
    PowerMode,
    Profile,
    Renewal,
    Workload,
    array_to_modes,
    require_above_zero,
)
from wattfleet.core.prediction import DEFAULT_DRIFT_RULE, Artefact, DriftRule, Prediction, Residual, detect_drift
from wattfleet_proto.device_state import MAX_PRESETS, PresetPoint

_log = logging.getLogger(__name__)


# --- Observation ------------------------------------------------------------------------------------------------------
# The observation of one round's training, from which the predictor learns.


@dataclass(frozen=True)
class Observed:
    """The observation of a round's training.

    Attributes:
        mode: the mode in force.
        epoch_s: seconds per epoch at the pace of steady minibatches, without the warm-up.
        power_w: mean power while training, without the warm-up, W.
        is_shared: whether the training waited for requests that the device answered meanwhile. If so, its time and
            power are not those of a training alone, which the predictor needs.
        first_minibatch_s: seconds from the start until the first minibatch had ended, with the app's preparations; None
            if the app has not reported it.

    Raises:
        InvalidInputError: the time or the power is not finite and above 0.
    """

    mode: PowerMode
    epoch_s: float
    power_w: float
    is_shared: bool = False
    first_minibatch_s: float | None = None

    def __post_init__(self) -> None:
        require_above_zero(epoch_s=self.epoch_s, power_w=self.power_w)


# --- Short trainings --------------------------------------------------------------------------------------------------
# Remembers trainings too short to measure a mode in: they are observed in their own mode instead.

# Other modes may take less time, so measuring is tried again after this number of trainings of the same length.
_OBSERVED = 4


class ShortTrainings:
    """Remembers which trainings of a workload ended before a mode was measured."""

    def __init__(self) -> None:
        """Start with no short trainings."""
        self._minibatches, self._left = 0.0, 0

    def note(self, minibatches: float) -> None:
        """Note that a training with this number of minibatches ended before a mode was measured."""
        self._minibatches, self._left = minibatches, _OBSERVED

    def is_too_short(self, minibatches: float) -> bool:
        """Return whether a training of this length, in minibatches, should be observed instead."""
        if minibatches <= DEFAULT_SETTINGS.fewest_minibatches:  # the first one does not count
            return True
        if minibatches > self._minibatches or not self._left:
            return False
        self._left -= 1
        return True


# --- Granted modes ----------------------------------------------------------------------------------------------------
# Decides which modes keep within the watts of a grant, by a device's predictions.

# For a running training, a slightly lower certainty than in plans is enough. Otherwise, facts of little importance,
# such as two loader workers, would lower the modes of most first rounds, and lose their observations.
_KEPT_QUANTILE = POWER_QUANTILE - 0.02
# Tolerance for rounding: a plan's watts are sums and differences, so a mode may seem to exceed them by a last digit.
_ROUNDING = 1e-9


def draws_at_most(predicted: Prediction, power_limit_w: float) -> bool:
    """Return whether a mode is expected to draw no more than the watts of a grant.

    Args:
        predicted: the prediction for this one mode.
        power_limit_w: watts reserved for the device.
    """
    return _power_w(predicted) <= power_limit_w


def keeps_within(predicted: Prediction, power_limit_w: float) -> bool:
    """Return whether a mode keeps within the watts of a grant with a probability of 93 %.

    Plans demand 95 % (`POWER_QUANTILE`).

    Args:
        predicted: the prediction for this one mode.
        power_limit_w: watts reserved for the device.
    """
    return bool(predicted.power_mw_quantile(_KEPT_QUANTILE)[0] <= _most_mw(power_limit_w))


def fastest_within(front: Front, power_limit_w: float) -> PowerMode | None:
    """Return the fastest mode of a front that keeps within the watts of a grant; None if no mode does."""
    (affordable,) = np.nonzero(front.planned_w * 1e3 <= _most_mw(power_limit_w))
    return front.mode(int(affordable[0])) if len(affordable) else None


def exceeds_grant(mode: PowerMode, predicted: Prediction, power_limit_w: float) -> InvalidInputError:
    """Return the error for a granted mode that is expected to draw more than its grant allows."""
    return InvalidInputError(
        f"the mode {mode.label()} is predicted to draw {_power_w(predicted):.1f} W, more than the limit of"
        f" {power_limit_w:.1f} W: check that agent and coordinator use the same front"
    )


def _power_w(predicted: Prediction) -> float:
    return float(predicted.power_mw[0]) / 1e3


def _most_mw(power_limit_w: float) -> float:
    return power_limit_w * 1e3 * (1 + _ROUNDING)


# --- Offered batches --------------------------------------------------------------------------------------------------
# Determines which batch sizes a plan may choose for a workload: those announced, unless its app ignores the choice.


class OfferedBatches:
    """The batch sizes of one workload.

    Args:
        options: the announced batch sizes; None for no choice.
    """

    def __init__(self, options: BatchOptions | None) -> None:
        self._options = options
        self._are_ignored = False

    @property
    def options(self) -> BatchOptions | None:
        """The batch sizes that a plan may choose; None if the app ignores the choice."""
        return None if self._are_ignored else self._options

    def announce(self, options: BatchOptions | None) -> None:
        """Store the batch sizes that the coordinator announced.

        If they have changed, they are tried with the app again.
        """
        if options != self._options:
            self._options, self._are_ignored = options, False

    def loader_seen(self, known: KnownWorkload, batch: int | None, takes_planned_batch: bool) -> None:
        """Note whether an app trains with the batch size chosen by its plan.

        Args:
            known: what is known of the workload, with the planned batch size.
            batch: the app's batch size, samples; None if the app does not report it.
            takes_planned_batch: whether the app has queried the batch size chosen by its plan, and trains with it.
        """
        planned = known.workload.facts.batch
        if takes_planned_batch:
            self._are_ignored = False
        elif known.workload.choice is not None and batch != planned:
            _log.warning(
                "the app trains with %s instead of batches of %d samples: its plans will not choose a batch size; to "
                "let them, use"
                " `wattfleet.flower.planned_loader` or `planned_work` in the app",
                "batches of unknown size" if batch is None else f"batches of {batch:,} samples",
                planned,
            )
            self._are_ignored = True


# --- Online learner ---------------------------------------------------------------------------------------------------


def most_modes(journal: Journal, limit: int) -> int:
    """Return the maximum of modes to measure: `limit`, or fewer in a repeated profile."""
    return limit if journal.renewal is None else min(journal.renewal.modes, limit)


class OnlineLearner:
    """Keeps a device's predictor of a workload up to date with its trainings. Its methods may be called in any thread.

    Args:
        device: the board.
        open_steps: starts the workload for repeated profiles; None if only the app itself can train it.
        journal: the open journal of its profile; the learner closes it.
        open_fitting: opens a fitting of the device's predictor.
        fitted: the result of the last fit.
        limit: maximum of modes to measure, including those measured during rounds.
        known: what is known of the workload.
        seed: random seed for the choice of modes.
        keep: called with every new fit, and at the start with `fitted`.
        rule: decides when to profile again, and how many modes.
        tolerance: measuring stops once no measurement is expected to shorten a step by more than this share.
        note: called when more is known of the workload.
        beside: converts predictions of a training without duties into those beside the device's duty.

    Attributes:
        known: what is known of the workload.
        unmeasured: why the latest training has measured no mode; None if it has, or if there was no training.
    """

    def __init__(
        self,
        device: Device,
        open_steps: OpenSteps | None,
        journal: Journal,
        open_fitting: OpenFittingTo,
        fitted: Fitted,
        limit: int,
        known: KnownWorkload,
        seed: int,
        keep: Callable[[Artefact], None],
        rule: DriftRule = DEFAULT_DRIFT_RULE,
        tolerance: float = SamplingSettings.tolerance,
        note: Callable[[KnownWorkload], None] = lambda known: None,
        beside: Beside = alone,
    ) -> None:
        self._device = device
        self._open_steps = open_steps
        self._journal = journal
        self._open_fitting = open_fitting
        self._limit = limit
        self.known = known
        self._note = note
        self._beside = beside
        # Announcements change what is known, and start fits, at the same time as trainings.
        self._state = threading.RLock()
        self._one_fit = threading.RLock()
        self._seed = seed
        self._keep = keep
        self._rule = rule
        self._tolerance = tolerance
        self._residuals: list[Residual] = []
        self._settled = (-1, 0.0)
        self._news = 0
        self._batches = OfferedBatches(known.workload.batches)
        self._short_trainings = ShortTrainings()
        self.unmeasured: str | None = None
        self._has_loader = False
        self._take(fitted, self._basis)

    @property
    def minibatches_per_epoch(self) -> int:
        """Number of minibatches per epoch; assumed while the device's own number is unknown."""
        return self.known.counted_minibatches

    @property
    def is_length_known(self) -> bool:
        """Whether that number is the device's own."""
        return self.known.minibatches_per_epoch is not None

    @property
    def is_length_estimated(self) -> bool:
        """Whether that number is estimated from whole trainings, because the app reports no minibatches."""
        return self.known.is_length_estimated

    @property
    def paced(self) -> Workload | None:
        """The workload whose times a virtual board simulates; None for its built-in workload."""
        return None if self.known.workload.name == BUILT_IN else self.known.workload

    @property
    def is_outdated(self) -> bool:
        """Whether more is known of the workload than the predictor was fitted to."""
        with self._state:
            return self._fitted.is_outdated(self.known)

    def others_measured(self) -> None:
        """Note that other devices have measured more of the workload: the next fit uses it."""
        with self._state:
            self._news += 1
            self._settled = (-1, 0.0)

    def learn_from_others(self) -> None:
        """Fit the predictor to new measurements of other devices since its last fit.

        Raises:
            FittingFailedError: the predictor could not be fitted, and is unchanged.
        """
        with self._one_fit:
            if self._fitted_news != self._news:
                self.refit()

    @property
    def measurements(self) -> Sequence[Measurement]:
        """The measured modes in the order of their measurement, without those observed in rounds only."""
        header = self._journal.header
        return [replace(each.measurement, batch=each.batch or header.minibatch) for each in self._journal.records]

    @property
    def profiled_modes(self) -> int:
        """Number of measured modes, without those observed in rounds only."""
        return len(self._journal.records)

    @property
    def first_gcycles(self) -> float:
        """CPU cycles of a training's first minibatch, in units of 1e9; 0 if unknown."""
        return self._journal.first_gcycles

    def predicted_front(self) -> tuple[Front, Workload]:
        """Return the current front, and the workload as known when the predictor was fitted.

        Raises:
            ImplausibleError: no mode's prediction is plausible.
        """
        with self._state:
            fitted, known = self._fitted, self.known
        return fitted.front(known, self._allowed, self.first_gcycles, self._beside)

    def predicted_presets(self, presets: Mapping[str, PowerMode]) -> list[PresetPoint]:
        """Return plausible predictions of a training without other duties in a board's presets, by the preset's name.

        Args:
            presets: modes by name.
        """
        with self._state:
            fitted, known = self._fitted, self.known
        measured = {each.mode for each in self.measurements}
        found = []
        for name, mode in list(presets.items())[:MAX_PRESETS]:
            with suppress(InvalidInputError):
                found.append(PresetPoint(name, fitted.alone_in(mode, known, self.first_gcycles), mode in measured))
        return found

    def trained_alone(self) -> tuple[ModeArray, Prediction]:
        """Return the modes that do not overload the board, and predictions of a training without other duties."""
        with self._state:
            return self._fitted.of_own_batch(self.known, self._allowed)

    def loader_seen(
        self,
        batch: int | None,
        loader_workers: int | None,
        minibatches_per_epoch: int | None,
        takes_planned_batch: bool = False,
    ) -> bool:
        """Use what the app reports of its data loader; arguments that it does not report are None.

        Args:
            batch: samples in a batch.
            loader_workers: number of processes that load data.
            minibatches_per_epoch: the loader's length, minibatches.
            takes_planned_batch: whether the app has queried the batch size chosen by its plan, and trains with it.

        Returns:
            Whether the minibatches differ from those before.

        Raises:
            InvalidInputError: a number is out of range.
        """
        with self._state:
            self._has_loader = True
            before = self.known.without_estimated_length() if minibatches_per_epoch else self.known
            facts = self.known.workload.facts
            told = replace(facts, batch=batch or facts.batch, loader_workers=loader_workers)
            if self.paced is None:
                told = facts  # a virtual board simulates its own minibatches
            self._batches.loader_seen(self.known, batch, takes_planned_batch)
            known = before.completed(told, minibatches_per_epoch).with_batches(self._batches.options)
            if before is not self.known:
                # Rows of whole trainings are in predicted minibatches, which are not those that the app reports now.
                try:
                    self._journal.append(Renewal("its app now reports the length of its data", self._limit))
                except JournalError as error:
                    _log.error("the length that the app reports is not used: %s", error)
                    return False
                self._residuals.clear()
            return self._take_known(known)

    def trains_with(self, batch: int) -> None:
        """Note the batch size that a plan has chosen for the training that begins.

        An app that does not let a plan choose trains with its own batch.

        Args:
            batch: the batch size, samples; 0 if the plan did not choose one.
        """
        with self._state:
            if batch in self.known.offered_batches:
                self._take_known(self.known.with_batch(batch))

    def out_of_memory(self) -> bool:
        """Note that the batch of the latest training did not fit into the device's memory.

        Returns:
            Whether this changes the batch sizes that a plan may choose.
        """
        with self._state:
            return self._take_known(self.known.out_of_memory())

    def announced(self, workload: Workload) -> None:
        """Use what the coordinator reports of the workload. What the device has observed itself has priority.

        Raises:
            InvalidInputError: the workload is of another task.
        """
        with self._state:
            self._batches.announce(workload.batches)
            known = self.known.completed(workload.completed(self.known.workload.facts).facts)
            self._take_known(known.with_batches(self._batches.options))

    def _take_known(self, known: KnownWorkload) -> bool:
        """Store what is now known of the workload; return whether its minibatches differ from those before."""
        if known == self.known:
            return False
        changed = known.workload != self.known.workload
        self.known = known
        self._journal.batch = known.workload.facts.batch or self._journal.header.minibatch
        self._settled = (-1, 0.0)
        self._note(known)
        return changed

    def observe(self, observed: Observed) -> str | None:
        """Add the observation of a round to the profile, and fit the predictor again.

        If the app reports no minibatches, a whole training is the unit: its first observation is as many minibatches as
        are predicted to take its time, and later ones are rows in these minibatches.

        Returns:
            Why the device has to be profiled again with `reprofile`; None if the predictor may still be valid.

        Raises:
            JournalError: the observation could not be written; the predictor is unchanged.
            InvalidInputError: the device does not offer the mode.
            FittingFailedError: the predictor could not be fitted and is unchanged; the observation is stored.
        """
        if observed.is_shared:
            # The app's own times contain the waiting, and only some apps report each turn's time, so nothing is
            # learned.
            self.refit()
            return None
        self.refit_if_outdated()
        if self.known.minibatches_per_epoch is None:
            if self._has_loader and not self.profiled_modes:
                # Modes will be measured in the app's own minibatches, so its trainings must not be in predicted ones.
                _log.warning("nothing was learned from the training's time: the app's data loader has no length")
                self.refit()
                return None
            with self._state:
                self._take_known(
                    self.known.with_estimated_length(observed.epoch_s, self.predicted_minibatch_s(observed.mode))
                )
            _log.info(
                "the app has reported no data loader with a length (`len(loader)`), so whole trainings are learned from"
            )
        first_s = observed.first_minibatch_s
        record = JournalledRound(
            observed.mode,
            observed.epoch_s * 1e3 / self.minibatches_per_epoch,
            observed.power_w * 1e3,
            first_minibatch_ms=None if first_s is None else first_s * 1e3,
        )
        predicted = self._fitted.at(observed.mode, self.known)
        self._journal.append(record)
        self._residuals.append(Residual.of(record.measurement, predicted))
        reason = detect_drift(self._residuals, self._rule)
        if reason is None:
            self.refit()
        else:
            self._journal.append(Renewal(reason, self._rule.modes))
            self._residuals.clear()
        return reason

    def reprofile(self, report: Callable[[ProfilingProgress], None]) -> None:
        """Measure as many modes as the last renewal allows, and fit the predictor only to these.

        If only the app can train the workload, fit it to the remaining records; modes are then measured during rounds.

        Args:
            report: called after every measured mode; if it raises an exception, the profile ends.

        Raises:
            WattfleetError: a mode could not be measured; earlier ones are stored.
        """
        if self._open_steps is None:
            self.refit()
        else:
            self.profile_ahead(self._limit, report)

    def profile_ahead(
        self, modes: int, report: Callable[[ProfilingProgress], None], open_steps: OpenSteps | None = None
    ) -> None:
        """Measure modes now, with a workload that trains by itself.

        Args:
            modes: maximum number of measured modes, including earlier ones.
            report: called after every measured mode; if it raises an exception, the profile ends.
            open_steps: starts the training to measure with; None uses the workload's own.

        Raises:
            WattfleetError: a mode could not be measured; earlier ones are stored.
        """
        steps = open_steps or self._open_steps
        if steps is None:
            raise InvalidInputError(f"the workload {self.known.workload.name!r} can only be trained by its app")
        most = most_modes(self._journal, modes)
        with self._fitting() as (fitting, basis):
            fitted = profile_device(
                self._device, steps, self._journal, fitting, most, self._seed, report, self._tolerance
            )
            self._take(fitted, basis)

    def training_was_too_short(self, minibatches: float) -> None:
        """Note that a training with this number of minibatches ended before a mode was measured.

        The next few trainings of at most this length are observed in their own mode.
        """
        self._short_trainings.note(minibatches)

    def knob_was_not_reached(self, mode: PowerMode, error: KnobNotReachedError) -> None:
        """Journal that a knob stood at another value when a training's mode was set.

        A value that is missed at every attempt is no longer offered, as with a measurement. A journal that cannot be
        written is logged: the mode's own error is reported anyway.
        """
        try:
            self._journal.append(Discarded(mode, str(error), 0, 0.0, unreached=error.knob or None))
        except JournalError as failure:
            _log.error("%s", failure)

    def predicted_minibatch_s(self, mode: PowerMode) -> float:
        """Return the predicted seconds of a minibatch in a mode.

        Raises:
            InvalidInputError: the device does not offer the mode.
        """
        with self._state:
            return float(self._fitted.at(mode, self.known).minibatch_ms[0]) / 1e3

    def productive(
        self,
        power_limit_w: float,
        minibatches: float = math.inf,
        spare_s: Callable[[], float] = lambda: math.inf,
        own_minibatch_s: float = 0.0,
    ) -> ProductiveProfiler:
        """Return a profiler that measures the next modes during a training.

        It has no modes to measure if the profile is complete, or the training is too short to measure a mode.

        Args:
            power_limit_w: watts reserved for the device; modes that may draw more are excluded.
            minibatches: number of minibatches of the training; infinite if unknown.
            spare_s: returns the seconds that are left for measurements now, beyond the app's own work; modes that are
                expected to take longer are left out.
            own_minibatch_s: seconds that a minibatch takes without measurements, which the app's work during a
                measurement saves later; 0 if nobody waits for the work.
        """
        if self._short_trainings.is_too_short(minibatches):
            return self._nothing_to_measure(f"a training of {minibatches:,.0f} minibatches is too short to measure one")
        profile = self._profile()
        known = len(own_rows(profile, self._journal.batch))
        most = min(most_modes(self._journal, self._limit), len(self._device.modes))
        if self._fitted.has_choice:  # the limit applies to the modes measured with any batch size
            most = max(0, most - (len(profile) - known))
        settled_at, settled_w = self._settled
        if known >= most or (known == settled_at and power_limit_w <= settled_w):
            return self._nothing_to_measure(f"no further mode is worth measuring within {power_limit_w:.1f} W")
        settings = SamplingSettings(limit=most, batch=BATCH, tolerance=self._tolerance, seed=self._seed)
        try:
            with self._fitting() as (fitting, basis):
                if self.is_outdated:  # power differs with the batch size
                    self._take(fitting.fit(self._profile(), self.profiled_modes), basis)
                prediction = self._fitted.prediction(self.known)
                modes = self._device.modes
                # The app trains already, so its first minibatch in another mode has no warm-up.
                took_s = measuring_s(modes, prediction.minibatch_ms, first_gcycles=0.0)
                extra_s = took_s * np.maximum(0.0, 1 - own_minibatch_s * 1e3 / prediction.minibatch_ms)
                fits = extra_s <= spare_s()
                affordable = (prediction.power_mw_quantile(POWER_QUANTILE) <= power_limit_w * 1e3) & fits
                not_tried = ExcludedModes.of(self._journal).not_tried(modes)
                exclude = np.vstack([modes[~affordable], not_tried])
                next_modes = fitting.next_modes(self._profile(), settings, exclude)
        except (FittingFailedError, StoppedError) as error:
            why = str(error) or "the agent is stopping"
            _log.error("no modes are measured during this training: %s", why)
            return self._nothing_to_measure(why)
        if not len(next_modes):
            if fits.all():
                # The app waits for every fit, so a fit is not repeated before there is new data.
                self._settled = (known, power_limit_w)
                return self._nothing_to_measure(f"no further mode is worth measuring within {power_limit_w:.1f} W")
            return self._nothing_to_measure("the training leaves no time to measure a mode that is worth it")
        chosen = array_to_modes(next_modes)
        expected_s = {mode: extra_s[(modes == mode).all(axis=1)].item() for mode in chosen}
        return ProductiveProfiler(self._device, chosen, self._journal, fits=lambda mode: expected_s[mode] <= spare_s())

    def _nothing_to_measure(self, why: str) -> ProductiveProfiler:
        return ProductiveProfiler(self._device, [], self._journal, why_none=why)

    def granted_mode(self, mode: PowerMode, power_limit_w: float) -> PowerMode:
        """Return the mode to train in under a grant.

        It is lower than the granted mode only if other devices have shown since the plan that the granted mode draws
        more.

        Args:
            mode: the granted mode.
            power_limit_w: watts reserved for the device.

        Raises:
            InvalidInputError: the mode is predicted to draw more than the limit, or the device does not offer it.
        """
        predicted = self._fitted.at(mode, self.known)
        if draws_at_most(predicted, power_limit_w):
            return mode
        lower = self.mode_within(mode, power_limit_w) if self._news else None
        if lower is None:
            raise exceeds_grant(mode, predicted, power_limit_w)
        return lower

    def mode_within(self, mode: PowerMode, power_limit_w: float) -> PowerMode | None:
        """Return the mode to train in, if more has become known of the workload since the grant.

        It differs from the granted mode only if that may exceed the limit (`keeps_within`).

        Args:
            mode: the granted mode.
            power_limit_w: watts reserved for the device.

        Returns:
            The granted mode, or else the fastest mode of the front that keeps within the limit; None if no mode does.

        Raises:
            InvalidInputError: the device does not offer the granted mode.
            ImplausibleError: there is no front, as no mode's prediction is plausible.
        """
        if keeps_within(self._fitted.at(mode, self.known), power_limit_w):
            return mode
        # An app cannot change its batch size during a training.
        front = self._fitted.front_of_own_batch(self.known, self._allowed, self.first_gcycles, self._beside)
        return fastest_within(front, power_limit_w)

    def refit(self) -> None:
        """Fit the predictor to the journal.

        Raises:
            FittingFailedError: the predictor could not be fitted, and is unchanged.
        """
        with self._fitting() as (fitting, basis):
            self._take(fitting.fit(self._profile(), self.profiled_modes), basis)

    def refit_if_outdated(self) -> None:
        """Fit the predictor again if more is known of the workload, unless another thread has already done so.

        Raises:
            FittingFailedError: the predictor could not be fitted, and is unchanged.
        """
        with self._one_fit:
            if self.is_outdated:
                self.refit()

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    @property
    def _allowed(self) -> Mask:
        """Return `[n]` booleans: whether each of the device's modes does not overload the board."""
        return ExcludedModes.of(self._journal).allows(self._device.modes)

    @property
    def _basis(self) -> tuple[KnownWorkload, int]:
        """Return what a fit that begins now uses: what is known, and how often others have measured more."""
        with self._state:
            return self.known, self._news

    @contextmanager
    def _fitting(self) -> Iterator[tuple[Fitting, tuple[KnownWorkload, int]]]:
        """Open a fitting, one at a time; yield it with what it uses."""
        with self._one_fit:
            with self._state:
                known, basis = self.known, self._basis
            with self._open_fitting(known) as fitting:
                yield fitting, basis

    def _take(self, fitted: Fitted, basis: tuple[KnownWorkload, int]) -> None:
        """Put a new fit into use, and note what it was fitted to."""
        with self._state:
            known, self._fitted_news = basis
            self._fitted = FittedModes(self._device.modes, fitted.prediction, fitted.by_batch, known)
        self._keep(fitted.artefact)

    def _profile(self) -> Profile:
        return Profile.of(self._journal.measurements)
