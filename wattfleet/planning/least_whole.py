"""Rounding up numbers of devices."""

from __future__ import annotations

import math


def least_whole(value: float) -> int:
    """Round up to a whole number, ignoring the rounding errors of binary fractions.

    20 % more than 5 is 6, and 70 % of 10 is 7, although the computed products may be slightly larger.
    """
    return math.ceil(round(value, 9))
