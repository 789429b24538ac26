"""Parses JSON and TOML from files, and times, which may be damaged or come from someone else."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection
from datetime import datetime, timezone
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MAX_DEPTH = 16
_KEY_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*(?:{_KEY_PART}\.[ \t]*){{{_MAX_DEPTH}}}{_KEY_PART}", re.MULTILINE)
"""The start of a TOML key with too many parts. The parser's time grows with the square of their number."""

_MAX_DIGITS = 19
"""Maximum of digits of a 64-bit integer."""

_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_SPAN_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def parse_json(text: str | bytes) -> Any:
    """Parse one JSON document.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or has an integer of more than 64 bits; the message
            states which.
    """
    try:
        content = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep") from None
    _require_shallow(content)
    return content


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Parse one JSON document that is an object; see `parse_json`.

    Raises:
        ValueError: the text cannot be parsed, or is not an object.
    """
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        ValueError: the text is not TOML in UTF-8, is nested too deeply, or has a key of many parts or an integer of
            thousands of digits; the message states which.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {_MAX_DEPTH} parts")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        # Python converts at most 4,300 digits to an integer.
        raise ValueError("an integer has too many digits") from None


def parse_toml_table(content: bytes, table: str, known: Collection[str], hint: str) -> dict[str, Any]:
    """Parse one table of a TOML document; see `parse_toml`.

    Args:
        content: the document.
        table: the table's name.
        known: the keys that it may have.
        hint: what to do if there is no such table.

    Raises:
        ValueError: the text cannot be parsed, has no such table, or the table has an unknown key.
    """
    found = parse_toml(content).get(table)
    if not isinstance(found, dict):
        raise ValueError(f"has no table [{table}]; {hint}")
    if unknown := set(found).difference(known):
        raise ValueError(f"unknown {', '.join(sorted(unknown))}; [{table}] may have {', '.join(known)}")
    return found


def _integer(digits: str) -> int:
    if len(digits.removeprefix("-")) > _MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(digits):,} digits")
    return int(digits)


def _require_shallow(content: Any) -> None:
    """Check the depth level by level, since deep nesting would break recursion."""
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


def utc_from(unix_s: float) -> datetime:
    """Return the date and time of a number of seconds since 1970, which may come from anywhere.

    Raises:
        ValueError: no date represents it.
    """
    try:
        return datetime.fromtimestamp(unix_s, timezone.utc)
    except (OverflowError, OSError) as error:
        raise ValueError(f"{unix_s} is not a date") from error


def seconds(span: str) -> float:
    """Convert a duration such as 90s, 45m, 2h, 1d or 1h30m to seconds.

    Raises:
        InvalidInputError: the text is not a duration, or it is zero.
    """
    from wattfleet.core.errors import InvalidInputError

    total_s = sum(float(amount) * _UNIT_S[unit] for amount, unit in _SPAN_PART.findall(span))
    if not (_SPAN.fullmatch(span) and total_s > 0):
        raise InvalidInputError(f"{span!r} is not a duration: write 90s, 45m, 2h, 1d or 1h30m")
    return total_s
