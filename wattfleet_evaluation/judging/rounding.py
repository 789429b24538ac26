"""Rounding of printed figures."""

from __future__ import annotations

import numpy as np


def rounded(value: np.floating) -> float:
    """Round a figure to the four decimals that are printed."""
    return round(float(value), 4)
