"""Round values for the axis of a drawing."""

from __future__ import annotations

import math
from itertools import takewhile

_STEPS = (1, 2, 5, 10)
_LOG_STEPS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
"""Values per decade of a logarithmic axis, the fewest first."""
_FEWEST = 3


def round_values(most: float, about: int) -> list[float]:
    """Values for an axis from 0: multiples of 1, 2 or 5 times a power of ten.

    Args:
        most: the end of the axis; above 0.
        about: the approximate upper limit of the number of steps.
    """
    step, decimals = _step(most, about)
    values = (round(k * step, decimals) for k in range(about + 1))
    return list(takewhile(lambda value: value <= most * (1 + 1e-9), values))


def round_log_values(least: float, most: float, about: int) -> list[float]:
    """Values for a logarithmic axis: as few per decade as give three values, or even steps on a short axis.

    Args:
        least: where the axis begins; above 0.
        most: where the axis ends; at least `least`.
        about: the number of steps that is wanted at most on a short axis.

    Returns:
        The values in ascending order; only `least` if the axis has no length.
    """
    if most == least:
        return [least]
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    for mantissas in _LOG_STEPS:
        values = [round(each * 10.0**decade, 1 - decade) for decade in decades for each in mantissas]
        if len(within := [value for value in values if least <= value <= most]) >= _FEWEST:
            return within
    step, decimals = _step(most - least, about)
    return [round(k * step, decimals) for k in range(math.ceil(least / step), math.floor(most / step) + 1)]


def _step(span: float, about: int) -> tuple[float, int]:
    """Return the round step that divides a span into at most `about` parts, and the decimals of its multiples."""
    exponent = math.floor(math.log10(span / about))
    # Three decimals, so that 10.000000001 steps are 10.
    step = next(each for each in _STEPS if round(span / (each * 10.0**exponent), 3) <= about)
    return step * 10.0**exponent, max(0, -exponent)
