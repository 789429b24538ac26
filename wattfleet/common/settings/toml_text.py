"""Writes the effective settings of a process as a commented TOML file."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import tomli_w

from wattfleet.common.addresses import without_passwords
from wattfleet.common.settings.model import Key, Loaded, S, keys_of

_WIDTH = 80


def as_toml(loaded: Loaded[S], command: str) -> str:
    """Return the settings with each key's description, unit, default and origin; `--config` can read this text.

    Passwords in URLs are replaced by `***`.

    Args:
        loaded: the effective settings.
        command: the command that uses them, such as `wattfleet coordinator serve`.
    """
    lines = [f"# Settings of `{command}`."]
    keys = list(keys_of(type(loaded.settings)))
    if missing := [key.option or key.path for key in keys if key.is_required and _value(loaded, key) is None]:
        lines += _comment(f"Missing: {', '.join(missing)}. The command does not start without them.")
    group = ""
    for key in keys:
        if key.group != group:
            group = key.group
            title = (type(getattr(loaded.settings, group)).__doc__ or "").partition("\n")[0]
            lines += ["", *_comment(title), f"[{group}]"]
        value = _value(loaded, key)
        lines += [*_comment(key.description), *_comment(_facts(key, loaded.origins.get(key.path))), _line(key, value)]
    return "\n".join(lines) + "\n"


def _value(loaded: Loaded[S], key: Key) -> Any:
    return getattr(getattr(loaded.settings, key.group), key.name)


def _facts(key: Key, origin: str | None) -> str:
    unit = f"Unit: {key.unit}. " if key.unit else ""
    unchanged = "Missing." if key.is_required else "Not changed."
    return f"{unit}{key.default_text} " + (f"Set by: {origin}." if origin else unchanged)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )


def _line(key: Key, value: Any) -> str:
    if value is None:
        return f"# {key.name} ="  # TOML has no null
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        value = without_passwords(value)
    return tomli_w.dumps({key.name: list(value) if isinstance(value, tuple) else value}).strip()
