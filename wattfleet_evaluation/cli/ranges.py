"""Ranges of numbers in options: FIRST:LAST:STEP."""

from __future__ import annotations

import math

from wattfleet.errors import InvalidInputError

_MAX_NUMBERS = 10_000


def parse_range(option: str, text: str, step: float) -> list[float]:
    """The numbers from `FIRST:LAST:STEP` or `FIRST:LAST`, both ends included; a single number is one value.

    Args:
        option: the option's name, for errors.
        text: what was given.
        step: the step, if none is stated.

    Raises:
        InvalidInputError: the text has another form, a number is not finite and above 0, the last is below the first,
            or there are more than 10,000 numbers.
    """
    parts = text.split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or not all(0 < number < math.inf for number in numbers):
        raise InvalidInputError(f"{option}: invalid range {text!r}: give FIRST:LAST:STEP, such as 30:120:10")
    first, last = numbers[0], numbers[-1] if len(numbers) == 1 else numbers[1]
    step = numbers[2] if len(numbers) == 3 else step
    if last < first:
        raise InvalidInputError(f"{option}: the range {text!r} ends below its start: give the lower number first")
    # A rounding error must not leave out the last number.
    steps = (last - first) / step + 1e-9
    if steps >= _MAX_NUMBERS:
        raise InvalidInputError(f"{option}: the range {text!r} has too many numbers: give at most {_MAX_NUMBERS:,}")
    return [round(first + number * step, 9) for number in range(math.floor(steps) + 1)]
