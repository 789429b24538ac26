"""The environment variables of commands' options, beside those of a process's settings model.

The option `--site` of `wattfleet coordinator devices` has the variable `WATTFLEET_COORDINATOR_DEVICES_SITE`. An option
that states a variable of its own keeps it, such as `--coordinator`. One that should be given anew each time, such as
`--yes`, is declared with `allow_from_autoenv=False`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from wattfleet_io.settings.command import SettingsCommand
from wattfleet_io.settings.user_file import DefaultsFromFile, key_of, settable_options


def name_variables(command: click.Command, path: Sequence[str]) -> None:
    """Let the options of a command and of its subcommands be set by variables and by the user's settings file.

    Commands with a settings model are left alone: they read variables and a file of their own.

    Args:
        command: changed in place.
        path: the words that run it, such as `["wattfleet", "coordinator"]`.
    """
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            name_variables(each, [*path, name])
    elif not isinstance(command, SettingsCommand):
        command.context_class = DefaultsFromFile
        for option in settable_options(command.params):
            option.show_envvar = True
            if option.envvar is None:
                option.envvar = "_".join([*path, key_of(option)]).replace("-", "_").upper()


def variables_of(command: click.Command) -> Iterator[str]:
    """The variables of the options of a command and of its subcommands, without those of settings models."""
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from variables_of(each)
    else:
        for option in settable_options(command.params):
            if isinstance(option.envvar, str):
                yield option.envvar


def variables_beside(ctx: click.Context) -> frozenset[str]:
    """The variables of all commands in the top group of a command, such as all of `wattfleet coordinator ...`."""
    while ctx.parent is not None and ctx.parent.parent is not None:
        ctx = ctx.parent
    return frozenset(variables_of(ctx.command))
