"""Plans trainings beside a device's duty: the points of its fronts, and the modes that keep the duty."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import numpy as np

from edge_agent.devices.device import Device, DutyNotKeptError
from edge_agent.devices.meters import power_now_mw
from edge_agent.learning.fitting import NoFrontError
from edge_agent.learning.profiling_plan import ProfilingProgress
from edge_agent.profiling.mode_measurement import DEFAULT_SETTINGS, DisturbedError, MeasurementError, ProfilerSettings
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.profiling.profiler import Profiler
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_figures import DutyModes, DutyNow, KnownDutyModes, MeasuredDutyModes, highest_mode
from edge_agent.serving.inference import InferenceRows, batch_sizes, known_inference
from edge_agent.serving.server_stream import ServerGoneError
from edge_agent.serving.turns import Batching, LiveTimes
from edge_agent.workloads.loading import StepTimes
from wattfleet.core.choosing import POWER_QUANTILE, PROBABILITY, KnownModes, spread_modes
from wattfleet.core.duties import Duty, ModesWithDuty, NoTrainingTimeError, UnkeptDutyError, keep_duty
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError, WattfleetError
from wattfleet.core.modes import Measurement, ModeArray, PowerMode, Profile, Task, array_to_modes
from wattfleet.core.prediction import Prediction

_log = logging.getLogger(__name__)

FitInference = Callable[[str, tuple[int, ...], Profile], Mapping[int, Prediction]]
"""Predicts all modes of the device for each batch, from a workload's name, the batches and the measured rows."""


Alone = Callable[[], tuple[ModeArray, Prediction]]
"""Returns `[n, 4]` modes, and for each the prediction of the current training without requests."""

_MEDIAN = 0.5
_RETRY_QUESTIONS = 30
# A plan for a workload and batch size takes up to 10 MB on a board with 18,000 modes.
_PLANS = 8
# Tolerance for rounding: a plan's watts are sums and differences, so a mode may seem to exceed them by a last digit.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class _Kept:
    """The predicted modes that keep a duty.

    Attributes:
        duty: the duty.
        known: the predicted modes.
        modes: the predicted modes that keep the duty, with their batches; None if no mode keeps it.
        rest_mw: the most power of the device in its resting mode while it answers requests, mW.
    """

    duty: Duty
    known: frozenset[PowerMode]
    modes: ModesWithDuty | None
    rest_mw: float

    @cached_property
    def keeping(self) -> frozenset[PowerMode]:
        return frozenset() if self.modes is None else _set_of(self.modes.alone.modes)

    @cached_property
    def rest(self) -> PowerMode | None:
        return None if self.modes is None else self.modes.least_power().mode


@dataclass(frozen=True)
class _Plan:
    """A training beside a duty.

    Attributes:
        duty: the duty.
        modes: the modes that keep the duty and leave time for training.
        no_time: why no mode leaves time for the training; empty if a mode leaves time, or if that is unknown.
    """

    duty: Duty
    modes: ModesWithDuty
    no_time: str = ""


class DutyPlanning:
    """Plans trainings beside the duty of a device. Its methods may be called in any thread.

    Args:
        turns: the turns of the device.
        rows: the measured rows of inference.
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
        self._planning = threading.Lock()
        self._plans: dict[str, _Plan] = {}
        self._training: tuple[Alone, float] | None = None
        self._seen: DutyNow | None = None
        self._seen_rows = rows.revision
        self._questions_since_failure: int | None = None

    def has_changed(self) -> bool:
        """Return whether fronts are due because the duty or its measured rows have changed since the last call.

        After a failure that may be temporary, such as a killed process, every 30th call returns True, too.
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
        """Return the modes that keep the duty beside a training, and their predictions; without a duty, all of them.

        Args:
            modes: `[n, 4]` modes.
            prediction: the prediction of the training without requests in each of these modes.

        Returns:
            `[m, 4]` modes, which may contain a mode several times, with their predictions.

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
            in_highest = known.among((known.modes == np.array(highest_mode(self._modes))).all(axis=1))
            rest_mw = float(in_highest.safe_power_mw(POWER_QUANTILE).max(initial=0.0))
            self._take(_Kept(now.duty, _set_of(modes), None, rest_mw))
            raise NoFrontError(f"the duty cannot be kept: {error}") from None
        except (WattfleetError, StoppedError) as error:
            self._failed()
            raise NoFrontError(f"no training can be planned beside the duty: {_why(error)}") from None
        found, no_front, is_whole_board = kept.beside, "", False
        if not len(found.modes):
            try:
                no_front, is_whole_board = self._why_none(now, KnownModes.of(modes, prediction), known)
            except (WattfleetError, StoppedError) as error:
                no_front = f"no training can be planned beside the duty: {_why(error)}"
        with self._planning:
            self._plans.pop(key := _key(modes, prediction), None)
            # The modes that keep the duty without training are the same for all trainings.
            trained = replace(kept, alone=kept.alone.among(np.zeros(len(kept.alone.modes), bool)))
            self._plans[key] = _Plan(now.duty, trained, no_front if is_whole_board else "")
            while len(self._plans) > _PLANS:
                del self._plans[next(iter(self._plans))]
        rest_mw = float(kept.alone.safe_power_mw(POWER_QUANTILE).min())
        self._take(_Kept(now.duty, _set_of(modes), kept, rest_mw))
        if no_front:
            raise NoFrontError(no_front)
        beside = Prediction(found.minibatch_ms, found.power_mw, found.time_log_sd, found.power_log_sd)
        return found.modes, beside

    def trains(self, alone: Alone | None, power_limit_w: float = 0.0) -> None:
        """Note the training that begins, or that none is left.

        Args:
            alone: returns its predictions; None if nothing is trained.
            power_limit_w: watts reserved for the device during the training.
        """
        self._training = None if alone is None else (alone, power_limit_w)
        self._turns.choose_batching()

    def batching(self, mode: PowerMode | None) -> Batching:
        """Return how servers should gather requests in a mode; without a plan, the servers decide.

        Beside a training, they gather requests up to the batch of the training's plan, within the planned cycle.
        Otherwise they answer at once, in batches up to the size that draws the least power.
        """
        kept, training = self._kept, self._training
        if mode is None or kept is None or kept.duty != self._turns.duty or kept.modes is None:
            return Batching()
        if training is None:
            alone = kept.modes.least_power_in(mode)
            return Batching() if alone is None else Batching(alone.batch or 0)
        plan = self._plan_of(training[0])
        if plan is None or plan.duty != kept.duty:
            return Batching()
        try:
            shared = plan.modes.in_mode(mode, 1e3 * training[1] * (1 + _ROUNDING), POWER_QUANTILE)
        except (NoTrainingTimeError, InfeasibleBudgetError):
            return Batching()
        return Batching(shared.batch, shared.gather_ms)

    def why_no_training(self) -> str | None:
        """Return why no mode leaves time for the training in progress; None if a mode does, or if that is unknown."""
        training, duty = self._training, self._turns.duty
        with self._planning:
            # Called each second, so the training's plan is looked up by a digest of all its predictions.
            may_have_none = any(plan.no_time and plan.duty == duty for plan in self._plans.values())
        if training is None or not may_have_none:
            return None
        plan = self._plan_of(training[0])
        return (plan.no_time or None) if plan is not None and plan.duty == duty else None

    def _plan_of(self, alone: Alone) -> _Plan | None:
        with self._planning:
            return self._plans.get(_key(*alone()))

    def keeping(self) -> ModesWithDuty | None:
        """Return the modes that keep the duty, with their batches; None until a training can be planned beside it."""
        kept = self._kept
        if kept is None or kept.modes is None or kept.duty != self._turns.duty or not len(kept.modes.beside.modes):
            return None
        return kept.modes

    def resting_w(self) -> float:
        """Return the most power of the resting device while it answers requests, W; 0 without a duty or if unknown.

        It is the power of inference, since requests may keep the device busy all the time in the worst case.
        """
        kept = self._kept
        return kept.rest_mw / 1e3 if kept is not None and kept.duty == self._turns.duty else 0.0

    def _take(self, kept: _Kept | None) -> None:
        self._kept = kept
        self._turns.plan_changed()

    def _failed(self) -> None:
        """Note a failure that may be temporary; until it is over, measured times decide which modes keep the duty."""
        self._questions_since_failure = 0
        self._take(None)

    def _why_none(self, now: DutyNow, training: KnownModes, inference: KnownModes) -> tuple[str, bool]:
        """Return why no mode keeps the duty beside training, and whether the duty takes the whole board."""
        likely = self.keep(training, inference, now.demand(), now.switch_ms, _MEDIAN)
        if len(likely.beside.modes):
            return (
                f"there are too few measurements of the training to be sure that {now.demand()} are answered beside it:"
                " measure its modes ahead with `wattfleet agent profile`, set the duty after a few rounds, or allow a"
                " higher latency"
            ), False
        return (
            f"the duty takes the whole board: {now.demand()} are answered only while nothing is trained; allow a"
            " higher latency, or fewer requests a second"
        ), True

    def judge(
        self, duty: Duty, times: LiveTimes, largest_batch: int, arrivals_per_s: float, in_force: PowerMode | None
    ) -> DutyModes:
        """Return which modes keep the duty, by predictions with a probability of 95 % or else by measured times."""
        measured, kept = MeasuredDutyModes(duty, times, largest_batch, arrivals_per_s, in_force), self._kept
        if kept is None or kept.duty != duty:
            return measured
        return KnownDutyModes(kept.known, kept.keeping, measured, kept.rest)

    def _inference(self, now: DutyNow) -> KnownModes:
        """Return what is known of inference in all modes with all batches."""
        rows = self._rows.usable(now.duty.workload)
        if not len(rows) and not now.live:
            raise NoFrontError(
                f"the inference of {now.duty.workload!r} has not been measured yet: let it answer requests, or pass "
                f"measured rows with `wattfleet agent duty set --measured`"
            )
        seen = {*rows.batches, *(batch for of_mode in now.live.values() for batch in of_mode)}
        batches = batch_sizes(now.largest_batch or max(seen, default=1))
        try:
            return known_inference(self._modes, self._predicted(now.duty.workload, batches, rows), rows, now.live)
        except (WattfleetError, StoppedError) as error:
            self._failed()
            raise NoFrontError(f"the inference of {now.duty.workload!r} cannot be predicted: {_why(error)}") from None

    def _predicted(self, workload: str, batches: tuple[int, ...], rows: Profile) -> Mapping[int, Prediction]:
        key = (workload, batches, rows.sha256(), self.fit)
        with self._fitting:
            if self._fitted is None or self._fitted[0] != key:
                if self.fit is None:
                    raise InvalidInputError("the device has no reference yet")
                self._fitted = key, self.fit(workload, batches, rows)
            return self._fitted[1]


def _key(modes: ModeArray, prediction: Prediction) -> str:
    """Return a key of everything that a training's plan depends on."""
    columns = (prediction.minibatch_ms, prediction.power_mw, prediction.time_log_sd, prediction.power_log_sd)
    return hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in (modes, *columns))).hexdigest()


def _why(error: Exception) -> str:
    return str(error) or "the agent is stopping"


def _set_of(modes: ModeArray) -> frozenset[PowerMode]:
    return frozenset(array_to_modes(np.unique(modes, axis=0)))


# --- Inference measuring ----------------------------------------------------------------------------------------------
# Measures a duty's inference in further modes, using batches that the connected inference servers repeat.

_WITHIN_S = 120.0
"""Measuring a mode is given up after this time, since requests may leave too little time; device-clock seconds."""


class MeasuringServers(Protocol):
    """The inference servers that repeat batches."""

    @property
    def largest_measured(self) -> int:
        """The largest batch that may be measured; 0 if none can be."""
        ...

    async def measured_ms(self, batch: int, work_ms: float) -> float:
        """Make a server answer a batch in a turn, and return the time taken, ms."""
        ...


class InferenceMeasuring:
    """Measures a few modes of the duty's inference, each with the smallest and the largest batch that fit.

    Only modes that keep the duty are measured, once trainings can be planned beside it: only then does the coordinator
    account for the power of a measuring device.

    Args:
        device: the board.
        turns: the turns of the device.
        planning: determines which modes and batches keep the duty.
        rows: stores the measured rows.
        servers: repeat batches.
        modes: number of modes to have measured rows of, including rows passed by the user; 0 for none.
        settings: the profiling settings, among them how long to measure each batch.
    """

    def __init__(
        self,
        device: Device,
        turns: DeviceTurns,
        planning: DutyPlanning,
        rows: InferenceRows,
        servers: MeasuringServers,
        modes: int,
        settings: ProfilerSettings = DEFAULT_SETTINGS,
    ) -> None:
        self._device = device
        self._turns = turns
        self._planning = planning
        self._rows = rows
        self._servers = servers
        self._modes = modes
        self._profiler = Profiler(device, settings)
        self._skipped: set[tuple[str, PowerMode]] = set()
        self._nothing_left: tuple[ModesWithDuty, int, int] | None = None

    def wanted(self, profiled: Iterable[PowerMode]) -> list[PowerMode]:
        """Return the modes to measure now; none before there are a duty, a plan beside it, and a server with answers.

        Args:
            profiled: modes with measured trainings. These come first, then others spread over all modes.
        """
        duty, kept = self._turns.duty, self._planning.keeping()
        if not self._modes or duty is None or kept is None or not self._servers.largest_measured:
            return []
        basis = kept, self._rows.revision, len(self._skipped)
        if (known := self._nothing_left) is not None and known[0] is kept and known[1:] == basis[1:]:
            return []
        measured = {each.mode for each in self._rows.usable(duty.workload).measurements()}
        left = max(0, self._modes - len(measured))
        keeping = np.unique(kept.alone.modes, axis=0)
        spread = array_to_modes(spread_modes(keeping, min(self._modes, len(keeping)), 0))
        among = set(array_to_modes(keeping)) - measured
        wanted = [
            mode
            for mode in dict.fromkeys([*profiled, *spread])
            if mode in among and (duty.workload, mode) not in self._skipped
        ][:left]
        self._nothing_left = None if wanted else basis
        return wanted

    def measure(self, modes: Sequence[PowerMode], report: Callable[[ProfilingProgress], None]) -> None:
        """Measure modes in a thread, and store the rows of each.

        Ends early without an error if the duty changes or no server can measure any longer.

        Args:
            modes: the modes returned by `wanted`.
            report: called after every mode; if it raises an exception, the measurement ends.

        Raises:
            ModeNotAppliedError: a mode did not take effect, or did not last.
            StoppedError: the agent is stopping.
        """
        duty = self._turns.duty
        if duty is None:
            return
        workload = duty.workload
        if math.isnan(power_now_mw(self._device)):
            _log.warning("the inference of %r is not measured, as the board's power cannot be read", workload)
            self._skipped.update((workload, mode) for mode in modes)
            return
        for done, mode in enumerate(modes, start=1):
            kept = self._planning.keeping()
            if self._turns.duty != duty or kept is None:
                return
            try:
                for batch, work_ms in self._batches(kept, mode):
                    self._measure(workload, mode, batch, work_ms)
            except ServerGoneError as error:
                _log.info("stopped measuring the inference of %r: %s", workload, error)
                return
            except (DutyNotKeptError, DisturbedError, MeasurementError, InvalidInputError) as error:
                _log.info("the inference of %r is not measured at %s: %s", workload, mode.label(), error)
            self._skipped.add((workload, mode))
            report(ProfilingProgress(done, len(modes), f"measured the inference of {workload} at {mode.label()}"))

    def _batches(self, kept: ModesWithDuty, mode: PowerMode) -> list[tuple[int, float]]:
        """Return the batches to measure in a mode, with the longest time of each, ms.

        A request that arrives during such a batch has to wait for its end, and must still be answered in time.
        """
        rows = kept.alone.among((kept.alone.modes == np.array(mode)).all(axis=1))
        times_ms = dict(zip(rows.stated_batch().tolist(), rows.safe_minibatch_ms(PROBABILITY).tolist(), strict=True))
        largest, limit_ms = self._servers.largest_measured, kept.demand.latency_ms
        fitting = sorted(batch for batch, ms in times_ms.items() if batch <= largest and 2 * ms <= limit_ms)
        return [(batch, times_ms[batch]) for batch in dict.fromkeys([*fitting[:1], *fitting[-1:]])]

    def _measure(self, workload: str, mode: PowerMode, batch: int, work_ms: float) -> None:
        clock = self._device.clock
        until_s = clock.now_s() + _WITHIN_S

        def step() -> StepTimes:
            if clock.now_s() > until_s:
                raise MeasurementError(f"{mode.label()}: requests leave too little time for batches of {batch}")
            return StepTimes(0.0, self._turns.measured(partial(self._servers.measured_ms, batch, work_ms)))

        with self._device.measuring():
            record = self._profiler.measure(mode, step)
        # Not the time of the whole step, which includes waiting for requests.
        batch_ms = record.minibatch_ms if record.compute_ms is None else record.compute_ms
        self._rows.add(workload, Profile.of([Measurement(mode, batch_ms, record.power_mw, batch)], Task.INFERENCE))
