"""Turns pydantic's errors about settings into sentences that name the key, its origin and a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from wattfleet_io.settings.model import Key, Settings, keys_of
from wattfleet_io.url_passwords import without_passwords

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "tuple": "a list",
    "path": "a path",
}
_BOUNDS = {
    "greater_than": ("must be above {gt}", "gt"),
    "greater_than_equal": ("must be {ge} or more", "ge"),
    "less_than": ("must be below {lt}", "lt"),
    "less_than_equal": ("must be {le} or less", "le"),
}


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known one, if there is one."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def explain(
    error: ValidationError, model: type[Settings], origins: Mapping[str, str], config: Path | None
) -> Iterator[str]:
    """Return one sentence per problem.

    Args:
        error: pydantic's error.
        model: the settings.
        origins: the origin of each given key.
        config: the settings file, if there is one.
    """
    keys = list(keys_of(model))
    for problem in error.errors(include_url=False):
        where = [str(part) for part in problem["loc"]][:2]
        if problem["type"] == "extra_forbidden":
            yield f"{config}: {_unknown(where, keys)}"
        elif problem["type"] == "missing":
            yield _missing(where, keys)
        else:
            yield f"{_subject(where, origins)} {_complaint(problem)}"


def _subject(where: list[str], origins: Mapping[str, str]) -> str:
    """Return the subject of a message: the option, variable or key that the user has set."""
    path = ".".join(where)
    origin = origins.get(path, "")
    if origin.startswith("--") or origin.endswith(path.replace(".", "_").upper()):
        return origin
    table = f"[{where[0]}] {where[1]}" if len(where) > 1 else f"[{where[0]}]"
    return f"{origin}: {table}" if origin else table


def _unknown(where: list[str], keys: list[Key]) -> str:
    if len(where) == 1:
        groups = list(dict.fromkeys(key.group for key in keys))
        if homes := [f"[{key.group}]" for key in keys if key.name == where[0]]:
            return f"{where[0]!r} belongs in the table {' or '.join(homes)}"
        return f"unknown table [{where[0]}]{suggestion(where[0], groups)}"
    group, name = where
    if homes := [f"[{key.group}]" for key in keys if key.name == name]:
        return f"unknown key {name!r} in [{group}]; it belongs in {' or '.join(homes)}"
    return f"unknown key {name!r} in [{group}]{suggestion(name, [key.name for key in keys if key.group == group])}"


def _missing(where: list[str], keys: list[Key]) -> str:
    group, name = where
    (option,) = [key.option for key in keys if [key.group, key.name] == where]
    return f"{option or name} is required: pass it, or set {name!r} in [{group}] of the settings file"


def _complaint(problem: Any) -> str:
    kind: str = problem["type"]
    context = problem.get("ctx", {})
    given = problem["input"]
    if kind in _BOUNDS:
        text, bound = _BOUNDS[kind]
        return f"{text.format(**{bound: f'{context[bound]:g}'})}, not {float(given):g}"
    if kind == "literal_error":
        return f"must be {context['expected']}, not {without_passwords(repr(given))}"
    if kind in ("model_type", "model_attributes_type"):
        return "must be a table"
    if kind == "string_too_short":  # keys do not need more than one character
        return "must not be empty"
    if kind == "finite_number":
        return f"must be a finite number, not {given}"
    if kind == "value_error":
        return str(context["error"])
    expected, _, _ = kind.partition("_")
    if expected in _TYPES:
        return f"must be {_TYPES[expected]}, not {without_passwords(repr(given))}"
    return f"is invalid: {problem['msg']}"
