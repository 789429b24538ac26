"""Plans trainings beside a device's duty: what its front counts, and which modes keep the duty."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from edge_agent.learning.fitted_modes import NoFrontError
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_modes import DutyModes, KnownDutyModes, MeasuredDutyModes
from edge_agent.serving.duty_now import DutyNow
from edge_agent.serving.inference_rows import InferenceRows
from edge_agent.serving.known_inference import batch_sizes, known_inference
from edge_agent.serving.live_times import LiveTimes
from wattfleet.choosing import KnownModes
from wattfleet.duties import Duty, ModesWithDuty, UnkeptDutyError, keep_duty
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.modes import ModeArray, PowerMode, Profile, array_to_modes
from wattfleet.prediction import Prediction

_log = logging.getLogger(__name__)

FitInference = Callable[[str, tuple[int, ...], Profile], Mapping[int, Prediction]]
"""Predicts all modes of the device by batch, of a workload's name, the batches, and the measured rows."""


_MEDIAN = 0.5
_RETRY_QUESTIONS = 30


@dataclass(frozen=True)
class _Kept:
    """Which modes keep a duty, as far as they are predicted."""

    duty: Duty
    known: frozenset[PowerMode]
    keeping: frozenset[PowerMode]


class DutyPlanning:
    """Plans trainings beside the duty of a device. Its methods may be called by any thread.

    Args:
        turns: of the device.
        rows: what was measured of inference.
        modes: `[n, 4]` modes of the device.

    Attributes:
        fit: predicts inference; None until the device has its references.
        keep: finds the modes that keep the duty; may do so in another process.
    """

    def __init__(self, turns: DeviceTurns, rows: InferenceRows, modes: ModeArray) -> None:
        self._turns = turns
        self._rows = rows
        self._modes = modes
        self.fit: FitInference | None = None
        self.keep: Callable[..., ModesWithDuty] = keep_duty
        self._fitting = threading.Lock()
        self._fitted: tuple[object, Mapping[int, Prediction]] | None = None
        self._kept: _Kept | None = None
        self._seen: DutyNow | None = None
        self._seen_rows = rows.revision
        self._questions_since_failure: int | None = None

    def has_changed(self) -> bool:
        """Whether the duty or its measured rows have changed since this was asked last, so that fronts are due.

        After a failure that may pass, such as of a process that was killed, also once it was asked 30 times.
        """
        now, seen, rows = self._turns.duty_now(), self._seen, self._rows.revision
        is_same = now is None if seen is None else now is not None and not now.differs_from(seen)
        if self._questions_since_failure is not None:
            self._questions_since_failure += 1
        has_rows = now is not None and rows != self._seen_rows
        is_due = not is_same or has_rows or (self._questions_since_failure or 0) >= _RETRY_QUESTIONS
        if is_due:
            self._seen, self._seen_rows, self._questions_since_failure = now, rows, None
        return is_due

    def beside(self, modes: ModeArray, prediction: Prediction) -> tuple[ModeArray, Prediction]:
        """Predictions of training with the duty kept, without the modes that cannot keep it; the same without a duty.

        Args:
            modes: `[n, 4]` modes.
            prediction: of a training alone in each of them.

        Returns:
            `[m, 4]` modes, in which one may occur several times, with their predictions.

        Raises:
            NoFrontError: no mode keeps the duty beside training, or too little is known of its inference.
        """
        now = self._turns.duty_now()
        if now is None:
            return modes, prediction
        known = self._inference(now)
        try:
            kept = self.keep(KnownModes.of(modes, prediction), known, now.demand(), now.switch_ms)
        except UnkeptDutyError as error:
            self._kept = _Kept(now.duty, _set_of(modes), frozenset())
            raise NoFrontError(f"the duty cannot be kept: {error}") from None
        except WattfleetError as error:
            self._failed()
            raise NoFrontError(f"no training can be planned beside the duty: {error}") from None
        self._kept = _Kept(now.duty, _set_of(modes), _set_of(kept.alone.modes))
        found = kept.beside
        if not len(found.modes):
            raise NoFrontError(self._why_none(now, KnownModes.of(modes, prediction), known))
        beside = Prediction(found.minibatch_ms, found.power_mw, found.time_log_sd, found.power_log_sd)
        return found.modes, beside

    def _failed(self) -> None:
        """Note a failure that may pass; modes are judged by measured times meanwhile."""
        self._questions_since_failure, self._kept = 0, None

    def _why_none(self, now: DutyNow, training: KnownModes, inference: KnownModes) -> str:
        """Why no mode keeps the duty beside training."""
        likely = self.keep(training, inference, now.demand(), now.switch_ms, _MEDIAN)
        if len(likely.beside.modes):
            return (
                f"too little was measured of the training to be sure that {now.demand()} are answered beside it:"
                " measure its modes ahead with `wattfleet agent profile`, set the duty after a few rounds, or allow a"
                " higher latency"
            )
        return (
            f"the duty takes the whole board: {now.demand()} are answered only while nothing is trained; allow a"
            " higher latency, or fewer requests a second"
        )

    def judge(
        self, duty: Duty, times: LiveTimes, largest_batch: int, arrivals_per_s: float, in_force: PowerMode | None
    ) -> DutyModes:
        """Tell which modes keep the duty: by predictions with a probability of 95 %, or else by measured times."""
        measured, kept = MeasuredDutyModes(duty, times, largest_batch, arrivals_per_s, in_force), self._kept
        return KnownDutyModes(kept.known, kept.keeping, measured) if kept and kept.duty == duty else measured

    def _inference(self, now: DutyNow) -> KnownModes:
        """What is known of inference in all modes with all batches.

        Raises:
            NoFrontError: nothing is known of it, or it cannot be predicted.
        """
        rows = self._rows.usable(now.duty.workload)
        if not len(rows) and not now.live:
            raise NoFrontError(
                f"nothing is known of the inference of {now.duty.workload!r} yet: have it answer requests, or state"
                " measured rows with `wattfleet agent duty set --measured`"
            )
        seen = {*rows.batches, *(batch for of_mode in now.live.values() for batch in of_mode)}
        batches = batch_sizes(now.largest_batch or max(seen, default=1))
        try:
            return known_inference(self._modes, self._predicted(now.duty.workload, batches, rows), rows, now.live)
        except (WattfleetError, StoppedError) as error:
            self._failed()
            why = str(error) or "the agent is stopping"
            raise NoFrontError(f"the inference of {now.duty.workload!r} cannot be predicted: {why}") from None

    def _predicted(self, workload: str, batches: tuple[int, ...], rows: Profile) -> Mapping[int, Prediction]:
        key = (workload, batches, rows.sha256(), self.fit)
        with self._fitting:
            if self._fitted is None or self._fitted[0] != key:
                if self.fit is None:
                    raise InvalidInputError("the device has no reference yet")
                self._fitted = key, self.fit(workload, batches, rows)
            return self._fitted[1]


def _set_of(modes: ModeArray) -> frozenset[PowerMode]:
    return frozenset(array_to_modes(np.unique(modes, axis=0)))
