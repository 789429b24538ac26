"""A command with the options of a settings model, `--config` and `--print-config`.

The model is imported when the command's options are needed, so that other commands start without pydantic.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import click
from typer.core import TyperCommand, TyperOption

from wattfleet.common.help import Help

if TYPE_CHECKING:
    from wattfleet.common.settings.model import Key, Settings

_GIVEN = "wattfleet.common.settings.given"
_WIDEST_CHOICES = 12


class _KeyOption(TyperOption):
    """An option whose help names its key's environment variable."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return nothing: `load` reads the environment, and records the origin of each value."""
        return None


class SettingsCommand(TyperCommand):
    """A command with an option for each key of its settings model that defines one.

    Subclasses state `model` and `prefix`; the command's function calls `effective`.
    """

    model: str
    """The location of the model, such as `coordinator.settings:CoordinatorSettings`."""
    prefix: str
    """The prefix of the environment variables, such as `WATTFLEET_COORDINATOR_`."""

    context_class = Help

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the model's options, then the command's own."""
        return [*_options(self.settings_model(), self.prefix), *super().get_params(ctx)]

    @classmethod
    def settings_model(cls) -> type[Settings]:
        """Import the model."""
        module, _, name = cls.model.partition(":")
        model: type[Settings] = getattr(importlib.import_module(module), name)
        return model


def effective(ctx: click.Context) -> Any:
    """Return the effective settings of a `SettingsCommand`; with `--print-config`, print them and exit.

    Printed settings may lack required keys; the output lists these.

    Raises:
        InvalidInputError: a key is unknown, a value cannot be used, or the file cannot be read.
    """
    from wattfleet.common.settings.model import load, with_required_keys_optional
    from wattfleet.common.settings.option_variables import variables_beside
    from wattfleet.common.settings.toml_text import as_toml

    command = ctx.command
    assert isinstance(command, SettingsCommand), "the command has settings"
    given: dict[str, Any] = ctx.meta.get(_GIVEN, {}).copy()
    config, prints = given.pop("config", None), given.pop("print-config", False)
    model, of_others = command.settings_model(), variables_beside(ctx)
    if prints:
        partial = load(with_required_keys_optional(model), command.prefix, given, config, of_others)
        click.echo(as_toml(partial, ctx.command_path), nl=False)
        ctx.exit()
    return load(model, command.prefix, given, config, of_others).settings


def _options(model: type[Settings], prefix: str) -> Iterator[click.Parameter]:
    from wattfleet.common.settings.model import keys_of

    for key in keys_of(model):
        if key.option:
            yield from _of_key(key, model.title_of(key.group), prefix)
    yield TyperOption(
        param_decls=["--config"],
        type=click.Path(path_type=Path),
        help="Read all settings from this TOML file. Variables override it, and options override both. Default:"
        f" {prefix}CONFIG, else no file.",
        expose_value=False,
        callback=_note("config"),
    )
    yield TyperOption(
        param_decls=["--print-config"],
        is_flag=True,
        help="Print all settings, with those that have no option, as commented TOML; then exit.",
        expose_value=False,
        callback=_note("print-config"),
    )


def _of_key(key: Key, panel: str, prefix: str) -> Iterator[TyperOption]:
    from wattfleet.common.settings.model import variable_of

    type_ = _type(key.field.annotation)
    is_list = get_origin(type_) is tuple
    choices = list(get_args(type_)) if get_origin(type_) is Literal else []
    # Rich leaves little space for help beside a long list of choices.
    in_help = sum(map(len, choices)) > _WIDEST_CHOICES
    one_of = f" One of {', '.join(choices)}." if in_help else ""
    yield _KeyOption(
        param_decls=[key.option],
        envvar=variable_of(prefix, key.path),
        type=str if choices else _click_type(get_args(type_)[0] if is_list else type_),
        metavar="NAME" if in_help else f"[{'|'.join(choices)}]" if choices else None,
        is_flag=type_ is bool or None,
        autocompletion=(lambda ctx, args, incomplete: choices) if choices else None,
        multiple=is_list,
        # None distinguishes "not given" from a value that equals the default.
        default=None,
        help=f"{key.description}{one_of} {key.default_text}",
        expose_value=False,
        callback=_note(key.path),
        rich_help_panel=panel,
    )
    if type_ is bool:
        yield TyperOption(
            param_decls=[f"--no-{key.option.removeprefix('--')}"],
            is_flag=True,
            default=None,
            hidden=True,
            expose_value=False,
            callback=_note(key.path, negated=True),
        )


def _note(path: str, negated: bool = False) -> Any:
    """Return a callback that stores a value given on the command line, or its opposite."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if value is not None and value != ():
            require_no_password(param.opts[0], value)
            ctx.meta.setdefault(_GIVEN, {})[path] = not value if negated else value
        return value

    return callback


def require_no_password(option: str, value: Any) -> None:
    """Check that no URL on the command line contains a password.

    Raises:
        InvalidInputError: a URL contains a password. The message does not repeat it.
    """
    from wattfleet.common.addresses import has_password
    from wattfleet.core.errors import InvalidInputError

    if isinstance(value, str) and has_password(value):
        raise InvalidInputError(
            f"{option}: a password on the command line is in the process list and in the shell's history, so that"
            " others may have read it. Change it, and put the URL into a settings file that only its user can read"
            " (--config), or omit it from the URL if the database's client finds it elsewhere, such as in ~/.pgpass"
        )


def _type(annotation: Any) -> Any:
    """Return the type of a key without None."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = [each for each in get_args(annotation) if each is not type(None)]
    return annotation


def _click_type(type_: Any) -> Any:
    return click.Path(path_type=Path) if type_ is Path else type_
