"""The policy `progress`: the devices, their number, epochs and duration with the most progress per second."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning.curves import Allocation, Curves, Headroom, Indices, Mask, Offer, Values, min_makespan
from wattfleet.core.planning.energy import EnergyLimit, TrainingCosts, without_waste
from wattfleet.core.planning.history import History
from wattfleet.core.planning.policies.policy import (
    PlanningContext,
    SelectionRequest,
    any_devices,
    only_devices,
    require_count,
)
from wattfleet.core.planning.utility import greedy_by_utility, greedy_by_utility_per_watt

# --- Local improvement ------------------------------------------------------------------------------------------------
# Local search for a better set of devices that the supplies can power, by changes of one device at a time.


def improved(
    level: Indices,
    extra_w: Values,
    headroom: Headroom,
    places: int,
    rate: Callable[[Indices], float],
) -> Indices:
    """The local optimum that is reached from a set by adding, removing or replacing a device, or changing its work.

    The time grows with the square of the number of devices, so it is meant for small fleets.

    Args:
        level: `[n]` index of each device's work, the initial set; -1 for a device that is not in the set.
        extra_w: `[o, n]` watts above idle that each device needs for each kind of work; infinite if it cannot do it.
        headroom: headroom of the supplies.
        places: maximum number of devices.
        rate: the objective to maximize, as a function of `level`.

    Returns:
        The improved set, `[n]` as `level`.
    """
    best, most = level, rate(level)
    while True:
        tried = max(
            (step for step in _steps(best, extra_w) if _fits(step, extra_w, headroom, places)), key=rate, default=best
        )
        if (reached := rate(tried)) <= most * (1 + 1e-9):
            return best
        best, most = tried, reached


def _steps(level: Indices, extra_w: Values) -> Iterator[Indices]:
    """The sets that differ in one device, or in two where one replaces the other."""
    removals = [level] + [_with(level, device, -1) for device in map(int, np.flatnonzero(level >= 0))]
    yield from removals[1:]
    for start in removals:
        for work, watts in enumerate(extra_w):
            for device in map(int, np.flatnonzero(np.isfinite(watts) & (start != work))):
                yield _with(start, device, work)


def _with(level: Indices, device: int, work: int) -> Indices:
    changed = level.copy()
    changed[device] = work
    return changed


def _fits(level: Indices, extra_w: Values, headroom: Headroom, places: int) -> bool:
    chosen = level >= 0
    if np.count_nonzero(chosen) > places:
        return False
    watts = np.where(chosen, extra_w[np.maximum(level, 0), np.arange(len(level))], 0.0)
    return headroom.can_supply(watts, chosen)


# --- Progress search --------------------------------------------------------------------------------------------------
# Searches the devices, their local epochs and the duration of a round with the most progress per second.
#
# A round with the devices `S`, in which device `i` of weight `w_i` trains `e_i` local epochs, makes a progress of
#
#     sum(w_i * f(e_i)) / sum(w_i) * k / (k + h * (n - k) / (n - 1)),   k = sum(w_i)
#
# where `k` is at most the number of the devices, `f(e)` the progress of a round in which all `n` devices of the run
# train `e` epochs, and `h` the number of devices of a much larger fleet with which a round makes half of its
# progress, for the largest number of epochs in the set (see `Progress`). The first factor is the mean progress of the
# devices: those that train less do not add less noise to the average, because FedNova's normalisation gives all
# updates the same weight (Wang et al., arXiv 2007.07481).

_LIMITS, _LIMITS_SMALL_FLEET, _FINER_LIMITS = 32, 96, 12
"""Number of durations to try for each number of epochs, first over the whole range and then around the best one."""

_OWN_LIMITS, _OWN_RANGE = 10, 6.0
"""If devices of a large fleet train different epochs: the number of durations to try, and the factor by which they may
differ from the best duration with equal epochs. For small fleets, the whole range is tried."""

_PRICES = (0.0, 0.3, 1.0, 3.0)
"""Prices of a watt to try, relative to the median progress per watt. At a higher price, devices train less."""

_SMALL_FLEET = 16
"""Maximum number of candidates in a small fleet, whose sets are improved one device at a time."""

_IMPROVED_SETS = 24
"""Number of the most promising sets that are improved."""

_ALIKE_LOG_S = 0.05
"""Durations are grouped by their logarithm in steps of this width; only the best set of a group is improved."""


@dataclass(frozen=True)
class ScoredSet:
    """A set of devices with their local epochs, and its progress per second.

    Attributes:
        progress_per_s: progress per second of the round.
        limit_s: the duration of training that was tried; every device finishes within it, with the least power.
        level: `[n]` index into the options of epochs for each device; -1 for a device that is not in the set.
    """

    progress_per_s: float
    limit_s: float
    level: Indices

    @property
    def chosen(self) -> Mask:
        """`[n]` the devices in the set."""
        return np.asarray(self.level >= 0)


class ProgressSearch:
    """The search for the best set of one round.

    Attributes:
        overhead_s: seconds of a round in addition to its training.
    """

    def __init__(
        self, context: PlanningContext, worth: Values, places: int, half_devices: float, overhead_s: float
    ) -> None:
        """Search for one round.

        Args:
            context: the round.
            worth: `[n]` weight of each device, 1 on average.
            places: maximum number of devices.
            half_devices: number of devices of a large fleet for half the progress, for epochs that state none of their
                own.
            overhead_s: seconds of a round in addition to its training.
        """
        options = context.choice.options
        self.overhead_s = overhead_s
        self._worth = worth
        self._is_small_fleet = len(worth) <= _SMALL_FLEET
        self._limits = _LIMITS_SMALL_FLEET if self._is_small_fleet else _LIMITS
        self._places = places
        self._headroom = context.headroom
        # Devices that are busy or away hold data, too, though they are no candidates now.
        everybody = {offer.device_id for offer in context.offers} | context.history.last_selected.keys()
        self._all, self._all_others = len(everybody), max(len(everybody) - 1, 1)
        self._is_per_device = context.choice.is_per_device
        self._progress = np.array([option.progress for option in options])
        self._half = [half_devices if each.half_devices is None else each.half_devices for each in options]
        self._fronts = context.fronts
        self._epochs = np.array([option.epochs for option in options])
        # The context keeps the curves of the first option, which has the fewest epochs.
        self._curves = [context.curves, *(context.fronts.curves(option.epochs) for option in options[1:])]

    def best(self) -> ScoredSet | None:
        """The best set that was found; None if the supplies can power no device."""
        kinds = [self._with_equal_epochs(level) for level in range(len(self._curves))]
        found = list(itertools.chain.from_iterable(kinds))
        if self._is_per_device and found:
            equal = max(found, key=_progress_per_s)
            kinds += [list(self._with_own_epochs(top, equal)) for top in range(1, len(kinds))]
            found = list(itertools.chain.from_iterable(kinds))
        if self._is_small_fleet:
            found += list(self._improved(found))
        elif len(kinds) > 1:
            # The plan can shorten the durations that were tried, for some numbers of epochs more than for others.
            best_of_each = [max(kind, key=_progress_per_s) for kind in kinds if kind]
            found = [self._fastest_set(one.level) for one in best_of_each if one.chosen.any()]
        best = max(found, key=_progress_per_s, default=None)
        return best if best is not None and best.chosen.any() else None

    def _scored(self, level: Indices, limit_s: float, times_s: Values) -> ScoredSet:
        return ScoredSet(self._rate(level, times_s), limit_s, level)

    def _rate(self, level: Indices, times_s: Values) -> float:
        """Progress per second of a set.

        Args:
            level: `[n]` as in `ScoredSet`.
            times_s: `[o, n]` seconds of each device's training for each option of epochs.
        """
        chosen = np.flatnonzero(level >= 0)
        if not len(chosen):
            return 0.0
        return self.progress(level) / (float(times_s[level[chosen], chosen].max()) + self.overhead_s)

    def progress(self, level: Indices) -> float:
        """Progress of a round with a set of one or more devices.

        Args:
            level: `[n]` as in `ScoredSet`.
        """
        chosen = np.flatnonzero(level >= 0)
        worth, own = self._worth[chosen], level[chosen]
        weight = float(worth.sum())
        mean = float((worth * self._progress[own]).sum()) / weight
        devices = min(weight, len(chosen))  # a set counts for no more devices than it has
        left_out = (self._all - devices) / self._all_others
        return mean * devices / (devices + self._half[int(own.max())] * left_out)

    def _within(self, limit_s: float, levels: Sequence[int]) -> tuple[Values, Values]:
        """The least power with which each device trains some options of epochs within a duration.

        Returns:
            `[o, n]` watts above idle, infinite if a device cannot finish in time, and `[o, n]` seconds.
        """
        extra_w = np.full((len(self._curves), len(self._worth)), np.inf)
        times_s = np.full_like(extra_w, np.inf)
        for level in levels:
            curves = self._curves[level]
            steps = curves.steps_within(limit_s)
            extra_w[level], times_s[level] = curves.extra_at(steps), curves.time_s[np.maximum(steps, 0)]
        return extra_w, times_s

    # --- the same epochs for all ----------------------------------------------------------------------------------

    def _with_equal_epochs(self, level: int) -> list[ScoredSet]:
        """Sets whose devices all train the same number of epochs."""
        times_s = self._curves[level].time_s
        if not len(times_s):
            return []
        first_s, last_s = float(times_s.min()) * (1 + 1e-9), float(times_s.max())
        found = [
            one
            for limit_s in np.geomspace(first_s, last_s, self._limits)
            for one in self._sets_of_equal_epochs(level, limit_s)
        ]
        at_s = max(found, key=_progress_per_s).limit_s
        step = (last_s / first_s) ** (1 / (self._limits - 1))
        around_s = np.geomspace(max(at_s / step, first_s), min(at_s * step, last_s), _FINER_LIMITS)
        return found + [one for limit_s in around_s for one in self._sets_of_equal_epochs(level, limit_s)]

    def _sets_of_equal_epochs(self, level: int, limit_s: float) -> Iterator[ScoredSet]:
        """Candidate sets for one duration. One of them, usually the first, is close to the best.

        The first set is chosen greedily by worth per watt. This can give small devices the power or the places of a
        device that is worth more, so alternatives are tried, too.
        """
        watts, times_s = self._within(limit_s, [level])
        extra_w = watts[level]
        carried = greedy_by_utility_per_watt(extra_w, self._worth, self._headroom).chosen
        sets = [
            self._with_most_worth(carried, self._places),
            self._with_most_worth(extra_w <= self._headroom.single_device_w, 1),
        ]
        if np.count_nonzero(carried) > self._places:
            by_worth = greedy_by_utility(extra_w, self._worth, self._headroom)
            sets.append(self._with_most_worth(by_worth, self._places))
        for chosen in sets:
            yield self._scored(np.where(chosen, level, -1), float(limit_s), times_s)

    def _with_most_worth(self, devices: Mask, places: int) -> Mask:
        """The devices with the most worth among some, up to the number of places."""
        if np.count_nonzero(devices) <= places:
            return devices
        able = np.flatnonzero(devices)
        kept = np.zeros_like(devices)
        kept[able[np.argsort(-self._worth[able], kind="stable")[:places]]] = True
        return kept

    # --- different epochs for each device -------------------------------------------------------------------------

    def _with_own_epochs(self, top: int, equal: ScoredSet) -> Iterator[ScoredSet]:
        """Sets in which devices train up to the number of epochs `top`, and slow devices fewer.

        For a fixed duration and `a = h / (n - 1)`, the objective is the ratio of `sum(w * f)` and
        `sum(w) * (1 - a) + a * n`, so the best set maximizes `sum(w * (f - ratio * (1 - a)))` (Dinkelbach,
        doi:10.1287/mnsc.13.7.492). Each device chooses its epochs at a price per watt, and the supplies power the
        devices with the largest terms of this sum per watt.

        Args:
            top: index of the largest number of epochs.
            equal: the best set with equal epochs.
        """
        shortest_s = float(self._curves[0].time_s.min()) * (1 + 1e-9)
        longest_s = float(self._curves[top].time_s.max())
        tried_s = max(equal.limit_s / _OWN_RANGE, shortest_s), min(equal.limit_s * _OWN_RANGE, longest_s), _OWN_LIMITS
        if self._is_small_fleet:
            tried_s = shortest_s, longest_s, self._limits
        by_device = 1 - self._half[top] / self._all_others
        for limit_s in map(float, np.geomspace(*tried_s)):
            extra_w, times_s = self._within(limit_s, range(top + 1))
            ratio = equal.progress_per_s * (limit_s + self.overhead_s)  # a better set exceeds this ratio
            gain = self._worth * np.maximum(self._progress[:, None] - ratio * by_device, 0.0)
            can = np.isfinite(extra_w) & (gain > 0)
            if not can.any():
                continue
            per_watt = float(np.median(gain[can] / np.maximum(extra_w[can], 1e-9)))
            for price in _PRICES:
                profit = np.where(can, gain - price * per_watt * np.where(can, extra_w, 0.0), -np.inf)
                level = profit.argmax(axis=0)
                own = level, np.arange(len(level))
                taken = np.where(can[own], gain[own], 0.0)
                carried = greedy_by_utility_per_watt(extra_w[own], taken, self._headroom).chosen
                chosen = self._with_most_worth(carried, self._places)
                yield self._scored(np.where(chosen, level, -1), limit_s, times_s)

    # --- small fleets ---------------------------------------------------------------------------------------------

    def _improved(self, found: Sequence[ScoredSet]) -> Iterator[ScoredSet]:
        """The most promising sets, improved one device at a time."""
        promising: dict[tuple[int, int], ScoredSet] = {}  # the best set of each group of similar durations
        for one in sorted(found, key=_progress_per_s, reverse=True):
            if one.chosen.any() and len(promising) < _IMPROVED_SETS:
                promising.setdefault((int(one.level.max()), round(math.log(one.limit_s) / _ALIKE_LOG_S)), one)
        for one in promising.values():
            top = int(one.level.max())
            extra_w, times_s = self._within(one.limit_s, range(top + 1) if self._is_per_device else [top])
            # The duration is fixed during the improvement. Otherwise only steps that remove the slowest device would
            # help.
            rate = partial(self._rate, times_s=np.full_like(times_s, one.limit_s))
            level = improved(one.level, extra_w, self._headroom, self._places, rate)
            yield self._fastest_set(level)

    # --- given sets -----------------------------------------------------------------------------------------------

    def with_due(self, best: ScoredSet, due: Mask) -> ScoredSet:
        """The best of the sets that consist of devices that are due and of none, some or all of the best ones.

        Devices that are due may need so many of the watts that the best ones would train in much slower modes.

        Args:
            best: the best set.
            due: `[n]` the devices that are due, none of which is among the best ones.
        """
        level = self.level_to_join(best)
        others = np.flatnonzero(best.chosen)
        others = others[np.argsort(-self._worth[others], kind="stable")]
        sizes = {0, len(others)} | {2**k for k in range(len(others).bit_length())}
        found = []
        for size in sorted(sizes):
            wanted = due.copy()
            wanted[others[:size]] = True
            found.append(self._fastest_set(np.where(wanted, level, -1), due))
        return max(found, key=_progress_per_s)

    def level_to_join(self, found: ScoredSet) -> Indices:
        """`[n]` as in `ScoredSet`, with the epochs that a device outside of the set would train if it joined it."""
        return np.where(found.chosen, found.level, 0 if self._is_per_device else int(found.level.max()))

    def _fastest_set(self, level: Indices, priority: Mask | None = None) -> ScoredSet:
        """The set with the shortest duration that the supplies and places allow for some devices and their epochs.

        It is empty if the supplies can power none of them.

        Args:
            level: `[n]` as in `ScoredSet`.
            priority: `[n]` the devices to keep if not all can train; None for none.
        """
        curves = self._fronts.curves(self._epochs[np.maximum(level, 0)])
        wanted = np.asarray(level >= 0)
        count = min(self._places, int(wanted.sum()))
        kept_first = np.zeros_like(wanted) if priority is None else priority
        allocation = min_makespan(curves, self._headroom, count, wanted, kept_first)
        if allocation is None:
            return ScoredSet(0.0, math.inf, np.full_like(level, -1))
        level, limit_s = np.where(allocation.step >= 0, level, -1), allocation.limit_s
        return self._scored(level, limit_s, np.full((len(self._curves), len(level)), limit_s))


def _progress_per_s(found: ScoredSet) -> float:
    return found.progress_per_s


# --- Scarce energy ----------------------------------------------------------------------------------------------------
# Searches the devices, their local epochs and the duration of a round for which joules bring the most progress.
#
# If the number of rounds is known, a round may spend an even share of what is left. It gets the set with the most
# progress within this share; of sets with about as much progress, the one with the shortest round. If the number is
# unknown, it gets the set with the most progress per joule. The joules are then those of the trainings and of all
# candidates' idle power during the round. Without the idle power, few devices in a long round would always be best.

_AS_MUCH_PROGRESS = 0.98
"""Of sets with at least this share of the most progress within a round's energy, the one with the shortest round is
taken."""


@dataclass(frozen=True)
class _FrugalSet:
    """A set of devices that train within some seconds, with its value by what the round is planned for."""

    value: float
    limit_s: float
    level: Indices


class FrugalSearch:
    """The search for the best set of a round whose energy is scarce."""

    def __init__(
        self, context: PlanningContext, energy: EnergyLimit, worth: Values, places: int, search: ProgressSearch
    ) -> None:
        """Search for one round.

        Args:
            context: the round.
            energy: what is left.
            worth: `[n]` weight of each device, 1 on average.
            places: maximum number of devices.
            search: states the progress of sets.
        """
        self._context, self._energy, self._worth, self._places, self._search = context, energy, worth, places, search
        options = context.choice.options
        self._curves = [context.fronts.curves(option.epochs) for option in options]
        self._costs = [TrainingCosts.of(context.offers, context.fronts, option.epochs) for option in options]
        self._idle_w = float(context.fronts.idle_w.sum())

    def best(self) -> _FrugalSet | None:
        """The best set that was found; None if the energy or the watts do not suffice for any device."""
        found = [one for level in range(len(self._curves)) for one in self._within_all_times(level)]
        if len(self._worth) <= _SMALL_FLEET:
            found += [self._improved(one) for one in sorted(found, key=_value, reverse=True)[:_IMPROVED_SETS]]
        if not found:
            return None
        most = max(found, key=_value)
        if not self._energy.rounds_left:
            return most
        alike = [one for one in found if one.value >= _AS_MUCH_PROGRESS * most.value]
        return min(alike, key=lambda one: (one.limit_s, -one.value))

    def _within_all_times(self, level: int) -> Iterator[_FrugalSet]:
        """The best sets whose devices all train the same number of epochs, for durations over the whole range."""
        curves = self._curves[level]
        if not len(curves.time_s):
            return
        first_s, last_s = float(curves.time_s.min()) * (1 + 1e-9), float(curves.time_s.max())
        tries = _LIMITS_SMALL_FLEET if len(self._worth) <= _SMALL_FLEET else _LIMITS
        for limit_s in map(float, np.geomspace(first_s, last_s, tries)):
            slowest = curves.steps_within(limit_s)
            frugal = np.minimum(slowest, self._costs[level].least)
            # Few watts may allow more devices in modes that take more energy.
            for step in [frugal] if (frugal == slowest).all() else [frugal, slowest]:
                if (chosen := self._chosen(level, limit_s, step)) is not None:
                    yield _FrugalSet(self._value(chosen, limit_s), limit_s, chosen)

    def _chosen(self, level: int, limit_s: float, step: Indices) -> Indices | None:
        """`[n]` a set by worth per watt and then by worth per joule, as in `ScoredSet`; None if it is empty.

        Args:
            level: index of the local epochs.
            limit_s: seconds of the round's training.
            step: `[n]` step of each device that trains.
        """
        curves, headroom = self._curves[level], self._context.headroom
        extra_w = curves.extra_at(step)
        carried = np.flatnonzero(greedy_by_utility_per_watt(extra_w, self._worth, headroom).chosen)
        if not len(carried):
            return None
        expected_j, set_aside_j = self._joules(level, step[carried])
        order = np.argsort(-self._worth[carried] / np.maximum(expected_j, 1e-9), kind="stable")
        spent_j, aside_j = np.cumsum(expected_j[order]), np.cumsum(set_aside_j[order])
        fits = (spent_j <= self._energy.share_j) & (aside_j <= self._energy.left_j)
        count = min(int(np.count_nonzero(fits)), self._places)
        if not count:
            return None
        found = np.full(len(curves), -1, dtype=np.intp)
        if not self._energy.rounds_left:  # further devices may bring less than they take
            sizes = sorted({1, count} | {int(size) for size in np.geomspace(1, count, _FINER_LIMITS)})
            count = max(sizes, key=lambda size: self._value(_marked(found, carried[order[:size]], level), limit_s))
        return _marked(found, carried[order[:count]], level)

    def _joules(self, level: int, step: Indices) -> tuple[Values, Values]:
        return self._costs[level].expected_j[step], self._costs[level].set_aside_j[step]

    def _value(self, level: Indices, limit_s: float) -> float:
        """The progress of a set, or its progress per joule if the number of rounds is unknown; 0 if it takes too much.

        Args:
            level: `[n]` as in `ScoredSet`.
            limit_s: seconds of training within which all devices finish.
        """
        chosen = np.flatnonzero(level >= 0)
        if not len(chosen) or len(chosen) > self._places:
            return 0.0
        option = int(level[chosen].max())
        curves, costs = self._curves[option], self._costs[option]
        slowest = curves.steps_within(limit_s)
        if (slowest < curves.start[:-1])[chosen].any():
            return 0.0
        round_ = Allocation(limit_s, np.where(level >= 0, slowest, -1))
        step = without_waste(round_, curves, costs, self._context.headroom).step[chosen]
        if not self._energy.allows(costs, step):
            return 0.0
        progress = self._search.progress(level)
        if self._energy.rounds_left:
            return progress
        expected_j, _ = self._joules(option, step)
        return progress / (float(expected_j.sum()) + self._idle_w * (limit_s + self._search.overhead_s))

    def _improved(self, one: _FrugalSet) -> _FrugalSet:
        """A set that was improved one device at a time, for the same duration and epochs."""
        option = int(one.level.max())
        curves = self._curves[option]
        extra_w = np.full((option + 1, len(curves)), np.inf)
        extra_w[option] = curves.extra_at(curves.steps_within(one.limit_s))
        level = improved(
            one.level, extra_w, self._context.headroom, self._places, lambda level: self._value(level, one.limit_s)
        )
        return _FrugalSet(self._value(level, one.limit_s), one.limit_s, level)


def _marked(nobody: Indices, devices: Indices, level: int) -> Indices:
    """`[n]` a set of some devices, as in `ScoredSet`."""
    found = nobody.copy()
    found[devices] = level
    return found


def _value(found: _FrugalSet) -> float:
    return found.value


# --- Progress ---------------------------------------------------------------------------------------------------------

_BEST, _OTHERS = "in the set with the most progress per second", "other devices make more progress per second"
_DUE = "it has not trained in this run yet, and each device trains within its first rounds"
_FILLED = "it finishes within the round with the watts that the others leave"
_FRUGAL = "in the set with the most progress for the energy of this round"
_OTHERS_FRUGAL = "other devices make more progress for the energy of this round"

_SPARE_ROUNDS = 2
"""Rounds in which each device is selected once, beyond those that are enough if every round selects others."""

_MAX_RELATIVE_SAMPLES = 100.0
"""Cap on the samples that count for a device, in multiples of the fleet's median."""


@dataclass(frozen=True)
class Progress:
    """Selects the set of devices that gives the run the most progress per second.

    Federated averaging over `k` of a run's `n` heterogeneous devices, drawn without replacement, needs a number of
    rounds in proportion to `1 + h / k * (n - k) / (n - 1)` (Li et al., arXiv 1907.02189, theorem 3). A round makes the
    inverse of this of the progress of a round with all devices. Its duration is that of its training plus an overhead.
    Progress over duration has a maximum at some `k` and some duration, which depend on the budgets (Luo et al., arXiv
    2012.08336, choose `k` from the same bound). Where the plan may choose the local epochs, it is multiplied by their
    progress (see `ProgressSearch`).

    In `k`, a device is weighted by its samples times the number of rounds since it last took part, relative to the
    mean. So it is not always the small and fast devices that train. A set never counts for more devices than it
    has, so a device that was absent for very long, such as one that joins a long run, does not train alone either.

    A device whose time is uncertain is tried with optimism (UCB: Auer et al. 2002, doi:10.1023/A:1013689704352): its
    weight is multiplied by the upper end of its speed, one standard deviation above the median. And no device starves:
    each one that its supplies can power is selected within the first `ceil(n / k) + 2` rounds, where `k` of `n` devices
    train in a round. Watts that are left then go to further devices that finish within the round anyway.

    Attributes:
        count: maximum number of devices in a round; None for as many as are useful.
        half_devices: number of devices `h` of a much larger fleet with which a round makes half the progress of a round
            with all devices. The more similar the devices' data, the smaller it is.
        overhead_s: seconds of a round in addition to its training.
    """

    count: int | None = None
    half_devices: float = 3.0
    overhead_s: float = 10.0
    name: str = "progress"

    def __post_init__(self) -> None:
        require_count(self.count)
        if not (math.isfinite(self.half_devices) and self.half_devices > 0):
            raise InvalidInputError(
                f"the number of devices for half the progress must be above 0, not {self.half_devices}"
            )
        if not 0 <= self.overhead_s < math.inf:
            raise InvalidInputError(f"the overhead of a round must be 0 s or more, not {self.overhead_s}")

    @property
    def has_count(self) -> bool:
        """Only if a number is given. Otherwise the policy selects as many devices as are useful."""
        return self.count is not None

    def request(self, context: PlanningContext) -> SelectionRequest:
        """Request the set, and its local epochs, with the most progress per second among those that are tried.

        If a run has an energy budget and this set takes more than the round's share, or if the number of its rounds is
        unknown, the set with the most progress for its energy is requested instead.
        """
        worth = device_worth(context.offers, context.server_round, context.history)
        places = len(worth) if self.count is None else context.places(self.count, len(worth))
        search = ProgressSearch(context, worth, places, self.half_devices, self.overhead_s)
        energy = context.energy
        if energy is None:
            return self._with_most_per_second(context, worth, places, search)
        if energy.rounds_left:
            request = self._with_most_per_second(context, worth, places, search)
            if _is_affordable(context, request, energy):
                return request
        found = FrugalSearch(context, energy, worth, places, search).best()
        if found is None:
            return any_devices(context, 1)  # planning then takes the device with the least energy, or fails
        chosen = found.level >= 0
        request = replace(only_devices(chosen, _FRUGAL, _OTHERS_FRUGAL), within_s=found.limit_s)
        if len(context.choice.options) == 1:
            return request
        epochs = context.choice.options[int(found.level.max())].epochs
        return replace(request, epochs=np.full(len(worth), epochs))

    def _with_most_per_second(
        self, context: PlanningContext, worth: Values, places: int, search: ProgressSearch
    ) -> SelectionRequest:
        """Request the set with the most progress per second.

        Args:
            context: the round.
            worth: `[n]` weight of each device.
            places: maximum number of devices.
            search: the search for this set.
        """
        found = search.best()
        if found is None:
            return any_devices(context, 1)  # planning then fails with an error that states the missing watts
        due = _due(context, found.chosen)
        if due.any():
            found = search.with_due(found, due)
        best = found.chosen & ~due
        epochs = np.array([option.epochs for option in context.choice.options])[search.level_to_join(found)]
        chosen = _filled(context, context.fronts.curves(epochs), best | due, due, worth, places)
        reasons = {int(k): _BEST if best[k] else _DUE if due[k] else _FILLED for k in np.flatnonzero(chosen)}
        request = replace(only_devices(chosen, reasons, _OTHERS), priority=due & chosen)
        return request if len(context.choice.options) == 1 else replace(request, epochs=epochs)


def _is_affordable(context: PlanningContext, request: SelectionRequest, energy: EnergyLimit) -> bool:
    """Whether the round of a request takes no more than its share of the energy."""
    epochs = context.choice.fewest if request.epochs is None else request.epochs
    curves = context.fronts.curves(epochs)
    allocation = min_makespan(curves, context.headroom, request.count, request.eligible, request.priority)
    if allocation is None:
        return False
    costs = TrainingCosts.of(context.offers, context.fronts, epochs)
    step = without_waste(allocation, curves, costs, context.headroom).step
    return energy.allows(costs, step[step >= 0])


def _due(context: PlanningContext, best: Mask) -> Mask:
    """`[n]` the devices to select beyond the best set, so that each device trains within the first rounds.

    Args:
        context: the round.
        best: `[n]` the best set.
    """
    last_selected = context.history.last_selected
    waiting = np.array([offer.device_id not in last_selected for offer in context.offers], dtype=np.bool_)
    waiting &= np.isfinite(context.curves.fastest_s)
    rounds = math.ceil(len(best) / int(best.sum())) + _SPARE_ROUNDS
    missing = math.ceil(int(waiting.sum()) / max(1, rounds - context.server_round + 1)) - int((waiting & best).sum())
    due = np.zeros_like(best)
    others = np.flatnonzero(waiting & ~best)
    # Those that need the fewest watts: more of them train in the same round.
    due[others[np.argsort(context.curves.min_extra_w[others], kind="stable")][: max(0, missing)]] = True
    return due


def _filled(context: PlanningContext, curves: Curves, wanted: Mask, due: Mask, worth: Values, places: int) -> Mask:
    """`[n]` the devices of a set that the supplies can power, and others that finish within its time with what is left.

    Args:
        context: the round.
        curves: power curves of all devices.
        wanted: `[n]` the set.
        due: `[n]` the devices of the set that have priority.
        worth: `[n]` weight of each device.
        places: maximum number of devices.
    """
    headroom = context.headroom
    count = min(places, int(wanted.sum()))
    allocation = min_makespan(curves, headroom, count, wanted, due)
    assert allocation is not None, "the supplies can power the best set"
    chosen = allocation.step >= 0
    extra_w = curves.extra_at(curves.steps_within(allocation.limit_s))
    left_w = headroom.spare_w - headroom.drawn_w(extra_w, np.flatnonzero(chosen))
    if context.choice.is_per_device:
        return np.asarray(chosen)  # a device with fewer epochs than the others may lower the progress of the round
    others = np.flatnonzero(~chosen & np.isfinite(extra_w))
    for k in others[np.argsort(-worth[others], kind="stable")]:
        path = headroom.supply_at[:, k]
        path = path[path >= 0]
        if chosen.sum() < places and (extra_w[k] <= left_w[path]).all():
            chosen[k] = True
            left_w[path] -= extra_w[k]
    return np.asarray(chosen)


def device_worth(offers: Sequence[Offer], server_round: int, history: History) -> Values:
    """`[n]` weight of each device, 1 on average.

    It grows with the samples, with the rounds since the device was last selected, and with the uncertainty of its time.

    Args:
        offers: the devices.
        server_round: number of the round that is planned.
        history: earlier rounds of the run.
    """
    latest = [history.latest.get(offer.device_id) for offer in offers]
    # Failed rounds count too. Otherwise the weight of a device that always fails would grow.
    last_selected = [history.last_selected.get(offer.device_id, 0) for offer in offers]
    rounds = np.maximum(server_round - np.array(last_selected, dtype=float), 1.0)
    samples = np.array([np.nan if each is None else each[1].num_examples or np.nan for each in latest], dtype=float)
    known = np.isfinite(samples)
    if known.any():  # otherwise a device could report so many samples that the others have no weight
        samples = np.minimum(samples, _MAX_RELATIVE_SAMPLES * np.median(samples[known]))
    samples = np.where(known, samples, samples[known].mean() if known.any() else 1.0)
    speed = np.exp([float(offer.front.epoch_log_sd[0]) for offer in offers])
    worth = rounds * samples * speed
    return np.asarray(worth / worth.mean(), dtype=np.float64)
