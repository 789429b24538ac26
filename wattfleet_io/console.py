"""What commands print for programs and for people: JSON, counts and durations."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any


def print_json(content: Any) -> None:
    """Print one indented JSON document; see `json_text`."""
    print(json_text(content, indent=2))


def json_text(content: Any, indent: int | None = None) -> str:
    """JSON text in which NaN and infinities, which JSON lacks, become null.

    Args:
        content: dictionaries, lists and plain values.
        indent: spaces per level; None writes one line.
    """
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def count_of(count: int, singular: str) -> str:
    """A count with its noun, such as "1 mode" or "2,304 modes"."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"


def rounds_text(numbers: Sequence[int]) -> str:
    """Numbers of rounds in words, such as "round 2" or "rounds 1–3, 5".

    Args:
        numbers: in ascending order.
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"round{'s' if len(numbers) > 1 else ''} {words}"


def duration_text(seconds: float | None) -> str:
    """A duration, such as "12.5 s", "42 min" or "3.1 h"; a dash if it is unknown."""
    if seconds is None:
        return "-"
    if seconds < 600:
        return f"{seconds:,.1f} s"
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{minutes} min" if minutes < 120 else f"{hours:,.1f} h"
