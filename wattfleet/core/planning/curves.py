"""Power curves: the least power above idle that each device needs to finish within a time, and what they allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.choosing import MAX_POWER_W, POWER_QUANTILE, Front
from wattfleet.core.errors import ImplausibleError, InvalidInputError
from wattfleet.core.prediction import normal_quantile

# --- Offers -----------------------------------------------------------------------------------------------------------
# Offers: the devices that are ready for a round, with their fronts and limits.


SITE = "site"
"""Name of the supply in a fleet that has only one."""


@dataclass(frozen=True)
class Offer:
    """One device that is ready for a round.

    Attributes:
        device_id: the device.
        front: its predicted front.
        idle_w: watts that it draws while idle.
        supply: the supply that feeds it.
        limit_w: the device's own power limit, W; None if only its supplies limit it.
        tags: tags that the operator can select it by.
        batch: samples in a batch that the front holds for; None if they are unknown.
        profiled_modes: number of modes that the device has measured with the workload; 0 if the front is a prior.
        is_length_assumed: whether the number of minibatches in the device's epoch is unknown, and the front uses an
            assumed number.
    """

    device_id: str
    front: Front
    idle_w: float
    supply: str = SITE
    limit_w: float | None = None
    tags: frozenset[str] = frozenset()
    batch: int | None = None
    profiled_modes: int = 0
    is_length_assumed: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.idle_w) and self.idle_w >= 0):
            raise InvalidInputError(f"{self.device_id}: idle watts must be finite and 0 or more, not {self.idle_w}")
        if self.idle_w > MAX_POWER_W:
            raise ImplausibleError(
                f"{self.device_id}: idle watts must not be more than {MAX_POWER_W:,.0f} W, not {self.idle_w:g} W"
            )
        if self.limit_w is not None and not (math.isfinite(self.limit_w) and self.limit_w > 0):
            raise InvalidInputError(f"{self.device_id}: a device's limit must be above 0 W, not {self.limit_w}")


# --- Headroom ---------------------------------------------------------------------------------------------------------
# Headroom: the power that every supply has left while all of its devices idle.


@dataclass(frozen=True)
class Headroom:
    """The spare power of nested supplies, and which supplies feed each of `n` devices.

    Attributes:
        spare_w: `[s]` budget minus idle power of each supply, W. Negative if idling alone exceeds the budget.
        supply_at: `[levels, n]` index of the supply that feeds each device at each level, sites first; -1 below the
            device's own supply.
    """

    spare_w: Values
    supply_at: Indices

    def of(self, devices: Mask) -> Headroom:
        """The headroom for a subset of the devices, while the others idle."""
        return Headroom(self.spare_w, self.supply_at[:, devices])

    def largest_set(self, extra_w: Values, priority: Mask | None = None, stable: bool = True) -> Indices:
        """The largest set of devices that can train together.

        Taking the devices with the least power is optimal at every level: if a circuit can supply any `k` devices, it
        can supply the `k` that need the least. The same holds for a site and what its circuits can supply.

        Args:
            extra_w: `[n]` watts above idle, not negative; infinite for devices that must not be taken.
            priority: `[n]` devices that are taken before all others.
            stable: whether to take the first of several devices with the same power, so that the result is the same
                on every machine. False is faster and gives the same number of devices.

        Returns:
            `[k]` the devices, priority devices first, each group by ascending power.
        """
        order = np.argsort(extra_w, kind="stable" if stable else "quicksort")
        order = order[np.isfinite(extra_w[order])]
        if priority is None:
            return self._fitting(extra_w, order, self.spare_w)
        before = self._fitting(extra_w, order[priority[order]], self.spare_w)
        left_w = self.spare_w - self.drawn_w(extra_w, before)
        return np.concatenate((before, self._fitting(extra_w, order[~priority[order]], left_w)))

    def _fitting(self, extra_w: Values, order: Indices, spare_w: Values) -> Indices:
        """The devices that fit, if they are taken by ascending power."""
        for level in self.supply_at[::-1]:
            supply = level[order]
            over = (supply >= 0) & (running_sums(extra_w[order], supply) > spare_w[supply])
            order = order[~over]
        return order

    def drawn_w(self, extra_w: Values, devices: Indices) -> Values:
        """`[s]` watts above idle that some devices draw from each supply."""
        drawn_w = np.zeros(len(self.spare_w))
        for level in self.supply_at:
            held = devices[level[devices] >= 0]
            np.add.at(drawn_w, level[held], extra_w[held])
        return drawn_w

    def can_supply(self, extra_w: Values, chosen: Mask) -> bool:
        """Whether the supplies can power these devices together."""
        drawn_w = self.drawn_w(extra_w, np.flatnonzero(chosen))
        return bool(self.idle_covered[chosen].all() and (drawn_w <= np.maximum(self.spare_w, 0.0)).all())

    @property
    def single_device_w(self) -> Values:
        """`[n]` watts above idle that each device can draw while all others idle."""
        return np.asarray(np.where(self.supply_at >= 0, self.spare_w[self.supply_at], np.inf).min(axis=0))

    @property
    def idle_covered(self) -> Mask:
        """`[n]` whether all supplies of a device cover at least the idle power of their devices."""
        return np.asarray(self.single_device_w >= 0)


def running_sums(values: Values, group: Indices) -> Values:
    """Cumulative sums of the values within each group."""
    if len(group) == 0 or (group == group[0]).all():
        return np.asarray(np.cumsum(values))
    # A stable sort of small integers takes linear time.
    by_group = np.argsort(group.astype(np.int16 if group.max() < 2**15 else np.int64), kind="stable")
    sums = np.cumsum(values[by_group])
    begins = np.flatnonzero(np.diff(group[by_group], prepend=-2))
    before = np.concatenate(([0.0], sums))[begins]
    sums -= np.repeat(before, np.diff(np.append(begins, len(values))))
    found = np.empty_like(sums)
    found[by_group] = sums
    return found


# --- Least whole ------------------------------------------------------------------------------------------------------
# Rounding up numbers of devices.


def least_whole(value: float) -> int:
    """Round up to a whole number, ignoring the rounding errors of binary fractions.

    20 % more than 5 is 6, and 70 % of 10 is 7, although the computed products may be slightly larger.
    """
    return math.ceil(round(value, 9))


# --- Curves -----------------------------------------------------------------------------------------------------------
# Power curves: the least power above idle that each device needs to finish within a given time.
#
# The whole fleet is held in flat arrays, since planning a round evaluates every curve about twenty times.

TIME_QUANTILE = 0.9
"""Quantile of a device's predicted time that plans use: it takes longer with a probability of 10 %."""

Values = NDArray[np.float64]
Indices = NDArray[np.intp]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Curves:
    """A decreasing step function of power over time for each of `n` devices, with `m` steps in total.

    Attributes:
        start: `[n + 1]` index of each device's first step. A device has no steps if its own limit allows no mode.
        time_s: `[m]` seconds of the whole training: warm-up, plus the epochs at `TIME_QUANTILE`. Non-decreasing over
            the steps of a device.
        extra_w: `[m]` watts above idle needed to finish by then, at `POWER_QUANTILE`. Non-increasing.
        point: `[m]` index of the point on the device's front.
        idle_w: `[n]` watts of each device while idle.
    """

    start: Indices
    time_s: Values
    extra_w: Values
    point: Indices
    idle_w: Values

    def __len__(self) -> int:
        return len(self.idle_w)

    @property
    def fastest_s(self) -> Values:
        """`[n]` seconds of the training in each device's fastest mode; infinite if it has no mode."""
        return self._at_step(self.start[:-1], self.time_s)

    @property
    def min_extra_w(self) -> Values:
        """`[n]` watts above idle in each device's lowest-power mode; infinite if it has no mode."""
        return self._at_step(self.start[1:] - 1, self.extra_w)

    def _at_step(self, step: Indices, values: Values) -> Values:
        found = np.full(len(self), np.inf)
        some = np.diff(self.start) > 0
        found[some] = values[step[some]]
        return found

    def steps_within(self, limit_s: float, low: Indices | None = None, high: Indices | None = None) -> Indices:
        """`[n]` each device's lowest-power step that finishes within a time; `start - 1` if none does.

        Args:
            limit_s: seconds of the training.
            low: `[n]` lower bound of the result: steps known to finish in time.
            high: `[n]` upper bound of the result.
        """
        found = (self.start[:-1] - 1 if low is None else low).copy()
        last = (self.start[1:] - 1 if high is None else high).copy()
        open_ = np.flatnonzero(found < last)
        while len(open_):
            middle = (found[open_] + last[open_] + 1) >> 1
            done = self.time_s[middle] <= limit_s
            found[open_[done]] = middle[done]
            last[open_[~done]] = middle[~done] - 1
            open_ = open_[found[open_] < last[open_]]
        return found

    def extra_at(self, step: Indices) -> Values:
        """`[n]` watts above idle at each device's step; infinite if the step is `start - 1`."""
        found = np.full(len(self), np.inf)
        some = step >= self.start[:-1]
        found[some] = self.extra_w[step[some]]
        return found


@dataclass(frozen=True)
class FrontTable:
    """The fronts of `n` devices in flat arrays, with `p` points in total, at the planning quantiles.

    Attributes:
        sizes: `[n]` points of each device.
        epoch_s: `[p]` seconds of an epoch at `TIME_QUANTILE`.
        warmup_s: `[p]` seconds of the warm-up.
        extra_w: `[p]` watts above idle at `POWER_QUANTILE`.
        is_allowed: `[p]` whether the point is within its device's own limit.
        idle_w: `[n]` watts of each device while idle.
    """

    sizes: Indices
    epoch_s: Values
    warmup_s: Values
    extra_w: Values
    is_allowed: Mask
    idle_w: Values

    @classmethod
    def of(cls, offers: Sequence[Offer]) -> FrontTable:
        """The fronts of some devices, one or more.

        A device that finishes early idles until the round ends. So every mode is given at least the idle power.
        """
        fronts = [offer.front for offer in offers]
        sizes = np.array([len(front) for front in fronts], dtype=np.intp)
        epoch_s = np.concatenate([front.epoch_s for front in fronts])
        epoch_s *= np.exp(normal_quantile(TIME_QUANTILE) * np.concatenate([front.epoch_log_sd for front in fronts]))
        planned_w = np.concatenate([front.power_w for front in fronts])
        planned_w *= np.exp(normal_quantile(POWER_QUANTILE) * np.concatenate([front.power_log_sd for front in fronts]))
        idle_w = np.array([offer.idle_w for offer in offers])
        limit_w = np.array([np.inf if offer.limit_w is None else offer.limit_w for offer in offers])
        return cls(
            sizes=sizes,
            epoch_s=epoch_s,
            warmup_s=np.concatenate([front.warmup_s for front in fronts]),
            extra_w=np.maximum(planned_w - np.repeat(idle_w, sizes), 0.0),
            is_allowed=(planned_w <= np.repeat(limit_w, sizes)) & np.repeat(idle_w <= limit_w, sizes),
            idle_w=idle_w,
        )

    def curves(self, epochs: float | Values) -> Curves:
        """The power curves of a training. `epochs` is the number of local epochs, the same for all devices or `[n]`.

        The fewer epochs, the more the warm-up matters.
        """
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        point = np.arange(len(owner)) - np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
        time_s = np.repeat(np.broadcast_to(epochs, len(self.sizes)), self.sizes) * self.epoch_s + self.warmup_s
        # At the quantile, or with many epochs, a point can take longer than a following point with less power. The
        # following point then replaces it.
        time_s = _min_of_rest(time_s, self.sizes)
        steps = np.bincount(owner[self.is_allowed], minlength=len(self.sizes))
        return Curves(
            start=np.concatenate(([0], np.cumsum(steps))),
            time_s=time_s[self.is_allowed],
            extra_w=self.extra_w[self.is_allowed],
            point=point[self.is_allowed],
            idle_w=self.idle_w,
        )


def curves_of(offers: Sequence[Offer], epochs: float | Values) -> Curves:
    """The power curves of some devices, each within its own limit.

    Args:
        offers: the devices, one or more.
        epochs: number of local epochs, the same for all or `[n]`.
    """
    return FrontTable.of(offers).curves(epochs)


def min_power_w(offers: Sequence[Offer]) -> Values:
    """`[n]` watts allocated to each device in its lowest-power mode, regardless of its own limit."""
    power_w = np.array([offer.front.power_w[-1] for offer in offers])
    log_sd = np.array([offer.front.power_log_sd[-1] for offer in offers])
    planned_w = power_w * np.exp(normal_quantile(POWER_QUANTILE) * log_sd)
    return np.asarray(np.maximum(planned_w, [offer.idle_w for offer in offers]))


def _min_of_rest(values: Values, sizes: Indices) -> Values:
    """For each value, the minimum of it and the device's values after it."""
    within = np.ones(len(values) - 1, dtype=np.bool_)
    within[np.cumsum(sizes)[:-1] - 1] = False
    if not ((np.diff(values) < 0) & within).any():
        return values
    grid = np.full((len(sizes), int(sizes.max())), np.inf)
    inside = np.arange(grid.shape[1])[None, :] < sizes[:, None]
    grid[inside] = values
    return np.asarray(np.minimum.accumulate(grid[:, ::-1], axis=1)[:, ::-1][inside])


# --- Makespan ---------------------------------------------------------------------------------------------------------
# The exact minimal makespan: the least time in which a number of devices can finish within the supplies' budgets.
#
# For a given time, every device needs its lowest-power mode that finishes in time, and the supplies power the most
# devices if they take those with the least power. This power never rises as the time grows, so bisection over the
# times of all modes finds the least time (docs/planning.md has the proof).

_FEW = 4096
_SAMPLE = 31


@dataclass(frozen=True)
class Allocation:
    """The selected devices and the step of each on its power curve.

    Attributes:
        limit_s: seconds of training within which all selected devices finish.
        step: `[n]` steps of the selected devices; -1 for all others.
    """

    limit_s: float
    step: Indices


def min_makespan(curves: Curves, headroom: Headroom, count: int, eligible: Mask, priority: Mask) -> Allocation | None:
    """The allocation of `count` devices with the least makespan; of fewer if the supplies cannot power as many.

    Args:
        curves: power curves of all devices.
        headroom: headroom of the supplies.
        count: number of devices to select.
        eligible: `[n]` devices that may be selected.
        priority: `[n]` devices to select before all others, `count` of them at most.

    Returns:
        The allocation; None if the supplies cannot power a single device.
    """

    def largest_set(step: Indices, stable: bool = True) -> Indices:
        extra_w = np.where(eligible, curves.extra_at(step), np.inf)
        return headroom.largest_set(extra_w, priority if priority.any() else None, stable)

    low, high = curves.start[:-1] - 1, curves.start[1:] - 1
    most = largest_set(high)[:count]
    if not len(most):
        return None
    count, priority_count = len(most), int(np.count_nonzero(priority[most]))

    def enough(step: Indices) -> bool:
        chosen = largest_set(step, stable=False)
        return len(chosen) >= count and int(np.count_nonzero(priority[chosen])) >= priority_count

    limit_s = _least_time(curves, low, np.where(eligible, high, low), enough)
    step = curves.steps_within(limit_s)
    taken = largest_set(step)[:count]
    chosen = np.full(len(curves), -1, dtype=np.intp)
    chosen[taken] = step[taken]
    return Allocation(limit_s, chosen)


def _least_time(curves: Curves, low: Indices, high: Indices, enough: Callable[[Indices], bool]) -> float:
    """The least sufficient time among the times of the steps after `low` up to `high`. `high` must be sufficient.

    Each pivot is the median of a random sample of the times, so it removes about half of them. The number of
    iterations is logarithmic for any distribution of times, and the list of all times is never sorted.
    """
    draw = np.random.default_rng(0)
    while (left := int((high - low).sum())) > _FEW:
        counts = np.cumsum(high - low)
        drawn = np.sort(draw.integers(left, size=_SAMPLE))
        device = np.searchsorted(counts, drawn, side="right")
        pivot_s = float(np.median(curves.time_s[high[device] - (counts[device] - 1 - drawn)]))
        step = curves.steps_within(pivot_s, low, high)
        if enough(step):
            if (step == high).all():
                break
            high = step
        else:
            low = step
    return _least_of_few(curves, low, high, enough)


def _least_of_few(curves: Curves, low: Indices, high: Indices, enough: Callable[[Indices], bool]) -> float:
    counts = high - low
    offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    times_s = np.unique(curves.time_s[np.repeat(low + 1, counts) + offsets])
    left, right = 0, len(times_s) - 1
    while left < right:
        middle = (left + right) // 2
        if enough(curves.steps_within(float(times_s[middle]), low, high)):
            right = middle
        else:
            left = middle + 1
    return float(times_s[left])
