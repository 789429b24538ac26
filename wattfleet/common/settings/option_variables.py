"""The environment variables of commands' options, in addition to those of a process's settings model.

The option `--site` of `wattfleet coordinator devices` has the variable `WATTFLEET_COORDINATOR_DEVICES_SITE`. An option
with its own variable keeps it, such as `--coordinator`. An option that has to be given each time, such as `--yes`, is
declared with `allow_from_autoenv=False`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from wattfleet.common.help import Help, prefix_of, settable_options
from wattfleet.common.settings.command import SettingsCommand
from wattfleet.common.settings.user_file import DefaultsFromFile, key_of


def name_variables(command: click.Command, path: Sequence[str]) -> None:
    """Let the options of a command and of its subcommands be set by variables and by the user's settings file.

    Commands with a settings model are not changed, since they read their own variables and file.

    Args:
        command: the command, changed in place.
        path: the words that run it, such as `["wattfleet", "coordinator"]`.
    """
    if isinstance(command, click.Group):
        command.context_class = Help
        for name, each in command.commands.items():
            name_variables(each, [*path, name])
    elif not isinstance(command, SettingsCommand):
        command.context_class = DefaultsFromFile
        for option in settable_options(command.params):
            option.show_envvar = False  # the end of the help names all of them
            if option.envvar is None:
                option.envvar = prefix_of(path) + key_of(option).upper()


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
