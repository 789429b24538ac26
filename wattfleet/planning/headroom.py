"""Headroom: the power that every supply has left while all of its devices idle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattfleet.planning.curves import Indices, Mask, Values


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
