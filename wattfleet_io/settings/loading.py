"""Reads settings from options, the environment and a TOML file, and records where each value came from."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from wattfleet.errors import InvalidInputError
from wattfleet_io.parsing import parse_toml
from wattfleet_io.settings.errors import explain, suggestion
from wattfleet_io.settings.model import S, keys_of

# Kubernetes sets these variables for a service with the prefix's name.
_SERVICE_LINK = re.compile(r"SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?")


@dataclass(frozen=True)
class Loaded(Generic[S]):
    """Settings and where their values came from.

    Attributes:
        settings: the effective values.
        origins: the option, environment variable or file that set a key, by key such as `store.keep_days`; keys with
            defaults are absent.
    """

    settings: S
    origins: Mapping[str, str]


def variable_of(prefix: str, path: str) -> str:
    """Return the environment variable that sets a key: `store.keep_days` is `WATTFLEET_COORDINATOR_STORE_KEEP_DAYS`."""
    return prefix + path.replace(".", "_").upper()


def load(
    model: type[S],
    prefix: str,
    options: Mapping[str, Any] | None = None,
    config: Path | None = None,
    of_others: Collection[str] = (),
) -> Loaded[S]:
    """Read the effective settings of a process.

    Args:
        model: the process's settings.
        prefix: the prefix of its environment variables, such as `WATTFLEET_COORDINATOR_`.
        options: values given on the command line, by key, such as `store.keep_days`.
        config: the TOML file. If it is None, the environment variable `<prefix>CONFIG` may name one.
        of_others: variables with the same prefix that belong to other commands; they are ignored.

    Raises:
        InvalidInputError: a key is unknown, a value cannot be used, or the file cannot be read.
    """
    known = {variable_of(prefix, key.path) for key in keys_of(model)} | {f"{prefix}CONFIG"}
    ignored = set(of_others) - known
    _require_known(prefix, known, ignored)
    if config is None and (named := os.environ.get(f"{prefix}CONFIG")):
        config = Path(named)
    option_of = {key.path: key.option for key in keys_of(model)}
    variables = EnvSettingsSource(
        model, env_prefix=prefix, env_nested_delimiter="_", env_nested_max_split=1, env_ignore_empty=True
    )
    folded = {name.lower() for name in ignored}
    variables.env_vars = {name: value for name, value in variables.env_vars.items() if name.lower() not in folded}
    layers: list[tuple[dict[str, Any], Callable[[str], str]]] = [
        ({} if config is None else _file(config), lambda _: str(config)),
        (variables(), lambda path: variable_of(prefix, path)),
        (_nested(options or {}), lambda path: option_of[path]),
    ]
    merged: dict[str, Any] = {group: {} for group in model.model_fields}
    origins: dict[str, str] = {}
    for content, origin_of in layers:
        merged = _merged(merged, content)
        origins.update({path: origin_of(path) for path in _paths(content)})
    return Loaded(_validated(model, merged, origins, config), origins)


def settings_of(model: type[S], content: bytes, path: Path) -> S:
    """Return the settings of a file without options or environment, as for a service.

    Args:
        model: the process's settings.
        content: the file's content.
        path: the file's name, for messages.

    Raises:
        InvalidInputError: the content is not TOML, a key is unknown, or a value cannot be used.
    """
    tables = _parsed(content, path)
    return _validated(model, tables, {each: str(path) for each in _paths(tables)}, path)


def _validated(model: type[S], tables: Mapping[str, Any], origins: Mapping[str, str], config: Path | None) -> S:
    try:
        return model(**tables)
    except ValidationError as error:
        raise InvalidInputError("; ".join(explain(error, model, origins, config))) from None


def _file(path: Path) -> dict[str, Any]:
    try:
        return _parsed(path.read_bytes(), path)
    except OSError as error:
        raise InvalidInputError(f"cannot read the settings file {path}: {error.strerror}") from None


def _parsed(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return parse_toml(content)
    except ValueError as error:
        raise InvalidInputError(f"{path} is not valid TOML: {error}") from None


def _require_known(prefix: str, known: Collection[str], ignored: Collection[str]) -> None:
    """Refuse environment variables that look like settings but are not.

    Raises:
        InvalidInputError: there is such a variable.
    """
    names = {*known, *ignored}
    for name in sorted(os.environ):
        if name.startswith(prefix) and name not in names and not _SERVICE_LINK.fullmatch(name.removeprefix(prefix)):
            raise InvalidInputError(f"unknown environment variable {name}{suggestion(name, names)}")


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables in which the keys in `over` replace those in `base`."""
    merged = dict(base)
    for group, table in over.items():
        before = merged.get(group)
        merged[group] = {**before, **table} if isinstance(before, dict) and isinstance(table, dict) else table
    return merged


def _nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Convert values by key to a table of tables."""
    tables: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        group, name = path.split(".")
        tables.setdefault(group, {})[name] = value
    return tables


def _paths(tables: Mapping[str, Any]) -> Iterator[str]:
    """Return the keys in a table of tables."""
    for group, table in tables.items():
        if isinstance(table, dict):
            yield from (f"{group}.{name}" for name in table)
        else:
            yield group
