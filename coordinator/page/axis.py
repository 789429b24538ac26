"""Round values for the axis of a drawing."""

from __future__ import annotations

import math
from itertools import takewhile

_STEPS = (1, 2, 5, 10)


def round_values(most: float, about: int) -> list[float]:
    """Values for an axis from 0: multiples of 1, 2 or 5 times a power of ten.

    Args:
        most: the end of the axis; above 0.
        about: the approximate upper limit of the number of steps.
    """
    exponent = math.floor(math.log10(most / about))
    # Three decimals, so that 10.000000001 steps are 10.
    step = next(each for each in _STEPS if round(most / (each * 10.0**exponent), 3) <= about)
    values = (round(k * step * 10.0**exponent, max(0, -exponent)) for k in range(about + 1))
    return list(takewhile(lambda value: value <= most * (1 + 1e-9), values))
