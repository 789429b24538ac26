"""Power of a machine's CPU packages, from the kernel's energy counters (RAPL)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from edge_agent.devices.tree import Tree
from wattfleet_io.clock import Clock

# Packages only, since they include their parts, and `psys` would count the packages twice.
_PACKAGE = re.compile(r"package-\d+")


@dataclass(frozen=True)
class _Counter:
    path: str
    wraps_at_uj: int


class Rapl:
    """The energy counters of the CPU packages; most kernels let only root read them.

    Args:
        tree: the machine's files.
        clock: the time base for computing power from energy.
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
        """Number of packages with readable counters; 0 if any is unreadable, as the sum would be incomplete."""
        return 0 if self.unreadable else len(self._counters)

    def reader(self) -> Callable[[], float]:
        """Return a function that returns the mean power since its last call, mW; NaN at first and when unknown."""
        before: tuple[float, list[int]] | None = None

        def read_mw() -> float:
            nonlocal before
            earlier_reading = before
            try:
                before = self._clock.now_s(), [int(self._tree.read(counter.path)) for counter in self._counters]
            except (OSError, ValueError):
                before = None
            if earlier_reading is None or before is None or before[0] <= earlier_reading[0]:
                return math.nan
            energy_uj = sum(
                (now - earlier) % counter.wraps_at_uj
                for counter, earlier, now in zip(self._counters, earlier_reading[1], before[1], strict=True)
            )
            return energy_uj / 1e3 / (before[0] - earlier_reading[0])

        return read_mw
