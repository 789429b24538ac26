"""The user's settings file: defaults for commands' options, and the coordinator to connect to.

Example:
    [connection]
    coordinator = "site.example:7070"
    identity = "~/keys/wattfleet"

    [coordinator.devices]
    tag = ["lab"]

    [simulate]
    devices = 8
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from wattfleet.common.addresses import COORDINATOR_VARIABLE, IDENTITY_VARIABLE, INSECURE_VARIABLE
from wattfleet.common.help import Help, settable_options
from wattfleet.common.parsing import parse_toml
from wattfleet.core.errors import InvalidInputError

FILE_VARIABLE = "WATTFLEET_CONFIG"
"""The variable that names another file; empty for none."""

CONNECTION = "connection"
"""The table with the settings shared by all commands that connect to a coordinator."""

_SHARED = {COORDINATOR_VARIABLE: "coordinator", IDENTITY_VARIABLE: "identity", INSECURE_VARIABLE: "insecure"}
"""For each connection variable, the key in the table `connection`."""


class DefaultsFromFile(Help):
    """The context of a command whose options get their defaults from the user's settings file."""

    def __init__(self, command: click.Command, *arguments: Any, **more: Any) -> None:
        super().__init__(command, *arguments, **more)
        if not self.resilient_parsing:  # defaults are not needed for a shell's completion
            self.default_map = _defaults(self)


def key_of(option: click.Option) -> str:
    """Return an option's key in the file, such as `site_budget_w` for `--site-budget-w`."""
    return max(option.opts, key=len).lstrip("-").replace("-", "_")


def with_origin(error: click.BadParameter) -> click.BadParameter:
    """Return an error about a value, extended by its origin if that is the user's settings file."""
    if error.ctx is None or error.param is None or error.param.name is None:
        return error
    if error.ctx.get_parameter_source(error.param.name) is not ParameterSource.DEFAULT_MAP:
        return error
    return click.BadParameter(f"{error.message.rstrip('.')} (in {_path()}).", error.ctx, error.param)


def config_folder() -> Path:
    """Return the folder of the user's settings and identity: `wattfleet` in XDG_CONFIG_HOME, or else in ~/.config."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(folder):  # the standard ignores relative paths
        folder = os.path.expanduser("~/.config")
    return Path(folder, "wattfleet")


def user_folder() -> Path:
    """Return the folder in which `wattfleet join` stores the user's identity."""
    return config_folder() / "identity"


def in_home(path: Path) -> str:
    """Return a path for people, with `~` for the user's home."""
    home, text = os.path.expanduser("~"), str(path)
    return f"~{text.removeprefix(home)}" if text.startswith(f"{home}/") else text


def _path() -> Path | None:
    named = os.environ.get(FILE_VARIABLE)
    if named is not None:
        return Path(named) if named else None
    return config_folder() / "config.toml"


def _content(path: Path) -> dict[str, Any]:
    try:
        if FILE_VARIABLE not in os.environ and not _is_there(path):
            return {}
        return parse_toml(path.read_bytes())
    except OSError as error:
        raise InvalidInputError(f"cannot read the settings file {path}: {error.strerror}") from None
    except ValueError as error:
        raise InvalidInputError(f"{path} is not valid TOML: {error}") from None


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # a service may not have access to its home
        return False
    return True


def _defaults(ctx: click.Context) -> dict[str, Any]:
    """Return the values of a command's options in the file, by parameter.

    This checks the whole group of the command, such as `coordinator`, and the names of the other groups.
    """
    path = _path()
    tables = {} if path is None else _content(path)
    if path is None or not tables:
        return {}
    chain = [ctx]
    while chain[0].parent is not None:
        chain.insert(0, chain[0].parent)
    root = chain[0].command
    groups = root.list_commands(chain[0]) if isinstance(root, click.Group) else []
    shared = [each for each in settable_options(ctx.command.get_params(ctx)) if each.envvar in _SHARED]
    for name, table in tables.items():
        _require_known(path, "table", name, [CONNECTION, *groups])
        _require_table(path, [name], table)
    for name in tables.get(CONNECTION, {}):
        _require_known(path, f"key in [{CONNECTION}]", name, list(_SHARED.values()))
    words = [str(each.info_name) for each in chain[1:]]
    _check(path, chain[1].command, tables.get(words[0], {}), words[:1])
    own: Any = tables
    for word in words:
        own = own.get(word, {})
    connection = tables.get(CONNECTION, {})
    found = [(each, connection.get(_SHARED[str(each.envvar)]), [CONNECTION]) for each in shared]
    found += [(each, own.get(key_of(each)), words) for each in _own_options(ctx.command)]
    return {str(option.name): _value(path, option, value, words) for option, value, words in found if value is not None}


def _own_options(command: click.Command) -> Iterator[click.Option]:
    return (each for each in settable_options(command.params) if each.envvar not in _SHARED)


def _check(path: Path, command: click.Command, table: Mapping[str, Any], words: Sequence[str]) -> None:
    """Check that a table and the tables below it have only known keys."""
    where = ".".join(words)
    if isinstance(command, click.Group):
        for name, below in table.items():
            _require_known(path, f"table in [{where}]", name, list(command.commands))
            _require_table(path, [*words, name], below)
            _check(path, command.commands[name], below, [*words, name])
    elif command.context_class is not DefaultsFromFile:
        if table:
            raise InvalidInputError(
                f"{path}: [{where}] is not read: `wattfleet {' '.join(words)}` has a settings file of its own, which"
                " --config names"
            )
    else:
        options = {key_of(each): each for each in _own_options(command)}
        for name, value in table.items():
            if name in _SHARED.values() and name not in options:
                raise InvalidInputError(f"{path}: {name} in [{where}]: put it into [{CONNECTION}]")
            _require_known(path, f"key in [{where}]", name, list(options))
            _value(path, options[name], value, words)


def _require_known(path: Path, what: str, name: str, known: Sequence[str]) -> None:
    if name in known:
        return
    close = difflib.get_close_matches(name.replace("-", "_"), known, 1)
    if close:
        remedy = f"did you mean {close[0]!r}?"
    else:
        remedy = f"use one of {', '.join(known)}, or remove it" if known else "remove it"
    raise InvalidInputError(f"{path}: unknown {what}: {name!r}; {remedy}")


def _require_table(path: Path, words: Sequence[str], value: Any) -> None:
    if not isinstance(value, dict):
        raise InvalidInputError(
            f"{path}: {'.'.join(words)} must be a table, [{'.'.join(words)}]; the coordinator's address and the"
            f" identity belong in [{CONNECTION}]"
        )


def _value(path: Path, option: click.Option, value: Any, words: Sequence[str]) -> Any:
    """Convert a value to the form that the option accepts; `~` in a path is the user's home."""
    if option.multiple:
        expected, is_right = "a list", isinstance(value, list) and not any(isinstance(v, dict | list) for v in value)
    elif option.is_flag:
        expected, is_right = "true or false", isinstance(value, bool)
    else:
        expected, is_right = "a text or a number", not isinstance(value, bool | dict | list)
    if not is_right:
        key = _SHARED.get(str(option.envvar), key_of(option))
        raise InvalidInputError(f"{path}: {key} in [{'.'.join(words)}] must be {expected}, not {value!r}")
    if isinstance(option.type, click.Path):
        return [os.path.expanduser(str(v)) for v in value] if option.multiple else os.path.expanduser(str(value))
    return value
