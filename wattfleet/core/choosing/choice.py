"""Choosing a power mode from measurements where they exist, and from predictions elsewhere.

A measured mode is judged by its own time and power. A predicted mode has to keep a limit with a stated probability,
because the best of thousands of predicted modes is likely one whose power or time was underestimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.modes import BatchArray, ModeArray, PowerMode, Profile, array_to_modes
from wattfleet.core.prediction import Prediction, normal_quantile

Values = NDArray[np.float64]

PROBABILITY = 0.95
"""Default probability with which an unmeasured mode must keep a limit."""

TIE = 0.006
"""Relative difference below which predicted times count as equal; repeated measurements differ by about as much."""

# Margin in standard deviations above which a mode counts as certain to keep a budget.
_CERTAIN_MARGIN = 6.0
_MIN_SD = 1e-9
_LARGEST_LOG = 700.0


class InfeasibleDeadlineError(InvalidInputError):
    """No known mode finishes within the given time.

    Attributes:
        least_ms: milliseconds per minibatch that would suffice; infinity if that is unknown.
    """

    def __init__(self, message: str, least_ms: float = np.inf) -> None:
        """Describe a deadline that no mode keeps."""
        super().__init__(message)
        self.least_ms = least_ms


@dataclass(frozen=True)
class ChosenMode:
    """A chosen mode with its expected time and power.

    Attributes:
        mode: the power mode.
        minibatch_ms: measured or median predicted milliseconds per minibatch.
        power_mw: measured or median predicted milliwatts while training.
        measured: whether time and power were measured.
        batch: samples in the batch; None if it was not chosen.
    """

    mode: PowerMode
    minibatch_ms: float
    power_mw: float
    measured: bool
    batch: int | None = None


@dataclass(frozen=True)
class KnownModes:
    """Time and power of `n` modes, or modes with batches: measured values where they exist, predictions elsewhere.

    Attributes:
        modes: `[n, 4]` power modes.
        minibatch_ms: `[n]` measured or median predicted milliseconds per minibatch.
        power_mw: `[n]` measured or median predicted milliwatts.
        time_log_sd: `[n]` standard deviation of the logarithm of the time, 0 if measured.
        power_log_sd: `[n]` standard deviation of the logarithm of the power, 0 if measured.
        measured: `[n]` whether each mode was measured.
        batch: `[n]` samples in the batch of each; None if there is no choice of batch sizes.
    """

    modes: ModeArray
    minibatch_ms: Values
    power_mw: Values
    time_log_sd: Values
    power_log_sd: Values
    measured: NDArray[np.bool_]
    batch: BatchArray | None = None

    @classmethod
    def of(
        cls,
        modes: ModeArray,
        prediction: Prediction,
        profile: Profile | None = None,
        batch: BatchArray | None = None,
    ) -> KnownModes:
        """Combine predictions and measurements.

        Args:
            modes: `[n, 4]` modes that may be chosen.
            prediction: the prediction for each of them.
            profile: measured modes; those that are not in `modes` are ignored.
            batch: `[n]` samples in the batch of each of them. The profile then states its batches, too.

        Raises:
            InvalidInputError: the prediction has another number of modes, or the profile does not state its batches.
        """
        if len(prediction.minibatch_ms) != len(modes):
            raise InvalidInputError(f"{len(prediction.minibatch_ms)} predictions for {len(modes)} modes")
        columns = [prediction.minibatch_ms, prediction.power_mw, prediction.time_log_sd, prediction.power_log_sd]
        ms, mw, time_sd, power_sd = (column.copy() for column in columns)
        measured = np.zeros(len(modes), dtype=bool)
        if profile is not None:
            numbers, of_rows = setting_numbers(
                _settings(modes, batch), _settings(profile.modes, None if batch is None else stated_batches(profile))
            )
            index_of = {int(numbers[i]): i for i in np.flatnonzero(np.isin(numbers, of_rows))}
            pairs = [(index_of[number], j) for j, number in enumerate(of_rows.tolist()) if number in index_of]
            at, row = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
            ms[at], mw[at] = profile.minibatch_ms[row], profile.power_mw[row]
            time_sd[at] = power_sd[at] = 0.0
            measured[at] = True
        return cls(modes, ms, mw, time_sd, power_sd, measured, batch)

    @classmethod
    def only_measured(cls, profile: Profile) -> KnownModes:
        """The modes of a profile, all of them measured, with their batches if it states them."""
        zero, all_ = np.zeros(len(profile)), np.ones(len(profile), dtype=bool)
        return cls(profile.modes, profile.minibatch_ms, profile.power_mw, zero, zero, all_, profile.batch)

    def among(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> KnownModes:
        """Select some of the modes.

        Args:
            chosen: `[n]` true for the modes to keep, or their `[k]` indices.
        """
        return KnownModes(
            self.modes[chosen],
            self.minibatch_ms[chosen],
            self.power_mw[chosen],
            self.time_log_sd[chosen],
            self.power_log_sd[chosen],
            self.measured[chosen],
            None if self.batch is None else self.batch[chosen],
        )

    def stated_batch(self) -> BatchArray:
        """`[n]` samples in the batch of each mode.

        Raises:
            InvalidInputError: the modes have no batches.
        """
        if self.batch is None:
            raise InvalidInputError("the modes state no batch sizes: state the batch of each to choose among them")
        return self.batch

    def power_margin(self, budgets_mw: Values) -> Values:
        """Standard deviations by which each mode keeps each of `[b]` budgets, `[n, b]`; negative above a budget."""
        sd = np.maximum(self.power_log_sd, _MIN_SD)
        return np.asarray((np.log(budgets_mw) - np.log(self.power_mw)[:, None]) / sd[:, None])

    def safe_power_mw(self, probability: float) -> Values:
        """`[n]` mW that each mode does not exceed with a probability; for a measured mode, its measured power."""
        return np.asarray(self.power_mw * np.exp(_deviations(probability) * self.power_log_sd))

    def safe_minibatch_ms(self, probability: float) -> Values:
        """`[n]` ms that each mode does not exceed with a probability; for a measured mode, its measured time."""
        return np.asarray(self.minibatch_ms * np.exp(_deviations(probability) * self.time_log_sd))

    def chosen(self, index: int) -> ChosenMode:
        """The mode at an index as a `ChosenMode`."""
        (mode,) = array_to_modes(self.modes[index : index + 1])
        return ChosenMode(
            mode,
            float(self.minibatch_ms[index]),
            float(self.power_mw[index]),
            bool(self.measured[index]),
            None if self.batch is None else int(self.batch[index]),
        )


def _settings(modes: ModeArray, batch: BatchArray | None) -> Values:
    return modes if batch is None else np.column_stack([modes, batch])


def setting_numbers(rows: Values, others: Values) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number `[n, k]` and `[m, k]` modes, or modes with batches, so that equal ones have equal numbers.

    Returns:
        `[n]` numbers of the rows, -1 for a row with a value that none of the others has; `[m]` numbers of the others.
    """
    known, numbers, of_others = np.ones(len(rows), bool), np.zeros(len(rows), np.int64), np.zeros(len(others), np.int64)
    if not len(others):
        return np.full(len(rows), -1), of_others
    # The places of the values among those of the others, as digits.
    for own, other in zip(rows.T, others.T, strict=True):
        values, places = np.unique(other, return_inverse=True)
        found = np.minimum(np.searchsorted(values, own), len(values) - 1)
        known &= values[found] == own
        numbers, of_others = numbers * len(values) + found, of_others * len(values) + places
    return np.where(known, numbers, -1), of_others


def stated_batches(profile: Profile) -> BatchArray:
    """The batch of each row of a profile, `[n]`.

    Raises:
        InvalidInputError: the profile does not state its batches.
    """
    if profile.batch is None and len(profile):
        raise InvalidInputError("the measurements do not state their batch: state it to choose among batches")
    return np.empty(0, dtype=np.int64) if profile.batch is None else profile.batch


def _deviations(probability: float) -> float:
    if not 0 < probability < 1:
        raise InvalidInputError(f"the probability must be between 0 and 1, not {probability}")
    return normal_quantile(probability)


def fastest_within_budget(known: KnownModes, budget_mw: float, probability: float = PROBABILITY) -> ChosenMode:
    """The fastest mode whose power keeps a budget.

    Among modes whose times count as equal, the one that most certainly keeps the budget is chosen; a remaining tie goes
    to the lower power.

    Args:
        known: the modes.
        budget_mw: mW that the chosen mode may draw.
        probability: probability with which an unmeasured mode must keep the budget.

    Raises:
        InfeasibleBudgetError: no mode keeps the budget with that probability.
        InvalidInputError: the probability is not between 0 and 1.
    """
    safe = known.safe_power_mw(probability)
    within = np.flatnonzero(safe <= budget_mw)
    if not len(within):
        raise InfeasibleBudgetError(
            f"no mode draws at most {budget_mw / 1e3:g} W with a probability of {probability:g}: give a budget of"
            f" at least {safe.min(initial=np.inf) / 1e3:.1f} W"
        )
    times = known.minibatch_ms[within]
    near = within[times <= (1 + TIE) * times.min()]
    margin = known.power_margin(np.array([budget_mw]))[near, 0]
    best = np.lexsort((known.power_mw[near], known.minibatch_ms[near], -np.minimum(margin, _CERTAIN_MARGIN)))[0]
    return known.chosen(int(near[best]))


def least_energy_by_deadline(known: KnownModes, deadline_ms: float, probability: float = PROBABILITY) -> ChosenMode:
    """The mode with the least energy per minibatch among those that keep a deadline.

    Args:
        known: the modes.
        deadline_ms: most ms per minibatch; divide an epoch's deadline by its number of minibatches.
        probability: probability with which an unmeasured mode must keep the deadline.

    Raises:
        InfeasibleDeadlineError: no mode keeps the deadline with that probability.
        InvalidInputError: the probability is not between 0 and 1.
    """
    in_time = _in_time(known, deadline_ms, probability)
    energy = known.minibatch_ms[in_time] * known.power_mw[in_time]
    return known.chosen(int(in_time[energy.argmin()]))


def lowest_power_by_deadline(known: KnownModes, deadline_ms: float, probability: float = PROBABILITY) -> ChosenMode:
    """The mode with the lowest power among those that keep a deadline.

    Args:
        known: the modes.
        deadline_ms: most ms per minibatch; divide an epoch's deadline by its number of minibatches.
        probability: probability with which an unmeasured mode must keep the deadline.

    Raises:
        InfeasibleDeadlineError: no mode keeps the deadline with that probability.
        InvalidInputError: the probability is not between 0 and 1.
    """
    in_time = _in_time(known, deadline_ms, probability)
    return known.chosen(int(in_time[known.power_mw[in_time].argmin()]))


def _in_time(known: KnownModes, deadline_ms: float, probability: float) -> NDArray[np.intp]:
    safe = known.safe_minibatch_ms(probability)
    in_time = np.flatnonzero(safe <= deadline_ms)
    if not len(in_time):
        least_ms = float(safe.min(initial=np.inf))
        raise InfeasibleDeadlineError(
            f"no mode takes at most {deadline_ms:g} ms per minibatch with a probability of {probability:g}: allow"
            f" at least {least_ms:.1f} ms",
            least_ms,
        )
    return in_time


# --- A training within joules and a time ------------------------------------------------------------------------------


class InfeasibleTrainingError(InvalidInputError):
    """No known mode trains within the given time and energy; the text names the least that would do."""


class TrainingGoal(str, Enum):
    """What the choice of a mode for a whole training minimizes."""

    ENERGY = "energy"
    POWER = "power"
    TIME = "time"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class KnownTrainings:
    """Time and energy of one training in each of `n` modes, or modes with batches.

    Attributes:
        known: time and power of the modes.
        minibatches: `[n]` minibatches of the training; they differ with the batch.
        warmup_s: `[n]` seconds of warm-up, once per training.
        idle_mw: mW that do not count as energy of the training; 0 to count all.
    """

    known: KnownModes
    minibatches: Values
    warmup_s: Values
    idle_mw: float = 0.0

    @property
    def time_s(self) -> Values:
        """`[n]` median seconds of the training with its warm-up."""
        return np.asarray(self.warmup_s + self.minibatches * self.known.minibatch_ms / 1e3)

    @property
    def energy_j(self) -> Values:
        """`[n]` median joules of the training; the warm-up counts with the power of the training."""
        return np.asarray(np.maximum(self.known.power_mw - self.idle_mw, 0.0) / 1e3 * self.time_s)

    def safe_time_s(self, probability: float) -> Values:
        """`[n]` seconds that each training does not exceed with a probability."""
        return np.asarray(self.warmup_s + self.minibatches * self.known.safe_minibatch_ms(probability) / 1e3)

    def safe_energy_j(self, probability: float) -> Values:
        """`[n]` joules that each training does not exceed with a probability, if time and power err independently."""
        above_mw = np.maximum(self.known.power_mw - self.idle_mw, 1e-9)
        power_sd = self.known.power_log_sd * self.known.power_mw / above_mw
        safe_log = np.minimum(_deviations(probability) * np.hypot(self.known.time_log_sd, power_sd), _LARGEST_LOG)
        # Near idle power, the logarithm of what is drawn above it has hardly a bound, but power and time each have one.
        safe_mw = np.maximum(self.known.safe_power_mw(probability) - self.idle_mw, 0.0)
        safe_j = self.safe_time_s(probability) * safe_mw / 1e3
        energy_j = self.energy_j
        return np.where(energy_j > 0, np.minimum(energy_j * np.exp(safe_log), safe_j), safe_j)

    def front(self) -> NDArray[np.intp]:
        """`[k]` indices of the trainings that no other one beats in both time and energy, the fastest first."""
        order = np.lexsort((self.energy_j, self.time_s))
        energy = self.energy_j[order]
        return np.asarray(order[energy < np.minimum.accumulate(np.concatenate(([np.inf], energy[:-1])))])

    def best(
        self,
        goal: TrainingGoal,
        within_s: float = np.inf,
        within_j: float = np.inf,
        probability: float = PROBABILITY,
    ) -> int:
        """Return the index of the training with the least energy, power or time within a time and an energy.

        Args:
            goal: what to minimize, with measured or median predicted values.
            within_s: most seconds of the training.
            within_j: most joules of the training.
            probability: probability with which an unmeasured mode must keep each of the two.

        Raises:
            InfeasibleTrainingError: no mode keeps both; the text names the earliest end, or the least joules.
            InvalidInputError: the probability is not between 0 and 1.
        """
        safe_s, safe_j = self.safe_time_s(probability), self.safe_energy_j(probability)
        in_time, in_energy = safe_s <= within_s, safe_j <= within_j
        kept = np.flatnonzero(in_time & in_energy)
        if not len(kept):
            raise InfeasibleTrainingError(_why_infeasible(safe_s, safe_j, within_s, within_j, probability))
        cost = {
            TrainingGoal.ENERGY: self.energy_j,
            TrainingGoal.POWER: self.known.power_mw,
            TrainingGoal.TIME: self.time_s,
        }
        ties = [cost[other][kept] for other in (TrainingGoal.TIME, TrainingGoal.ENERGY)]
        return int(kept[np.lexsort((*ties, cost[goal][kept]))[0]])


def _why_infeasible(safe_s: Values, safe_j: Values, within_s: float, within_j: float, probability: float) -> str:
    """State what is impossible, and the least that would do, rounded up so that allowing it is enough."""
    in_time, in_energy = safe_s <= within_s, safe_j <= within_j
    sure = f"with a probability of {probability:g}"
    if not in_time.any():
        earliest_s = np.ceil(safe_s.min())
        return f"no mode ends the training within {within_s:,.0f} s {sure}: allow at least {earliest_s:,.0f} s"
    if not in_energy.any():
        return (
            f"no mode trains with at most {within_j:,.0f} J {sure}: allow at least {np.ceil(safe_j.min()):,.0f} J, or a"
            " shorter training"
        )
    return (
        f"no mode ends the training within {within_s:,.0f} s and with at most {within_j:,.0f} J {sure}: allow at least"
        f" {np.ceil(safe_s[in_energy].min()):,.0f} s, or at least {np.ceil(safe_j[in_time].min()):,.0f} J"
    )


# --- Method names -----------------------------------------------------------------------------------------------------
# How often a workload changes: names for command lines.


class WorkloadChanges(str, Enum):
    """How often a device's workload changes; each new workload has to be measured."""

    NEVER = "never"
    RARELY = "rarely"
    OFTEN = "often"

    def __str__(self) -> str:
        return self.value

    @property
    def workloads(self) -> int:
        """The assumed number of workloads over all hours of training."""
        return _WORKLOADS[self]


_WORKLOADS: Mapping[WorkloadChanges, int] = {
    WorkloadChanges.NEVER: 1,
    WorkloadChanges.RARELY: 3,
    WorkloadChanges.OFTEN: 20,
}
