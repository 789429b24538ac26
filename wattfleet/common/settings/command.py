"""A command with the options of a settings model, `--config` and `--print-config`.

Click finds the value of each key: an option overrides an environment variable, and both override the file. The model
converts and checks the values. It is imported when the command's options are needed, so that other commands start
without pydantic.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import click
from click.core import ParameterSource
from typer.core import TyperCommand, TyperOption

from wattfleet.common.help import Help, settable_options

if TYPE_CHECKING:
    from wattfleet.common.settings.model import Key, Settings

_GIVEN, _CONFIG, _PRINTS = (f"wattfleet.common.settings.{name}" for name in ("given", "config", "prints"))
_WIDEST_CHOICES = 12

# Kubernetes sets these variables for a service with the prefix's name.
_SERVICE_LINK = re.compile(r"SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?")


class _KeyOption(TyperOption):
    """The option and the environment variable of a key. A key without an option has only the variable."""

    def __init__(self, key: Key, model: type[Settings]) -> None:
        type_ = _type(key.field.annotation)
        is_list = get_origin(type_) is tuple
        choices = list(get_args(type_)) if get_origin(type_) is Literal else []
        # Rich leaves little space for help beside a long list of choices.
        in_help = sum(map(len, choices)) > _WIDEST_CHOICES
        one_of = f" One of {', '.join(choices)}." if in_help else ""
        name = key.path.replace(".", "_")
        option = key.option or f"--{name}"
        super().__init__(
            param_decls=[name, f"{option}/--no-{option.removeprefix('--')}" if type_ is bool else option],
            envvar=model.variable_of(key.path),
            type=str if choices else _click_type(get_args(type_)[0] if is_list else type_),
            metavar="NAME" if in_help else f"[{'|'.join(choices)}]" if choices else None,
            is_flag=type_ is bool or None,
            autocompletion=(lambda ctx, args, incomplete: choices) if choices else None,
            multiple=is_list,
            default=None,
            help=f"{key.description}{one_of} {key.default_text}",
            hidden=not key.option,
            expose_value=False,
            callback=_note,
            rich_help_panel=model.title_of(key.group),
        )
        self.key = key

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Accept the option on the command line, if the key has one."""
        if self.key.option:
            super().add_to_parser(parser, ctx)

    def value_from_envvar(self, ctx: click.Context) -> str | None:
        """Return the variable as it is, since the model splits lists, at commas."""
        return self.resolve_envvar_value(ctx)

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Return the value as it is, since the model converts it, and names its origin in errors."""
        return value


class SettingsCommand(TyperCommand):
    """A command with an option for each key of its settings model that defines one.

    Subclasses state `model`; the command's function calls `effective`.
    """

    model: str
    """The location of the model, such as `coordinator.settings:CoordinatorSettings`."""

    context_class = Help

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the model's options, then the command's own."""
        from wattfleet.common.settings.model import keys_of

        model = self.settings_model()
        return [*(_KeyOption(key, model) for key in keys_of(model)), *_options(model), *super().get_params(ctx)]

    @property
    def prefix(self) -> str:
        """The beginning of its environment variables, for the help."""
        return self.settings_model().prefix

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
    from wattfleet.common.settings.model import as_toml, load, with_required_keys_optional

    command = ctx.command
    assert isinstance(command, SettingsCommand), "the command has settings"
    _require_known_variables(ctx, command)
    config, given = ctx.meta[_CONFIG], ctx.meta.get(_GIVEN, {})
    model = command.settings_model()
    if ctx.meta[_PRINTS]:
        click.echo(as_toml(load(with_required_keys_optional(model), config, given), ctx.command_path), nl=False)
        ctx.exit()
    return load(model, config, given).settings


def _options(model: type[Settings]) -> Iterator[click.Parameter]:
    def store(key: str) -> Any:
        return lambda ctx, param, value: ctx.meta.__setitem__(key, value)

    yield TyperOption(
        param_decls=["--config"],
        type=click.Path(path_type=Path),
        envvar=f"{model.prefix}CONFIG",
        help="Read all settings from this TOML file. Variables override it, and options override both. Default:"
        f" {model.prefix}CONFIG, else no file.",
        expose_value=False,
        callback=store(_CONFIG),
    )
    yield TyperOption(
        param_decls=["--print-config"],
        is_flag=True,
        allow_from_autoenv=False,
        help="Print all settings, with those that have no option, as commented TOML; then exit.",
        expose_value=False,
        callback=store(_PRINTS),
    )


def _note(ctx: click.Context, option: _KeyOption, value: Any) -> Any:
    """Record a value and its origin, if an option or a variable has set it."""
    source = ctx.get_parameter_source(str(option.name))
    if source is ParameterSource.COMMANDLINE:
        require_no_password(option.key.option, value)
        ctx.meta.setdefault(_GIVEN, {})[option.key.path] = value, option.key.option
    elif source is ParameterSource.ENVIRONMENT:
        ctx.meta.setdefault(_GIVEN, {})[option.key.path] = value, option.envvar
    return value


def _require_known_variables(ctx: click.Context, command: SettingsCommand) -> None:
    """Refuse environment variables that look like settings but are not."""
    from wattfleet.common.settings.model import suggestion
    from wattfleet.core.errors import InvalidInputError

    known = {str(each.envvar) for each in command.get_params(ctx) if each.envvar} | variables_beside(ctx)
    for name in sorted(os.environ):
        own = name.removeprefix(command.prefix)
        if own != name and name not in known and not _SERVICE_LINK.fullmatch(own):
            raise InvalidInputError(f"unknown environment variable {name}{suggestion(name, known)}")


def variables_of(command: click.Command) -> Iterator[str]:
    """Return the variables of a command's and its subcommands' options, without those of settings models."""
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from variables_of(each)
    else:
        for option in settable_options(command.params):
            if isinstance(option.envvar, str):
                yield option.envvar


def variables_beside(ctx: click.Context) -> frozenset[str]:
    """Return the variables of all commands in a command's top group, such as all of `wattfleet coordinator ...`."""
    while ctx.parent is not None and ctx.parent.parent is not None:
        ctx = ctx.parent
    return frozenset(variables_of(ctx.command))


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
