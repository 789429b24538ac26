"""What every supply can carry beyond the idling of all devices behind it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattfleet.planning.curves import Indices, Mask, Values


@dataclass(frozen=True)
class Headroom:
    """The watts of nested supplies, and where each of `n` devices hangs.

    Attributes:
        spare_w: `[s]` watts of each supply beyond the idling of all devices behind it; negative where not even that
            is covered.
        above: `[levels, n]` the supply of each device at each depth, sites first; -1 where the device hangs higher up.
    """

    spare_w: Values
    above: Indices

    def of(self, devices: Mask) -> Headroom:
        """The same for some of the devices; the others idle."""
        return Headroom(self.spare_w, self.above[:, devices])

    def carried(self, extra_w: Values, first: Mask | None = None, in_order: bool = True) -> Indices:
        """The most devices that can train together: at every supply the cheapest, as far as its watts go.

        The cheapest are best at every depth: a circuit carries a set if and only if it carries as many of its cheapest,
        and a site does best to draw on what its circuits can carry, cheapest first.

        Args:
            extra_w: `[n]` watts above idling, not negative; infinite for devices that cannot be taken.
            first: `[n]` devices that are carried before any other.
            in_order: of devices that need the same watts take the first ones, wherever it is run; who only wants to
                know how many are carried saves the time.

        Returns:
            `[k]` the devices, those that come first before the others, each group by ascending watts.
        """
        order = np.argsort(extra_w, kind="stable" if in_order else "quicksort")
        order = order[np.isfinite(extra_w[order])]
        if first is None:
            return self._cheapest(extra_w, order, self.spare_w)
        before = self._cheapest(extra_w, order[first[order]], self.spare_w)
        left_w = self.spare_w - self.drawn_w(extra_w, before)
        return np.concatenate((before, self._cheapest(extra_w, order[~first[order]], left_w)))

    def _cheapest(self, extra_w: Values, order: Indices, spare_w: Values) -> Indices:
        """Of devices by ascending watts those that fit."""
        for above in self.above[::-1]:
            supply = above[order]
            over = (supply >= 0) & (running_sums(extra_w[order], supply) > spare_w[supply])
            order = order[~over]
        return order

    def drawn_w(self, extra_w: Values, devices: Indices) -> Values:
        """`[s]` watts above idling that some devices take of each supply."""
        drawn_w = np.zeros(len(self.spare_w))
        for above in self.above:
            held = devices[above[devices] >= 0]
            np.add.at(drawn_w, above[held], extra_w[held])
        return drawn_w

    def carries(self, extra_w: Values, chosen: Mask) -> bool:
        """Whether these devices can train together."""
        drawn_w = self.drawn_w(extra_w, np.flatnonzero(chosen))
        return bool(self.covered[chosen].all() and (drawn_w <= np.maximum(self.spare_w, 0.0)).all())

    @property
    def alone_w(self) -> Values:
        """`[n]` watts above idling that each device's supplies can give it while all others idle."""
        return np.asarray(np.where(self.above >= 0, self.spare_w[self.above], np.inf).min(axis=0))

    @property
    def covered(self) -> Mask:
        """`[n]` whether all supplies of a device cover at least the idling behind them."""
        return np.asarray(self.alone_w >= 0)


def running_sums(values: Values, group: Indices) -> Values:
    """Each value added to those before it in the same group."""
    if len(group) == 0 or (group == group[0]).all():
        return np.asarray(np.cumsum(values))
    # Sorting small integers is linear in their number.
    by_group = np.argsort(group.astype(np.int16 if group.max() < 2**15 else np.int64), kind="stable")
    sums = np.cumsum(values[by_group])
    begins = np.flatnonzero(np.diff(group[by_group], prepend=-2))
    before = np.concatenate(([0.0], sums))[begins]
    sums -= np.repeat(before, np.diff(np.append(begins, len(values))))
    found = np.empty_like(sums)
    found[by_group] = sums
    return found
