"""How figures are rounded."""

from __future__ import annotations

import numpy as np


def rounded(value: np.floating) -> float:
    """A figure with four decimals, as it is printed."""
    return round(float(value), 4)
