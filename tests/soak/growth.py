"""Whether a process's resource usage grows: the robust slope of the second half of its samples, and a bound."""

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
        at_least: absolute growth that is always allowed, even over a short time or for a small quantity.
        share: growth that is allowed as a share of the median, if that is more.
    """

    at_least: float
    share: float = 0.0


@dataclass(frozen=True)
class Growth:
    """How much a quantity of a process grew in the second half.

    Attributes:
        process: name of the process.
        quantity: the quantity.
        median: median of the second half.
        gained: the Theil-Sen slope of the second half times its length; temporary jumps have little effect.
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
