"""Choosing the power mode and the batch size for inference, within limits of latency and power.

Samples arrive at a constant rate and are collected into batches. A sample waits at most until its batch is full, and
then for the inference of its batch. The conditions are those of the published work on training beside inference: the
first sample of a batch is answered within the latency, and a batch is finished before the next one is full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from wattfleet.choosing.choice import PROBABILITY, ChosenMode, KnownModes
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BatchArray

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
