"""Whether what a process holds grows: the robust slope of its second half, beside a bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import theilslopes

from tests.soak.usage import QUANTITIES, Sample


@dataclass(frozen=True)
class Bound:
    """The most that a quantity may grow.

    Attributes:
        at_least: what it may grow however short the time and however little there is of it.
        share: the share of its median by which it may grow, if that is more.
    """

    at_least: float
    share: float = 0.0


@dataclass(frozen=True)
class Growth:
    """How much of a quantity a process gained in the second half.

    Attributes:
        process: its name.
        quantity: what.
        median: in the second half.
        gained: the Theil-Sen slope of the second half times its length; jumps up and down count little.
        allowed: the most that `gained` may be.
    """

    process: str
    quantity: str
    median: float
    gained: float
    allowed: float

    @property
    def is_flat(self) -> bool:
        return self.gained <= self.allowed

    def __str__(self) -> str:
        return (
            f"{self.process:<12} {self.quantity:<12} {self.median:>12,.1f} gained {self.gained:>+10,.2f}"
            f" of {self.allowed:,.1f} allowed"
        )


def growths(samples: Sequence[Sample], bounds: dict[str, Bound]) -> Iterator[Growth]:
    """The growth of each quantity of each process in the second half of the samples."""
    half = samples[len(samples) // 2 :]
    at_s = np.array([sample.at_s for sample in half])
    for process in half[0].usages:
        for quantity in QUANTITIES:
            values = np.array([getattr(sample.usages[process], quantity) for sample in half])
            median, bound = float(np.median(values)), bounds[quantity]
            gained = float(theilslopes(values, at_s).slope) * float(at_s[-1] - at_s[0])
            yield Growth(process, quantity, median, gained, max(bound.at_least, bound.share * median))
