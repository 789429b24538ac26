"""Power of a machine's CPU packages, from the energy counters of its kernel (RAPL)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from edge_agent.devices.tree import Tree
from wattfleet_io.clock import Clock

# Packages only: their parts are counted in them, and `psys` counts the packages once more.
_PACKAGE = re.compile(r"package-\d+")


@dataclass(frozen=True)
class _Counter:
    path: str
    wraps_at_uj: int


class Rapl:
    """The energy counters of CPU packages that this process may read; most kernels let only root.

    Args:
        tree: the machine's files.
        clock: what power is energy over.
    """

    def __init__(self, tree: Tree, clock: Clock) -> None:
        self._tree = tree
        self._clock = clock
        self._counters: list[_Counter] = []
        self.unreadable = False
        for zone in tree.glob("/sys/class/powercap/intel-rapl:*"):
            try:
                if _PACKAGE.fullmatch(tree.read(f"{zone}/name")):
                    tree.read(f"{zone}/energy_uj")
                    self._counters.append(_Counter(f"{zone}/energy_uj", int(tree.read(f"{zone}/max_energy_range_uj"))))
            except (OSError, ValueError):
                self.unreadable = True

    @property
    def packages(self) -> int:
        """Packages whose counters answer; 0 where some do not, as part of the power is not the power."""
        return 0 if self.unreadable else len(self._counters)

    def reader(self) -> Callable[[], float]:
        """A function that returns the mean power since it was last called, mW; NaN at first and where it is unknown."""
        before: tuple[float, list[int]] | None = None

        def read_mw() -> float:
            nonlocal before
            then = before
            try:
                before = self._clock.now_s(), [int(self._tree.read(counter.path)) for counter in self._counters]
            except (OSError, ValueError):
                before = None
            if then is None or before is None or before[0] <= then[0]:
                return math.nan
            energy_uj = sum(
                (now - earlier) % counter.wraps_at_uj
                for counter, earlier, now in zip(self._counters, then[1], before[1], strict=True)
            )
            return energy_uj / 1e3 / (before[0] - then[0])

        return read_mw
