"""Parses JSON from files, which may be damaged or come from someone else."""

from __future__ import annotations

import json
from typing import Any

_MAX_DEPTH = 16
_MAX_DIGITS = 19
"""All integers of 64 bits have at most so many digits."""


def parse_json(text: str | bytes) -> Any:
    """Parse one JSON document.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has an integer of more than 64 bits; the text says which.
    """
    try:
        content = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep") from None
    _require_shallow(content)
    return content


def _integer(digits: str) -> int:
    if len(digits.removeprefix("-")) > _MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(digits):,} digits")
    return int(digits)


def _require_shallow(content: Any) -> None:
    """Walk down level by level: recursion is what deep nesting breaks."""
    level = [content]
    for _ in range(_MAX_DEPTH):
        level = [
            part
            for each in level
            if isinstance(each, dict | list)
            for part in (each.values() if isinstance(each, dict) else each)
            if isinstance(part, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
