"""A command whose options come from a settings model, beside `--config` and `--print-config`.

The model is imported when the command's options are needed, so that other commands start without pydantic.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import click
from typer.core import TyperCommand, TyperOption

if TYPE_CHECKING:
    from wattfleet_io.settings.model import Key, Settings

_GIVEN = "wattfleet_io.settings.given"


class SettingsCommand(TyperCommand):
    """A command with an option for each key of its settings model that names one.

    Subclasses state `model` and `prefix`; the command's function calls `effective`.
    """

    model: str
    """Where the model is, such as `coordinator.settings:CoordinatorSettings`."""
    prefix: str
    """Of the environment variables, such as `WATTFLEET_COORDINATOR_`."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The model's options, then the command's own."""
        return [*_options(self.settings_model(), self.prefix), *super().get_params(ctx)]

    @classmethod
    def settings_model(cls) -> type[Settings]:
        """Import the model."""
        module, _, name = cls.model.partition(":")
        model: type[Settings] = getattr(importlib.import_module(module), name)
        return model


def effective(ctx: click.Context) -> Any:
    """The settings in effect for a `SettingsCommand`; with `--print-config`, print them and exit.

    Raises:
        InvalidInputError: a key is unknown, a value cannot be used, or the file cannot be read.
    """
    from wattfleet_io.settings.loading import load
    from wattfleet_io.settings.toml_text import as_toml

    command = ctx.command
    assert isinstance(command, SettingsCommand), "the command has settings"
    given: dict[str, Any] = ctx.meta.get(_GIVEN, {}).copy()
    config, prints = given.pop("config", None), given.pop("print-config", False)
    loaded = load(command.settings_model(), command.prefix, given, config)
    if prints:
        click.echo(as_toml(loaded, ctx.command_path), nl=False)
        ctx.exit()
    return loaded.settings


def _options(model: type[Settings], prefix: str) -> list[click.Parameter]:
    from wattfleet_io.settings.model import keys_of

    found: list[click.Parameter] = [_option(key) for key in keys_of(model) if key.option]
    found.append(
        TyperOption(
            param_decls=["--config"],
            type=click.Path(path_type=Path),
            help=f"Read settings from this TOML file. Options override environment variables ({prefix}...), which"
            f" override the file. Default: {prefix}CONFIG, else no file.",
            expose_value=False,
            callback=_note("config"),
        )
    )
    found.append(
        TyperOption(
            param_decls=["--print-config"],
            is_flag=True,
            help="Print the effective settings as commented TOML, then exit.",
            expose_value=False,
            callback=_note("print-config"),
        )
    )
    return found


def _option(key: Key) -> TyperOption:
    type_ = _type(key.field.annotation)
    is_list = get_origin(type_) is tuple
    is_flag = type_ is bool
    return TyperOption(
        param_decls=[f"{key.option}/--no-{key.option.removeprefix('--')}" if is_flag else key.option],
        type=_click_type(get_args(type_)[0] if is_list else type_),
        multiple=is_list,
        # None tells "not given" from a value that happens to be the default.
        default=None,
        help=f"{key.description} Default: {key.default_text}.",
        expose_value=False,
        callback=_note(key.path),
    )


def _note(path: str) -> Any:
    """A callback that keeps a value given on the command line."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if value is not None and value != ():
            ctx.meta.setdefault(_GIVEN, {})[path] = value
        return value

    return callback


def _type(annotation: Any) -> Any:
    """The type of a key without None."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = [each for each in get_args(annotation) if each is not type(None)]
    return annotation


def _click_type(type_: Any) -> Any:
    if get_origin(type_) is Literal:
        return click.Choice(list(get_args(type_)))
    return click.Path(path_type=Path) if type_ is Path else type_
