"""Rounding up numbers of devices."""

from __future__ import annotations

import math


def least_whole(value: float) -> int:
    """The least whole number at or above a value.

    What binary fractions add does not count: 20 % more than 5 is 6, and 70 % of 10 are 7, although the products may be
    slightly more.
    """
    return math.ceil(round(value, 9))
