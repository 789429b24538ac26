"""Measures one mode, minibatch by minibatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.device import Device, PowerTrace, require_in_force
from edge_agent.profiling.journal import Journal
from edge_agent.workloads.loading import StepTimes
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import ModeArray, ModeRecord, PowerMode, modes_to_array
from wattfleet.core.prediction import warmup_s
from wattfleet_proto.names import HOT_C

# --- Disturbance ------------------------------------------------------------------------------------------------------
# Detects disturbed measurements: a board that gets too hot or throttles itself.


_CHECK_EVERY_S = 2.0
# A sensor may be busy once or twice; after this many failed reads in a row, it counts as lost.
_FAILED_READS = 3


class DisturbedError(WattfleetError):
    """The board got too hot, throttled or stopped reporting, so the measurement may be wrong for its mode."""


class OverloadedError(DisturbedError):
    """The mode overloaded the board: it got too hot or throttled."""


class TooHotError(WattfleetError):
    """The board did not cool down in time; improve its cooling, raise the temperature limit, or wait longer."""


@dataclass(frozen=True)
class Limits:
    """Temperature limits and retries while a board is measured.

    Attributes:
        temperature_c: the highest allowed junction temperature, degrees Celsius. Boards throttle near 95.
        cool_c: measuring continues below this temperature, degrees Celsius.
        cooling_patience_s: how long to wait for the board to cool, s.
        attempts: total number of attempts to measure a disturbed mode.

    Raises:
        InvalidInputError: a number is out of range.
    """

    temperature_c: float = HOT_C
    cool_c: float = 70.0
    cooling_patience_s: float = 900.0
    attempts: int = 3

    def __post_init__(self) -> None:
        if not self.cool_c < self.temperature_c or not self.cooling_patience_s >= 0 or self.attempts < 1:
            raise InvalidInputError(
                "a profile needs a temperature to cool to below its limit, at least 0 s of patience and at least 1 "
                "attempt, not"
                f" {self.cool_c:g} and {self.temperature_c:g} degrees, {self.cooling_patience_s:g} and {self.attempts}"
            )


DEFAULT_LIMITS = Limits()


class Guard:
    """Watches one measurement for disturbances.

    Args:
        device: the board.
        limits: the limits to keep.
    """

    def __init__(self, device: Device, limits: Limits) -> None:
        self._device = device
        self._limits = limits
        self._before = device.conditions()
        self._without_temperature = 0
        self._without_throttling = 0

    @property
    def temperature_known(self) -> bool:
        """Whether the board reported its temperature at the start."""
        return self._before.temperature_c is not None

    def check(self) -> None:
        """Check that nothing has disturbed the measurement; ignore values that the board never reported.

        Raises:
            OverloadedError: the board got too hot, or has throttled since the start. DisturbedError: the board stopped
                reporting a value.
        """
        now = self._device.conditions()
        if now.temperature_c is not None and now.temperature_c > self._limits.temperature_c:
            raise OverloadedError(f"{now.temperature_c:.0f} degrees, above the limit of {self._limits.temperature_c:g}")
        before = self._before.throttle_events
        if now.throttle_events is not None and before is not None and now.throttle_events > before:
            raise OverloadedError(f"the board throttled {now.throttle_events - before} times")
        self._without_temperature = 0 if now.temperature_c is not None else self._without_temperature + 1
        if self.temperature_known and self._without_temperature >= _FAILED_READS:
            raise DisturbedError("the temperature sensor can no longer be read")
        self._without_throttling = 0 if now.throttle_events is not None else self._without_throttling + 1
        if before is not None and self._without_throttling >= _FAILED_READS:
            raise DisturbedError("the throttle counter can no longer be read")


def is_cool(temperature_c: float | None, limits: Limits, known_before: bool) -> bool:
    """Return whether a board may be measured again.

    Args:
        temperature_c: its current temperature; None if it does not report one.
        limits: the limits to keep.
        known_before: whether it reported a temperature before; if so, None does not count as cool.
    """
    return not known_before if temperature_c is None else temperature_c < limits.cool_c


def wait_until_cool(device: Device, limits: Limits, known_before: bool = False) -> None:
    """Wait until a board is cool enough to be measured.

    Args:
        device: the board.
        limits: the limits to keep.
        known_before: whether it reported its temperature before; if so, it must report it again.

    Raises:
        TooHotError: the board did not cool down within the patience, or did not report its temperature.
    """
    give_up_s = device.clock.now_s() + limits.cooling_patience_s
    while not is_cool(temperature_c := device.conditions().temperature_c, limits, known_before):
        if device.clock.now_s() >= give_up_s:
            found = (
                "the temperature cannot be read" if temperature_c is None else f"still at {temperature_c:.0f} degrees"
            )
            raise TooHotError(
                f"{found} after resting {limits.cooling_patience_s:g} s, not below"
                f" {limits.cool_c:g}; improve the board's cooling, or raise the limits"
            )
        known_before = known_before or temperature_c is not None
        device.clock.sleep_s(_CHECK_EVERY_S)


# --- Excluded modes ---------------------------------------------------------------------------------------------------
# Excludes modes from new rounds if measuring them overloaded the board or failed.


@dataclass(frozen=True)
class ExcludedModes:
    """The modes that were measured successfully, and those that failed.

    Attributes:
        measured: `[k, 4]` modes measured without disturbance.
        given_up: `[k, 4]` modes that were disturbed or failed at every attempt; they are not tried again.
        overloaded: `[k, 4]` those of the given-up modes at which the board got too hot or throttled at every attempt.
        unreached: the values that knobs did not reach at every attempt, with their knobs.
    """

    measured: ModeArray
    given_up: ModeArray
    overloaded: ModeArray
    unreached: Sequence[tuple[str, int]] = ()

    @classmethod
    def of(cls, journal: Journal) -> ExcludedModes:
        """Return the excluded modes according to a journal, since its last renewal."""
        attempts = DEFAULT_LIMITS.attempts
        return cls(
            modes_to_array(record.mode for record in journal.records),
            modes_to_array(journal.discarded_modes(attempts)),
            modes_to_array(journal.overloaded_modes(attempts)),
            journal.unreached_values(attempts),
        )

    def not_tried(self, modes: ModeArray) -> ModeArray:
        """Return which of `[n, 4]` modes are not tried again, `[k, 4]`: those given up, or with an unreached value."""
        return modes[_among(modes, self.given_up) | self._is_unreached(modes)]

    def _is_unreached(self, modes: ModeArray) -> NDArray[np.bool_]:
        found = np.zeros(len(modes), dtype=bool)
        for knob, value in self.unreached:
            found |= modes[:, PowerMode._fields.index(knob)] == value
        return found

    def allows(self, modes: ModeArray) -> NDArray[np.bool_]:
        """Return which of `[n, 4]` modes may be used for training, as `[n]` booleans.

        Modes that were given up may not, nor modes with a value that a knob does not reach. If a mode overloads the
        board, modes at least as high in every setting are excluded too. However, if one of those was measured, only the
        overloaded mode itself is excluded. If every mode would be excluded, all are allowed: a device without a front
        could not train at all.
        """
        inherent = self.overloaded[~_at_least(self.measured, self.overloaded).any(axis=0)]
        excluded = _at_least(modes, inherent).any(axis=1) | _among(modes, self.given_up) | self._is_unreached(modes)
        excluded &= ~_among(modes, self.measured)
        return np.asarray(~excluded | excluded.all())


def _among(modes: ModeArray, others: ModeArray) -> NDArray[np.bool_]:
    """Return `[n]` booleans: whether each of `[n, 4]` modes is one of `[m, 4]`."""
    return np.asarray((modes[:, None] == others).all(axis=2).any(axis=1))


def _at_least(modes: ModeArray, others: ModeArray) -> NDArray[np.bool_]:
    """Return `[n, m]` booleans: whether a mode of `[n, 4]` is in every setting at least as high as one of `[m, 4]`."""
    return np.asarray((modes[:, None] >= others).all(axis=2))


# --- Settling ---------------------------------------------------------------------------------------------------------
# Selects the values to use: the minibatches after the first, and power once it has settled.
#
# Power rises over 2 to 3 s when training begins, single samples are a fifth too low, samplers repeat their first
# sample, and a rail that cannot be read leaves a gap. From the raw logs of the PowerTrain measurements, the rules
# reproduce the published tables (doi:10.1016/j.future.2024.07.001, section 2.5).

# Number of consecutive samples that make a level.
_WINDOW = 3
# Largest relative difference of the first settled sample, and of its window's median, from the median of all later
# samples. On the 26 raw logs, 0.12 to 0.2 gives exactly the tables' values; a stalling loader makes power vary as much.
_TOLERANCE = 0.12
RISE_S = 2.0
"""Until this time after the start of a training, power is still rising, however flat it looks, s."""
# Converts a median absolute deviation to the standard deviation of a normal distribution, and that of single values to
# that of the median of many.
_MAD_TO_SD, _SD_OF_MEDIAN = 1.4826, 1.2533


@dataclass(frozen=True)
class Settled:
    """A settled quantity.

    Attributes:
        median: the median, in the quantity's unit.
        spread: robust standard deviation of single values, as a share of the median.
        count: number of values.
        highest: the highest value, in the quantity's unit.
    """

    median: float
    spread: float
    count: int
    highest: float

    @property
    def error(self) -> float:
        """Standard error of the median, as a share of it."""
        return _SD_OF_MEDIAN * self.spread / math.sqrt(self.count)


def settled_minibatch_ms(minibatch_ms: NDArray[np.float64]) -> Settled:
    """Return the time of a minibatch, ms, from the times of `[k]` successive minibatches of one training, k >= 2.

    The first one, in which kernels are chosen and caches filled, is dropped.
    """
    if len(minibatch_ms) < 2:
        raise ValueError(f"{len(minibatch_ms)} minibatches: at least 2 are needed, as the first one is not used")
    return _summary(minibatch_ms[1:])


def settled_power_mw(trace: PowerTrace, *minibatch_end_s: NDArray[np.float64]) -> Settled | None:
    """Return the training power, mW, or None if it has not settled yet.

    Args:
        trace: power samples; NaN is a missing one.
        minibatch_end_s: for each run of minibatches without a pause, `[k]` device-clock seconds at which they ended; k
            >= 1.
    """
    # A sampler repeats its last sample until it has a new one.
    new = np.diff(trace.at_s, prepend=-np.inf) > 0
    training = np.zeros(len(trace.at_s), dtype=bool)
    for run_s in minibatch_end_s:
        training |= (trace.at_s > run_s[0] + RISE_S) & (trace.at_s <= run_s[-1])
    power_mw = trace.power_mw[new & training & np.isfinite(trace.power_mw)]
    for first in range(len(power_mw) - _WINDOW + 1):
        level = np.median(power_mw[first:])
        onset = np.array([power_mw[first], np.median(power_mw[first : first + _WINDOW])])
        if (np.abs(onset / level - 1) <= _TOLERANCE).all():
            return _summary(power_mw[first:])
    return None


def level_mw(trace: PowerTrace) -> Settled | None:
    """Return the power of a trace without transients, mW, or None if too few samples could be read."""
    new = np.diff(trace.at_s, prepend=-np.inf) > 0
    power_mw = trace.power_mw[new & np.isfinite(trace.power_mw)]
    return _summary(power_mw) if len(power_mw) >= _WINDOW else None


def _summary(values: NDArray[np.float64]) -> Settled:
    median = float(np.median(values))
    spread = _MAD_TO_SD * float(np.median(np.abs(values - median))) / median
    return Settled(median, spread, len(values), float(values.max()))


# --- Mode measurement -------------------------------------------------------------------------------------------------

# Seconds between two checks. A meter has a new sample about once a second; checking more often only slows training.
_CHECK_DISTURBANCE_EVERY_S = 0.5
# Power hardly falls in a shorter pause between two passes over the data. After a longer one, it has to rise again.
_NEGLIGIBLE_PAUSE_S = 0.05


class MeasurementError(WattfleetError):
    """A mode could not be measured: power did not settle, or could not be read."""


@dataclass(frozen=True)
class ProfilerSettings:
    """Settings for how long a mode is measured.

    Attributes:
        minibatches: most minibatches to use, not counting the first, which is never used.
        fewest_minibatches: fewest minibatches to use.
        time_error: between these two numbers, a median whose relative standard error is at most this suffices. On the
            26 raw logs of an Orin Nano, such medians differ from those of all minibatches by 0.2 % (median).
        power_samples: required number of settled power samples.
        patience_s: how long to continue training for the power samples once the minibatches are done, s.
        limits: temperature limits and retries.

    Raises:
        InvalidInputError: a number is out of range.
    """

    minibatches: int = 40
    fewest_minibatches: int = 10
    time_error: float = 0.01
    power_samples: int = 5
    patience_s: float = 60.0
    limits: Limits = field(default=DEFAULT_LIMITS)

    def __post_init__(self) -> None:
        if self.minibatches < 1 or self.power_samples < 3 or not self.patience_s >= 0:
            raise InvalidInputError(
                "a profile needs at least 1 minibatch and 3 power samples per mode, and at least 0 s of patience, not"
                f" {self.minibatches}, {self.power_samples} and {self.patience_s}"
            )


DEFAULT_SETTINGS = ProfilerSettings()


class ModeMeasurement:
    """Applies a mode, samples power, and detects when enough is known; a context manager.

    Args:
        device: the board.
        mode: a mode that the board offers.
        settings: how long to measure.

    Raises:
        ModeNotAppliedError: the mode did not take effect.
    """

    def __init__(self, device: Device, mode: PowerMode, settings: ProfilerSettings) -> None:
        self.mode = mode
        self._device = device
        self._settings = settings
        self._begin_s = device.clock.now_s()
        device.apply(mode)
        require_in_force(device, mode)
        self._guard = Guard(device, settings.limits)
        self._last_s = device.clock.now_s()
        self._minibatch_ms: list[float] = []
        # For each run of minibatches without a pause: when they ended.
        self._runs_s: list[list[float]] = [[]]
        self._times: list[StepTimes | None] = []
        self._next_check_s = self._last_s + _CHECK_DISTURBANCE_EVERY_S
        self._give_up_s: float | None = None
        self._meter = device.start_meter()
        self._stopped = False

    @property
    def minibatches(self) -> int:
        """Minibatches trained so far."""
        return len(self._times)

    @property
    def temperature_known(self) -> bool:
        """Whether the board reported its temperature at the start."""
        return self._guard.temperature_known

    @property
    def seconds(self) -> float:
        """Time spent so far, device-clock seconds."""
        return self._device.clock.now_s() - self._begin_s

    def resume(self) -> None:
        """Continue after a pause between two passes over the data, during which no minibatch was trained.

        Neither the pause nor the following rise of power counts towards the patience.
        """
        now_s = self._device.clock.now_s()
        paused_s = now_s - self._last_s
        if paused_s > _NEGLIGIBLE_PAUSE_S and self._runs_s[-1]:
            self._runs_s.append([])
            paused_s += RISE_S
        if self._give_up_s is not None:
            self._give_up_s += paused_s
        self._last_s = now_s

    def minibatch_ended(self, times: StepTimes | None = None, ended_s: float | None = None) -> ModeRecord | None:
        """Record the end of a minibatch; return the mode's record once enough is known.

        Args:
            times: the parts of its time, if known.
            ended_s: when it ended, device-clock seconds; None for now.

        Raises:
            DisturbedError: the board got too hot, throttled itself, or stopped reporting.
            MeasurementError: too few settled power samples within the patience.
            ModeNotAppliedError: the mode did not stay in force.
        """
        now_s = self._device.clock.now_s() if ended_s is None else ended_s
        self._minibatch_ms.append((now_s - self._last_s) * 1e3)
        self._last_s = now_s
        self._runs_s[-1].append(now_s)
        self._times.append(times)
        has_all = self.minibatches == self._settings.minibatches + 1
        if now_s < self._next_check_s and not has_all:
            return None
        self._next_check_s = now_s + _CHECK_DISTURBANCE_EVERY_S
        self._guard.check()
        return self._record_if_settled(now_s) if has_all or self._is_time_known() else None

    def _is_time_known(self) -> bool:
        used = self.minibatches - 1
        if self._give_up_s is not None or used >= self._settings.minibatches:
            return True
        if used < self._settings.fewest_minibatches:
            return False
        return settled_minibatch_ms(np.array(self._minibatch_ms)).error <= self._settings.time_error

    def _record_if_settled(self, now_s: float) -> ModeRecord | None:
        if self._give_up_s is None:
            self._give_up_s = now_s + self._settings.patience_s
        power = settled_power_mw(self._meter.read(), *map(np.array, self._runs_s))
        if power is None or power.count < self._settings.power_samples:
            if now_s >= self._give_up_s:
                raise MeasurementError(
                    f"{self.mode.label()}: {power.count if power else 0} settled power samples after"
                    f" {self.seconds:.0f} s; at least {self._settings.power_samples} are required"
                )
            return None
        self.stop()
        require_in_force(self._device, self.mode)
        time = settled_minibatch_ms(np.array(self._minibatch_ms))
        known = [times for times in self._times[1:] if times is not None]
        return ModeRecord(
            mode=self.mode,
            minibatch_ms=time.median,
            power_mw=power.median,
            minibatch_spread=time.spread,
            power_spread=power.spread,
            minibatches=time.count,
            power_samples=power.count,
            seconds=self.seconds,
            fetch_stall_ms=float(np.median([times.fetch_stall_ms for times in known])) if known else None,
            compute_ms=float(np.median([times.compute_ms for times in known])) if known else None,
            first_minibatch_ms=self._minibatch_ms[0],
            peak_mw=power.highest,
        )

    def stop(self) -> None:
        """Stop sampling; the mode stays applied."""
        if not self._stopped:
            self._stopped = True
            self._meter.stop()

    def __enter__(self) -> ModeMeasurement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


# --- Measuring time ---------------------------------------------------------------------------------------------------
# Estimates in advance how long measuring a mode takes.

Values = NDArray[np.float64]

# Both from the logs of an Orin Nano: CPU cycles of a first minibatch, in units of 1e9, and the seconds between two
# samples of power (1.1 to 2.5, depending on the mode).
_FIRST_GCYCLES = 7.0
_SAMPLE_S = 1.3
# Minibatches until the median is known: on average 24 on the raw logs of the Orin Nano (10 in most modes with steady
# times, and 40 where they vary by more than 4 %), and 19 to 21 on simulated boards.
_USUAL_MINIBATCHES = 20


def measuring_s(
    modes: ModeArray,
    minibatch_ms: Values,
    settings: ProfilerSettings = DEFAULT_SETTINGS,
    first_gcycles: float = _FIRST_GCYCLES,
) -> Values:
    """Return the seconds to measure each mode, `[n]`: a warm-up minibatch, then until time and power are known.

    Fast modes wait for their power samples, which are used once the power has risen. Disturbed measurements, times that
    vary much, and the start of the workload take additional time.

    Args:
        modes: `[n, 4]` modes.
        minibatch_ms: `[n]` milliseconds of a minibatch in each mode.
        settings: how long each mode is measured.
        first_gcycles: CPU cycles of the warm-up minibatch, in units of 1e9; 0 if the app has trained for a while.
    """
    minibatch_s = minibatch_ms / 1e3
    usual = min(max(_USUAL_MINIBATCHES, settings.fewest_minibatches), settings.minibatches)
    first_s = minibatch_s + warmup_s(modes, minibatch_ms, first_gcycles)
    return first_s + np.maximum(usual * minibatch_s, RISE_S + settings.power_samples * _SAMPLE_S)
