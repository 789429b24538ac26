"""Online learning: what rounds show joins the profile, and a board that has changed is measured anew."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from edge_agent.devices.device import Device
from edge_agent.learning.fitting import Fitted, OpenFitting
from edge_agent.learning.fitting_process import FittingFailedError
from edge_agent.profiling.excluded_modes import ExcludedModes
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.journal_records import Renewal, RoundRecord
from edge_agent.profiling.productive_profiler import ProductiveProfiler
from edge_agent.profiling.profiling_plan import BATCH, Progress, StoppedError, profile_device
from edge_agent.training.training import Observed
from edge_agent.workloads.step import OpenSteps
from wattfleet.choosing import Front, SamplingSettings, predicted_front
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, Profile, array_to_modes, modes_to_array
from wattfleet.prediction import DEFAULT_DRIFT_RULE, Artefact, DriftRule, Prediction, Residual, detect_drift

_log = logging.getLogger(__name__)

# A mode is measured during a round only if it keeps the round's watts with this probability.
_CERTAINTY = 0.95


def most_modes(journal: Journal, limit: int) -> int:
    """Modes to measure at most: `limit`, or fewer where the profile was begun anew."""
    return limit if journal.renewal is None else min(journal.renewal.modes, limit)


class OnlineLearner:
    """Keeps a device's predictor true to what its trainings show.

    Args:
        device: the board.
        open_steps: begins what is trained while modes are measured anew.
        journal: its profile, open and not empty; closed with the learner.
        open_fitting: begins to fit the device's predictor.
        fitted: what was fitted to the journal.
        limit: modes to measure in all, at most, those measured during rounds included.
        minibatches_per_epoch: minibatches of one pass over the device's data.
        seed: of the choice of modes.
        keep: called with what is fitted, `fitted` to begin with.
        rule: when to measure anew, and how much.
        tolerance: the share by which a choice must still promise to get faster for measuring to go on.
    """

    def __init__(
        self,
        device: Device,
        open_steps: OpenSteps,
        journal: Journal,
        open_fitting: OpenFitting,
        fitted: Fitted,
        limit: int,
        minibatches_per_epoch: int,
        seed: int,
        keep: Callable[[Artefact], None],
        rule: DriftRule = DEFAULT_DRIFT_RULE,
        tolerance: float = SamplingSettings.tolerance,
    ) -> None:
        self._device = device
        self._open_steps = open_steps
        self._journal = journal
        self._open_fitting = open_fitting
        self._limit = limit
        self._minibatches_per_epoch = minibatches_per_epoch
        self._seed = seed
        self._keep = keep
        self._rule = rule
        self._tolerance = tolerance
        self._residuals: list[Residual] = []
        self._settled = (-1, 0.0)
        self._take(fitted)

    @property
    def profiled_modes(self) -> int:
        """Modes measured; those that only a round has shown are not among them."""
        return len(self._journal.records)

    @property
    def first_gcycles(self) -> float:
        """CPU cycles of a training's first minibatch, in units of 1e9; 0 where that is not known."""
        return self._journal.first_gcycles

    @property
    def front(self) -> Front:
        """The front by what is known now, of the modes that the board bears."""
        borne = ExcludedModes.of(self._journal).allows(self._device.modes)
        modes = self._device.modes[borne]
        return predicted_front(modes, self._prediction.among(borne), self._minibatches_per_epoch, self.first_gcycles)

    def observe(self, observed: Observed) -> str | None:
        """Let what a round showed join the profile, and fit the predictor anew.

        Returns:
            Why the device has to be measured anew, by `measure_anew`; None where the predictor may still be right.

        Raises:
            JournalError: the observation could not be written; the predictor is as it was.
            InvalidInputError: the device does not offer the mode.
            FittingFailedError: the predictor could not be fitted and is as it was; the observation is kept.
        """
        shown = RoundRecord(observed.mode, observed.epoch_s * 1e3 / self._minibatches_per_epoch, observed.power_w * 1e3)
        predicted = self._predicted(observed.mode)
        self._journal.append(shown)
        self._residuals.append(Residual.of(shown.measurement, predicted))
        reason = detect_drift(self._residuals, self._rule)
        if reason is None:
            self.refit()
        else:
            self._journal.append(Renewal(reason, self._rule.modes))
            self._residuals.clear()
        return reason

    def measure_anew(self, report: Callable[[Progress], None]) -> None:
        """Measure as many modes as the last renewal allows, and fit the predictor to them alone.

        Args:
            report: told of every measured mode; what it raises ends the profile.

        Raises:
            WattfleetError: a mode could not be measured; those before it are kept.
        """
        most = most_modes(self._journal, self._limit)
        with self._open_fitting() as fitting:
            fitted = profile_device(
                self._device, self._open_steps, self._journal, fitting, most, self._seed, report, self._tolerance
            )
        self._take(fitted)

    def productive(self, power_limit_w: float) -> ProductiveProfiler:
        """Measures the next modes during a training that was given so many watts; none where the profile is complete.

        Args:
            power_limit_w: watts set aside for the device: no mode that may draw more is measured.
        """
        affordable = self._prediction.power_mw_quantile(_CERTAINTY) <= power_limit_w * 1e3
        most = min(most_modes(self._journal, self._limit), len(self._device.modes))
        known = len(self._profile())
        settled_at, settled_w = self._settled
        if known >= most or (known == settled_at and power_limit_w <= settled_w):
            return ProductiveProfiler(self._device, [], self._journal)
        settings = SamplingSettings(limit=most, batch=BATCH, tolerance=self._tolerance, seed=self._seed)
        exclude = np.vstack([self._device.modes[~affordable], ExcludedModes.of(self._journal).given_up])
        try:
            with self._open_fitting() as fitting:
                chosen = array_to_modes(fitting.next_modes(self._profile(), settings, exclude))
        except (FittingFailedError, StoppedError) as error:
            _log.error("no modes are measured during this training: %s", error or "the agent stops")
            return ProductiveProfiler(self._device, [], self._journal)
        if not chosen:
            # The app waits for every fit: none is made again before something new is known.
            self._settled = (known, power_limit_w)
        return ProductiveProfiler(self._device, chosen, self._journal)

    def refit(self) -> None:
        """Fit the predictor to what the journal holds now.

        Raises:
            FittingFailedError: it could not be fitted, and is as it was.
        """
        with self._open_fitting() as fitting:
            fitted = fitting.fit(self._profile(), self.profiled_modes)
        self._take(fitted)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _take(self, fitted: Fitted) -> None:
        self._prediction = fitted.prediction
        self._keep(fitted.artefact)

    def _profile(self) -> Profile:
        return Profile.of(self._journal.measurements)

    def _predicted(self, mode: PowerMode) -> Prediction:
        (found,) = np.nonzero((self._device.modes == modes_to_array([mode])).all(axis=1))
        if not len(found):
            raise InvalidInputError(f"{mode.label()} is no mode that this device offers")
        at, known = found[:1], self._prediction
        return Prediction(known.minibatch_ms[at], known.power_mw[at], known.time_log_sd[at], known.power_log_sd[at])
