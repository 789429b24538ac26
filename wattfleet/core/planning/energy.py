"""The joules of a round's trainings, and how a plan keeps within a run's energy budget.

What counts is the energy of trainings above the idle power of their boards. Each training has two figures: the joules
that it is expected to draw, by the medians of its prediction, and those that are set aside for it, which it can hardly
exceed. A round may be expected to spend its share of what is left, and may set aside all that is left. The batteries of
devices and supplies, and the budgets of supplies for a day, limit what is set aside in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattfleet.core.errors import EnergySpentError, InvalidInputError, NoCandidatesError
from wattfleet.core.planning.curves import Allocation, Curves, FrontTable, Headroom, Indices, Mask, Offer, Values
from wattfleet.core.planning.stores import StoreRoom
from wattfleet.core.prediction import normal_quantile

SET_ASIDE_QUANTILE = 0.95
"""Quantile of a training's predicted time for which energy is set aside, at the power quantile that is planned with."""

_TIME_FACTOR, _EXTRA_S = 1.1, 15.0
"""Beyond its predicted time, an app loads data, measures modes and parks: so much more time is set aside."""

_PARKING_S = 6.0
"""Seconds of what is set aside that remain for parking, once a training has to stop."""

_LAST_ROUND = 0.6
"""About the share of the joules set aside for a round that it spends."""

_SLOWER_LIMITS = 24
"""Number of longer rounds to try if the shortest one takes too much energy."""

_HARDLY_MORE = 1.1
"""A device that trains alone may take so many times the least energy, in order to be faster."""

_CLOSE = 1e-9


@dataclass(frozen=True)
class EnergyLimit:
    """The energy that a run has left before a round.

    Attributes:
        left_j: joules that may be set aside for the round.
        rounds_left: number of rounds that the energy should last for, this one included; 0 if it is unknown.
        used_j: joules of the budget that are spent or set aside.

    Raises:
        InvalidInputError: the joules are negative or not finite, or the number of rounds is negative.
    """

    left_j: float
    rounds_left: int = 0
    used_j: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.left_j) and self.left_j >= 0):
            raise InvalidInputError(f"the energy that is left must be finite and 0 J or more, not {self.left_j:g}")
        if self.rounds_left < 0:
            raise InvalidInputError(f"the number of rounds left must be 0 or more, not {self.rounds_left}")

    @property
    def share_j(self) -> float:
        """Joules that the round should spend at most: an even share, or all if the number of rounds is unknown.

        The last round spends less than what has to be set aside for it, so it counts as a part of one.
        """
        return self.left_j if self.rounds_left <= 1 else self.left_j / (self.rounds_left - 1 + _LAST_ROUND)

    def allows(self, costs: TrainingCosts, step: Indices) -> bool:
        """Whether a round may be planned.

        Args:
            costs: the costs of all steps.
            step: `[k]` the steps of its devices.
        """
        return (
            float(costs.expected_j[step].sum()) <= self.share_j * (1 + _CLOSE)
            and float(costs.set_aside_j[step].sum()) <= self.left_j
        )


@dataclass(frozen=True)
class TrainingCosts:
    """The energy above idle of a training at each of the `m` steps of some power curves.

    Attributes:
        expected_j: `[m]` joules at the medians of time and power.
        longest_s: `[m]` seconds for which energy is set aside.
        set_aside_j: `[m]` joules that are set aside.
        least: `[n]` each device's step with the least expected joules, the fastest of several; -1 if it has no step.
        owner: `[m]` the device of each step.
    """

    expected_j: Values
    longest_s: Values
    set_aside_j: Values
    least: Indices
    owner: Indices

    @classmethod
    def of(cls, offers: Sequence[Offer], fronts: FrontTable, epochs: float | Values) -> TrainingCosts:
        """The costs at the steps of `fronts.curves(epochs)`.

        Args:
            offers: the devices, in the order of the fronts.
            fronts: their fronts.
            epochs: local epochs, the same for all or `[n]`.
        """
        kept = fronts.is_allowed
        each_epochs = np.repeat(np.broadcast_to(epochs, len(fronts.sizes)), fronts.sizes)[kept]
        median_s, log_sd, power_w = (
            np.concatenate([getattr(offer.front, name) for offer in offers])[kept]
            for name in ("epoch_s", "epoch_log_sd", "power_w")
        )
        idle_w, warmup_s = np.repeat(fronts.idle_w, fronts.sizes)[kept], fronts.warmup_s[kept]
        high_s = each_epochs * median_s * np.exp(normal_quantile(SET_ASIDE_QUANTILE) * log_sd) + warmup_s
        longest_s = _TIME_FACTOR * high_s + _EXTRA_S
        expected_j = np.maximum(power_w - idle_w, 0.0) * (each_epochs * median_s + warmup_s)
        owner = np.repeat(np.arange(len(fronts.sizes)), fronts.sizes)[kept]
        owners, first = np.unique(owner, return_index=True)
        least = np.full(len(fronts.sizes), -1, dtype=np.intp)
        least[owners] = np.lexsort((expected_j, owner))[first]
        return cls(expected_j, longest_s, fronts.extra_w[kept] * longest_s, least, owner)

    def within_s(self, step: Indices) -> float:
        """Seconds within which all trainings of a round end; its steps are -1 for devices that do not train."""
        return float(self.longest_s[step[step >= 0]].max(initial=0.0))

    def set_aside_at(self, step: Indices) -> Values:
        """`[n]` joules that are set aside for each device at its step; infinite for a device without one."""
        return np.where(step >= 0, self.set_aside_j[step], np.inf)


def granted_s(longest_s: float) -> float:
    """Seconds after which a training has to stop, so that it is parked within the seconds that were set aside.

    Args:
        longest_s: seconds for which energy is set aside.
    """
    return longest_s - _PARKING_S


def without_waste(allocation: Allocation, curves: Curves, costs: TrainingCosts, headroom: Headroom) -> Allocation:
    """A round whose devices use no mode that takes more time and more energy than another, as far as the watts allow.

    If the watts that are left suffice for some of these devices only, most of them change to a faster mode.

    Args:
        allocation: the devices and their steps.
        curves: power curves of all devices.
        costs: the energy at their steps.
        headroom: headroom of the supplies.
    """
    step = allocation.step
    chosen = np.flatnonzero(step >= 0)
    wasteful = chosen[costs.least[chosen] < step[chosen]]
    if not len(wasteful):
        return allocation
    more_w = np.full(len(curves), np.inf)
    more_w[wasteful] = curves.extra_w[costs.least[wasteful]] - curves.extra_w[step[wasteful]]
    left_w = headroom.spare_w - headroom.drawn_w(curves.extra_at(step), chosen)
    changed = replace(headroom, spare_w=left_w).largest_set(more_w)
    step = step.copy()
    step[changed] = costs.least[changed]
    return Allocation(min(allocation.limit_s, float(curves.time_s[step[chosen]].max())), step)


@dataclass(frozen=True)
class Fitted:
    """The devices and modes of a round whose energy is left.

    Attributes:
        allocation: the devices that train, and their steps.
        dropped: `[n]` devices that would have trained if there was more energy.
    """

    allocation: Allocation
    dropped: Mask


def fit(
    allocation: Allocation,
    curves: Curves,
    costs: TrainingCosts,
    headroom: Headroom,
    energy: EnergyLimit | None,
    priority: Mask,
    eligible: Mask,
    deadline_s: float | None = None,
    room: StoreRoom | None = None,
) -> Fitted:
    """Bring a round within the energy that it may use: first in slower modes, and then with fewer devices.

    If the round's share is too small for any device, the one with the least energy trains alone, as long as any energy
    is left for it.

    Args:
        allocation: the devices and modes that the policy and the watts allow.
        curves: power curves of all devices.
        costs: the energy at their steps.
        headroom: headroom of the supplies.
        energy: what is left of the run's energy budget; None for a run without one.
        priority: `[n]` devices that are dropped last.
        eligible: `[n]` devices of which one may train alone.
        deadline_s: seconds within which all trainings end; None without a deadline.
        room: what batteries and the budgets of supplies leave; None without any.

    Raises:
        EnergySpentError: no device can train with what is left of the run's energy budget; the text states how many
            joules would be needed.
        NoCandidatesError: no device whose stores suffice can train within the watts and the deadline.
    """
    if energy is not None and not energy.left_j:
        raise EnergySpentError("nothing of the energy budget is left: raise energy_budget")
    nobody = np.zeros(len(curves), dtype=np.bool_)
    if energy is None and _allows(allocation.step, costs, energy, room):
        return Fitted(allocation, nobody)
    allocation = without_waste(allocation, curves, costs, headroom)
    chosen = np.flatnonzero(allocation.step >= 0)
    step, limit_s = allocation.step, allocation.limit_s
    longest_s = math.inf if deadline_s is None else max(deadline_s, limit_s)
    if _allows(step, costs, energy, room):
        return Fitted(allocation, nobody)
    slowest_s = min(float(curves.time_s[curves.start[chosen + 1] - 1].max()), longest_s)
    if slowest_s > limit_s:
        for longer_s in np.geomspace(limit_s, slowest_s * (1 + _CLOSE), _SLOWER_LIMITS):
            limit_s = min(float(longer_s), longest_s)
            slower = Allocation(limit_s, np.where(allocation.step >= 0, curves.steps_within(limit_s), -1))
            slower = without_waste(slower, curves, costs, headroom)
            step = slower.step
            if _allows(step, costs, energy, room):
                return Fitted(slower, nobody)
    # Fewer devices leave watts for modes that take less energy. If these watts do not suffice, the slower modes stay.
    frugal = np.minimum(step, costs.least)
    kept = _affordable(frugal, costs, energy, priority, room)
    if headroom.can_supply(curves.extra_at(frugal), np.isin(np.arange(len(curves)), kept)):
        step = frugal
    else:
        kept = _affordable(step, costs, energy, priority, room)
    if not len(kept):
        return _least(allocation, curves, costs, headroom, energy, eligible, longest_s, room)
    fitted = np.full_like(step, -1)
    fitted[kept] = step[kept]
    dropped = nobody.copy()
    dropped[np.setdiff1d(chosen, kept)] = True
    return Fitted(Allocation(float(curves.time_s[step[kept]].max()), fitted), dropped)


def _allows(step: Indices, costs: TrainingCosts, energy: EnergyLimit | None, room: StoreRoom | None) -> bool:
    """Whether the energy suffices for a round with these steps."""
    chosen = np.flatnonzero(step >= 0)
    if energy is not None and not energy.allows(costs, step[chosen]):
        return False
    return room is None or room.holds(costs.set_aside_at(step), chosen, costs.within_s(step))


def _affordable(
    step: Indices, costs: TrainingCosts, energy: EnergyLimit | None, priority: Mask, room: StoreRoom | None
) -> Indices:
    """The devices that the energy suffices for, those with priority first, each group by joules set aside."""
    chosen = np.flatnonzero(step >= 0)
    if room is not None:
        chosen = np.sort(room.largest_set(costs.set_aside_at(step), priority, costs.within_s(step)))
    if energy is None:
        return chosen
    order = chosen[np.lexsort((costs.set_aside_j[step[chosen]], ~priority[chosen]))]
    fits = np.cumsum(costs.expected_j[step[order]]) <= energy.share_j * (1 + _CLOSE)
    fits &= np.cumsum(costs.set_aside_j[step[order]]) <= energy.left_j
    return np.asarray(order[fits])


def _least(
    allocation: Allocation,
    curves: Curves,
    costs: TrainingCosts,
    headroom: Headroom,
    energy: EnergyLimit | None,
    eligible: Mask,
    longest_s: float,
    room: StoreRoom | None,
) -> Fitted:
    """The round of the single device for which the fewest joules, or hardly more, have to be set aside."""
    owner = np.repeat(np.arange(len(curves)), np.diff(curves.start))
    is_in_time = eligible[owner] & (curves.extra_w <= headroom.single_device_w[owner]) & (curves.time_s <= longest_s)
    set_aside_j = np.where(is_in_time, costs.set_aside_j, np.inf)
    left_j = np.inf if energy is None else energy.left_j
    least_j = float(set_aside_j.min())
    if energy is not None and math.isfinite(least_j) and least_j > left_j:
        raise EnergySpentError(
            f"{energy.left_j:.0f} J of the energy budget are left, and the training that takes the least needs"
            f" {math.ceil(least_j)} J: raise energy_budget to at least {math.ceil(energy.used_j + least_j)} J"
        )
    if room is not None:
        set_aside_j[~room.suffices(owner, costs.set_aside_j, costs.longest_s)] = np.inf
    best = int(np.argmin(set_aside_j))
    if not set_aside_j[best] <= left_j or not math.isfinite(set_aside_j[best]):
        # Batteries, watts and a run's other devices come and go, so the run waits.
        raise NoCandidatesError(
            "no device that its batteries and energy budgets suffice for can train within the watts and the deadline of"
            " this round: allow more watts or time, or wait until batteries hold more"
        )
    # The mode with the very least energy may take several times as long.
    alike = set_aside_j <= min(_HARDLY_MORE * set_aside_j[best], left_j)
    best = int(np.argmin(np.where(alike, curves.time_s, np.inf)))
    step = np.full_like(allocation.step, -1)
    step[owner[best]] = best
    dropped = allocation.step >= 0
    dropped[owner[best]] = False
    return Fitted(Allocation(float(curves.time_s[best]), step), dropped)
