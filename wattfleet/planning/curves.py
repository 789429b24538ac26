"""Power curves: the least power above idle that each device needs to finish within a given time.

The whole fleet is held in flat arrays, since planning a round evaluates every curve about twenty times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattfleet.choosing import POWER_QUANTILE
from wattfleet.planning.offers import Offer
from wattfleet.prediction import normal_quantile

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
