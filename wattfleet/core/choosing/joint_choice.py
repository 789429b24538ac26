"""Choosing the power mode and the batch size for training together, and the baselines of the published work.

The time to a target accuracy is the time per sample multiplied by the samples needed. The first depends on the mode and
the batch size, the second on the batch size only, so comparing all known combinations gives the exact optimum: Ahmed et
al., "Accelerated Training on Low-Power Edge Devices" (arXiv:2502.18323), equation 2 and section 4.3.

Times and energies until the accuracy is reached are divided by the number of samples that the largest batch of the
efficiency needs. They can be compared with each other; multiplied by that number, they are the time and energy of the
training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.choosing.batch_efficiency import BatchEfficiency
from wattfleet.core.choosing.choice import PROBABILITY, ChosenMode, KnownModes
from wattfleet.core.choosing.joint_profiling import JointMeasurement, PowerFigure, PowerLimit
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError, first_few
from wattfleet.core.modes import BatchArray, modes_to_array, whole_batches

# --- Serving ----------------------------------------------------------------------------------------------------------
# Choosing the power mode and the batch size for inference, within limits of latency and power.
#
# Samples arrive at a constant rate and are collected into batches. A sample waits at most until its batch is full,
# and then for the inference of its batch. The conditions are those of the published work on training beside
# inference: the first sample of a batch is answered within the latency, and a batch is finished before the next one
# is full.


Values = NDArray[np.float64]


class InfeasibleServiceError(InvalidInputError):
    """No known mode and batch size keeps the limits."""


class Objective(str, Enum):
    """What the choice of a mode and a batch size optimizes."""

    LEAST_POWER = "least-power"
    MOST_SAMPLES = "most-samples"

    def __str__(self) -> str:
        return self.value

    def cost(self, minibatch_ms: Values, power_mw: Values, batch: BatchArray) -> Values:
        """`[n]` values to minimize: mW, or ms per sample."""
        return power_mw if self is Objective.LEAST_POWER else np.asarray(minibatch_ms / batch)


@dataclass(frozen=True)
class ServiceLimits:
    """The limits that inference has to keep.

    Attributes:
        latency_ms: most ms from the arrival of a sample to its result.
        arrival_per_s: samples that arrive each second.
        budget_mw: most mW; infinite for no limit.

    Raises:
        InvalidInputError: a limit is not above 0, or latency or arrival rate are not finite.
    """

    latency_ms: float
    arrival_per_s: float
    budget_mw: float = math.inf

    def __post_init__(self) -> None:
        for name, value, unit in (
            ("latency", self.latency_ms, "ms"),
            ("arrival rate", self.arrival_per_s, "samples a second"),
        ):
            if not 0 < value < math.inf:
                raise InvalidInputError(f"the {name} must be finite and above 0 {unit}, not {value:g}")
        if not self.budget_mw > 0:
            raise InvalidInputError(f"the power budget must be above 0 mW, not {self.budget_mw:g}")

    def longest_ms(self, batch: BatchArray) -> Values:
        """The longest inference of `[n]` batch sizes that keeps the conditions, `[n]` ms.

        It is the shorter of the latency that remains once the batch is full and the time to collect the next one. It is
        0 or negative if the latency has passed before the batch is full.
        """
        collect_ms = self.collect_ms(batch)
        return np.asarray(np.minimum(self.latency_ms - collect_ms, collect_ms))

    def collect_ms(self, batch: BatchArray) -> Values:
        """The time in which batches of `[n]` sizes fill, `[n]` ms; one batch is answered in each."""
        return np.asarray(1e3 * batch / self.arrival_per_s)


@dataclass(frozen=True)
class ServingGoal:
    """The limits and the objective of a choice for inference.

    Attributes:
        limits: the limits to choose for, each separately.
        objective: what the choice optimizes.

    Raises:
        InvalidInputError: there are no limits.
    """

    limits: tuple[ServiceLimits, ...]
    objective: Objective

    def __post_init__(self) -> None:
        if not self.limits:
            raise InvalidInputError("a goal for inference needs limits: state a latency and an arrival rate")

    def collectable(self, batch: BatchArray) -> NDArray[np.bool_]:
        """`[n]` whether each batch size can be collected within the latency of any of the limits."""
        return np.asarray(np.any([limits.longest_ms(batch) > 0 for limits in self.limits], axis=0))


def choose_serving(
    known: KnownModes, limits: ServiceLimits, objective: Objective, probability: float = PROBABILITY
) -> ChosenMode:
    """The mode and batch size with the least power or the most samples a second, within the limits.

    A remaining tie goes to the other objective.

    Args:
        known: the modes, with their batches.
        limits: the limits to keep.
        objective: what to optimize, with measured or median predicted values.
        probability: probability with which an unmeasured mode must keep the time, and the same for the power.

    Raises:
        InfeasibleServiceError: nothing keeps the limits with that probability.
        InvalidInputError: the modes have no batches, or the probability is not between 0 and 1.
    """
    batches = known.stated_batch()
    safe_ms, safe_mw = known.safe_minibatch_ms(probability), known.safe_power_mw(probability)
    in_time = safe_ms <= limits.longest_ms(batches)
    within = np.flatnonzero(in_time & (safe_mw <= limits.budget_mw))
    if not len(within):
        raise InfeasibleServiceError(_infeasible(safe_mw[in_time], limits, probability))
    batch = batches[within]
    costs = [
        each.cost(known.minibatch_ms[within], known.power_mw[within], batch)
        for each in sorted(Objective, key=lambda each: each is objective)
    ]
    return known.chosen(int(within[np.lexsort(costs)[0]]))


def _infeasible(in_time_mw: Values, limits: ServiceLimits, probability: float) -> str:
    service = f"{limits.latency_ms:g} ms at {limits.arrival_per_s:g} samples a second"
    if not len(in_time_mw):
        return (
            f"no mode and batch size answers within {service} with a probability of {probability:g}: allow a higher"
            " latency, or fewer samples a second"
        )
    return (
        f"no mode and batch size that answers within {service} draws at most {limits.budget_mw / 1e3:g} W with a"
        f" probability of {probability:g}: give a budget of at least {in_time_mw.min() / 1e3:.1f} W"
    )


# --- Joint choice -----------------------------------------------------------------------------------------------------

Mask = NDArray[np.bool_]

_GPU_HZ = 2  # the column of the GPU frequency in an array of modes


class TrainingObjective(str, Enum):
    """What the choice of a mode and a batch size minimizes until the target accuracy is reached."""

    LEAST_TIME = "least-time"
    LEAST_ENERGY = "least-energy"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class JointTable:
    """Time and power of `n` modes with batch sizes.

    Attributes:
        known: the modes with their batches, measured or predicted.
        peak_mw: `[n]` measured or median predicted highest power, mW; None if it is not known. A predicted peak is
            assumed to be as uncertain as the predicted power.

    Raises:
        InvalidInputError: there are no rows, they state no batches, or the peaks do not match them.
    """

    known: KnownModes
    peak_mw: Values | None = None

    def __post_init__(self) -> None:
        n = len(self.known.modes)
        if not n:
            raise InvalidInputError("there is no mode with a batch size to choose from: measure or predict one")
        whole_batches(self.known.stated_batch(), n)
        if self.peak_mw is not None and not (
            self.peak_mw.shape == (n,) and (np.isfinite(self.peak_mw) & (self.peak_mw > 0)).all()
        ):
            raise InvalidInputError(f"peak power: {n} modes need {n} finite values above 0 mW")

    @classmethod
    def measured(cls, rows: Sequence[JointMeasurement]) -> JointTable:
        """Create the table from measurements; the peaks are known if every row states one.

        Raises:
            InvalidInputError: there are no rows.
        """
        zero = np.zeros(len(rows))
        known = KnownModes(
            modes_to_array(row.mode for row in rows),
            np.array([row.minibatch_ms for row in rows], dtype=np.float64),
            np.array([row.power_mw for row in rows], dtype=np.float64),
            zero,
            zero,
            np.ones(len(rows), dtype=bool),
            np.array([row.batch for row in rows], dtype=np.int64),
        )
        peaks = [row.peak_mw for row in rows if row.peak_mw is not None]
        return cls(known, np.array(peaks) if len(peaks) == len(rows) else None)

    def among(self, kept: Mask) -> JointTable:
        """Select rows by an `[n]` mask."""
        return JointTable(self.known.among(kept), None if self.peak_mw is None else self.peak_mw[kept])

    def with_known_efficiency(self, efficiency: BatchEfficiency) -> JointTable:
        """Leave out the batch sizes whose efficiency is not known.

        Raises:
            InvalidInputError: no batch size is left.
        """
        batches = self.known.stated_batch()
        kept = np.isin(batches, [batch for batch in np.unique(batches).tolist() if efficiency.knows(batch)])
        if not kept.any():
            raise InvalidInputError(
                f"{efficiency.model}: the efficiency is known for the batch sizes"
                f" {first_few([str(batch) for batch in efficiency.batches])}, none of which is among"
                f" {first_few([str(batch) for batch in np.unique(batches)])}: profile those, or train the proxy with"
                " these"
            )
        return self.among(kept)

    def safe_mw(self, figure: PowerFigure, probability: float = PROBABILITY) -> Values:
        """`[n]` mW that the median or the peak does not exceed with a probability; measured values as they are.

        Raises:
            InvalidInputError: the peak is not known, or the probability is not between 0 and 1.
        """
        if figure is PowerFigure.MEDIAN:
            return self.known.safe_power_mw(probability)
        if self.peak_mw is None:
            raise InvalidInputError("the peak power of the modes is not known: record it, or limit the median power")
        return replace(self.known, power_mw=self.peak_mw).safe_power_mw(probability)

    def sample_ms(self, efficiency: BatchEfficiency) -> Values:
        """`[n]` ms until the target accuracy is reached, per sample that the largest batch needs.

        Raises:
            InvalidInputError: the efficiency of a batch is not known.
        """
        return np.asarray(self.known.minibatch_ms / self.known.stated_batch() * self.relative_samples(efficiency))

    def relative_samples(self, efficiency: BatchEfficiency) -> Values:
        """`[n]` samples to the target accuracy, relative to the largest batch of an efficiency.

        Raises:
            InvalidInputError: the efficiency of a batch is not known.
        """
        distinct, index = np.unique(self.known.stated_batch(), return_inverse=True)
        return np.array([efficiency.of(batch) for batch in distinct.tolist()])[index]


@dataclass(frozen=True)
class JointChoice:
    """A chosen mode and batch size, judged by an efficiency.

    Attributes:
        chosen: the mode and the batch size, with the expected time of a minibatch and the expected power.
        sample_ms: ms until the target accuracy is reached, per sample that the largest batch of the efficiency needs.
    """

    chosen: ChosenMode
    sample_ms: float

    @property
    def sample_uj(self) -> float:
        """Energy until the target accuracy is reached, per sample that the largest batch needs, µJ."""
        return self.sample_ms * self.chosen.power_mw

    def judged_by(self, efficiency: BatchEfficiency) -> JointChoice:
        """Return this choice with its time computed by another efficiency, such as that of the target data set.

        Raises:
            InvalidInputError: the efficiency of the batch is not known.
        """
        if self.chosen.batch is None:
            raise InvalidInputError("the choice states no batch size: choose the mode and the batch together")
        per_sample_ms = self.chosen.minibatch_ms / self.chosen.batch
        return JointChoice(self.chosen, per_sample_ms * efficiency.of(self.chosen.batch))


def choose_jointly(
    table: JointTable,
    efficiency: BatchEfficiency,
    limit: PowerLimit,
    objective: TrainingObjective = TrainingObjective.LEAST_TIME,
    probability: float = PROBABILITY,
) -> JointChoice:
    """The mode and batch size with the least time or energy to the target accuracy within a power limit.

    Exact: every row whose efficiency is known is compared. A tie goes to the lower power. With the efficiency of the
    target data set itself, this is the fastest configuration of the published work.

    Args:
        table: the modes with batch sizes. Batch sizes whose efficiency is not known are not chosen.
        efficiency: the samples needed with each batch size.
        limit: the power limit.
        objective: what to minimize, with measured or median predicted values.
        probability: probability with which an unmeasured row must keep the limit.

    Raises:
        InfeasibleBudgetError: no row keeps the limit with that probability; the message states the least power.
        InvalidInputError: the efficiency of no batch is known, the limit applies to the peak, which is not known, or
            the probability is not between 0 and 1.
    """
    candidates = table.with_known_efficiency(efficiency)
    safe_mw = candidates.safe_mw(limit.figure, probability)
    within = safe_mw <= limit.power_mw
    if not within.any():
        raise InfeasibleBudgetError(
            f"no mode and batch size keeps a {limit.figure} power of {limit.power_mw / 1e3:g} W with a probability of"
            f" {probability:g}: give a limit of at least {_rounded_up_w(safe_mw.min())} W"
        )
    return _best(candidates.among(within), efficiency, objective)


def highest_safe_gpu_hz(tables: Sequence[JointTable], limit: PowerLimit, probability: float = PROBABILITY) -> int:
    """The highest GPU frequency that keeps a limit with every model and batch size: the cap of both baselines.

    A frequency counts only if every table has it with each of its batch sizes, and all rows with it keep the limit.

    Args:
        tables: a table for each model, with all of its frequencies.
        limit: the power limit.
        probability: probability with which an unmeasured row must keep the limit.

    Raises:
        InfeasibleBudgetError: no frequency keeps the limit.
        InvalidInputError: there are no tables, the limit applies to the peak, which is not known, or the probability is
            not between 0 and 1.
    """
    if not tables:
        raise InvalidInputError("there are no tables to find a GPU frequency in: state one or more")
    highest_mw: dict[float, float] = {}
    for gpu_hz in np.unique(tables[0].known.modes[:, _GPU_HZ]).tolist():
        at_frequency = [table.known.modes[:, _GPU_HZ] == gpu_hz for table in tables]
        batches = [table.known.stated_batch() for table in tables]
        if all(set(each[at]) == set(each) for each, at in zip(batches, at_frequency, strict=True)):
            powers = [
                table.safe_mw(limit.figure, probability)[at] for table, at in zip(tables, at_frequency, strict=True)
            ]
            highest_mw[gpu_hz] = max(float(each.max()) for each in powers)
    safe = [gpu_hz for gpu_hz, power_mw in highest_mw.items() if power_mw <= limit.power_mw]
    if not highest_mw:
        raise InvalidInputError("no GPU frequency occurs with every model and batch size: profile one with all of them")
    if not safe:
        raise InfeasibleBudgetError(
            f"no GPU frequency keeps a {limit.figure} power of {limit.power_mw / 1e3:g} W with every model and batch"
            f" size: give a limit of at least {_rounded_up_w(min(highest_mw.values()))} W"
        )
    return round(max(safe))


def baseline_1(table: JointTable, efficiency: BatchEfficiency, cap_gpu_hz: float) -> JointChoice:
    """The largest batch size that fits into memory, at the highest GPU frequency up to a cap (section 5.1).

    Args:
        table: the modes with batch sizes. Batch sizes whose efficiency is not known are not chosen, because they
            cannot be judged.
        efficiency: the samples needed with each batch size.
        cap_gpu_hz: the highest GPU frequency that keeps the limit with every model and batch size
            (`highest_safe_gpu_hz`).

    Raises:
        InvalidInputError: no row has a frequency up to the cap, or the efficiency of no batch is known.
    """
    capped = _at_highest_gpu_frequency(table.with_known_efficiency(efficiency), cap_gpu_hz)
    batches = capped.known.stated_batch()
    return _best(capped.among(batches == batches.max()), efficiency, TrainingObjective.LEAST_TIME)


def baseline_2(table: JointTable, efficiency: BatchEfficiency, cap_gpu_hz: float) -> JointChoice:
    """The batch size that needs the fewest samples, at the highest GPU frequency up to a cap (section 5.1).

    The published work selects the batch that minimizes the samples on the proxy data set. Its tables 2 and 4 agree:
    without a power limit, the joint choice is faster than this baseline. `fastest_batch` is the stronger alternative.

    Args:
        table: the modes with batch sizes. Batch sizes whose efficiency is not known are not chosen.
        efficiency: the samples needed with each batch size, from the proxy.
        cap_gpu_hz: as for `baseline_1`.

    Raises:
        InvalidInputError: as for `baseline_1`.
    """
    capped = _at_highest_gpu_frequency(table.with_known_efficiency(efficiency), cap_gpu_hz)
    samples = capped.relative_samples(efficiency)
    return _best(capped.among(samples == samples.min()), efficiency, TrainingObjective.LEAST_TIME)


def fastest_batch(table: JointTable, efficiency: BatchEfficiency, cap_gpu_hz: float) -> JointChoice:
    """The batch size with the least time to the target accuracy, at the highest GPU frequency up to a cap.

    It is stronger than `baseline_2`, and differs from the joint choice only in the frequency.

    Args:
        table: the modes with batch sizes. Batch sizes whose efficiency is not known are not chosen.
        efficiency: the samples needed with each batch size.
        cap_gpu_hz: as for `baseline_1`.

    Raises:
        InvalidInputError: as for `baseline_1`.
    """
    capped = _at_highest_gpu_frequency(table.with_known_efficiency(efficiency), cap_gpu_hz)
    return _best(capped, efficiency, TrainingObjective.LEAST_TIME)


def _best(table: JointTable, efficiency: BatchEfficiency, objective: TrainingObjective) -> JointChoice:
    """The row with the least time or energy; a tie goes to the lower power, then to the earlier row."""
    sample_ms = table.sample_ms(efficiency)
    power_mw = table.known.power_mw
    cost = sample_ms if objective is TrainingObjective.LEAST_TIME else sample_ms * power_mw
    best = int(np.lexsort((power_mw, cost))[0])
    return JointChoice(table.known.chosen(best), float(sample_ms[best]))


def _at_highest_gpu_frequency(table: JointTable, cap_gpu_hz: float) -> JointTable:
    """Each batch size's rows at its highest GPU frequency up to a cap."""
    gpu_hz, batches = table.known.modes[:, _GPU_HZ], table.known.stated_batch()
    below = gpu_hz <= cap_gpu_hz
    if not below.any():
        raise InvalidInputError(
            f"no mode has a GPU frequency of at most {cap_gpu_hz / 1e6:g} MHz: the lowest is {gpu_hz.min() / 1e6:g} MHz"
        )
    highest = {batch: gpu_hz[below & (batches == batch)].max() for batch in np.unique(batches[below])}
    return table.among(below & np.array([hz == highest.get(batch) for hz, batch in zip(gpu_hz, batches, strict=True)]))


def _rounded_up_w(power_mw: float) -> str:
    """Watts as text with one decimal, rounded up, so that the power is within a limit of that many watts."""
    return f"{np.ceil(power_mw / 100) / 10:.1f}"
