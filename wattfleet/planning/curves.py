"""What being done in time costs: for every device and any time, the fewest watts above idling.

Kept for the whole fleet in flat arrays, since a plan asks this of every device some twenty times.
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
"""A device counts as done at the time that it exceeds with a probability of 10 %."""

Values = NDArray[np.float64]
Indices = NDArray[np.intp]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Curves:
    """One falling staircase of watts over time for each of `n` devices, `m` steps in all.

    Attributes:
        start: `[n + 1]` where each device's steps begin; none where its own limit leaves no mode.
        time_s: `[m]` seconds of the whole training, its start included and its epochs at `TIME_QUANTILE`; they do not
            fall from step to step of a device.
        extra_w: `[m]` watts above idling that being done by then takes, at `POWER_QUANTILE`; they do not rise.
        point: `[m]` the point of the device's front.
        idle_w: `[n]` watts of each device while parked.
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
        """`[n]` seconds of the training in each device's fastest mode; infinite where it has none."""
        return self._at_step(self.start[:-1], self.time_s)

    @property
    def least_w(self) -> Values:
        """`[n]` watts above idling in each device's thriftiest mode; infinite where it has none."""
        return self._at_step(self.start[1:] - 1, self.extra_w)

    def _at_step(self, step: Indices, values: Values) -> Values:
        found = np.full(len(self), np.inf)
        some = np.diff(self.start) > 0
        found[some] = values[step[some]]
        return found

    def steps_within(self, limit_s: float, low: Indices | None = None, high: Indices | None = None) -> Indices:
        """`[n]` each device's thriftiest step that is done by then; `start - 1` where none is.

        Args:
            limit_s: seconds of the training.
            low: `[n]` steps known to be done by then.
            high: `[n]` steps that no later one can be done after.
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
        """`[n]` watts above idling at each device's step; infinite where it has none."""
        found = np.full(len(self), np.inf)
        some = step >= self.start[:-1]
        found[some] = self.extra_w[step[some]]
        return found


def curves_of(offers: Sequence[Offer], epochs: float | Values) -> Curves:
    """The curves of some devices, of which each may draw its own limit at most.

    A device that is done before the round is parks and idles, so that no mode is given fewer watts than idling takes.

    Args:
        offers: the devices.
        epochs: local epochs that each trains, or `[n]` of each; how many there are decides how much a start weighs.
    """
    fronts = [offer.front for offer in offers]
    sizes = np.array([len(front) for front in fronts], dtype=np.intp)
    time_s = np.repeat(np.broadcast_to(epochs, len(fronts)), sizes) * np.concatenate([f.epoch_s for f in fronts])
    time_s *= np.exp(normal_quantile(TIME_QUANTILE) * np.concatenate([front.epoch_log_sd for front in fronts]))
    time_s += np.concatenate([front.warmup_s for front in fronts])
    planned_w = np.concatenate([front.power_w for front in fronts])
    planned_w *= np.exp(normal_quantile(POWER_QUANTILE) * np.concatenate([front.power_log_sd for front in fronts]))
    idle_w = np.array([offer.idle_w for offer in offers])
    limit_w = np.array([np.inf if offer.limit_w is None else offer.limit_w for offer in offers])
    owner = np.repeat(np.arange(len(offers)), sizes)
    begin = np.cumsum(sizes) - sizes
    point = np.arange(len(time_s)) - begin[owner]
    # A less certain point can be later at the quantile than a thriftier one that follows, and one with a short start
    # and slow minibatches in a training of many epochs; the thriftier one then serves as well.
    time_s = _least_from_here_on(time_s, sizes)
    allowed = (planned_w <= limit_w[owner]) & (idle_w <= limit_w)[owner]
    extra_w = np.maximum(planned_w - idle_w[owner], 0.0)
    return Curves(
        start=np.concatenate(([0], np.cumsum(np.bincount(owner[allowed], minlength=len(offers))))),
        time_s=time_s[allowed],
        extra_w=extra_w[allowed],
        point=point[allowed],
        idle_w=idle_w,
    )


def thriftiest_w(offers: Sequence[Offer]) -> Values:
    """`[n]` watts that each device's thriftiest mode is given, whatever its own limit."""
    power_w = np.array([offer.front.power_w[-1] for offer in offers])
    log_sd = np.array([offer.front.power_log_sd[-1] for offer in offers])
    planned_w = power_w * np.exp(normal_quantile(POWER_QUANTILE) * log_sd)
    return np.asarray(np.maximum(planned_w, [offer.idle_w for offer in offers]))


def _least_from_here_on(values: Values, sizes: Indices) -> Values:
    """Within each device's stretch, the least of a value and all that follow it."""
    within = np.ones(len(values) - 1, dtype=np.bool_)
    within[np.cumsum(sizes)[:-1] - 1] = False
    if not ((np.diff(values) < 0) & within).any():
        return values
    grid = np.full((len(sizes), int(sizes.max())), np.inf)
    inside = np.arange(grid.shape[1])[None, :] < sizes[:, None]
    grid[inside] = values
    return np.asarray(np.minimum.accumulate(grid[:, ::-1], axis=1)[:, ::-1][inside])
