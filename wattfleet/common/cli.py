"""The `wattfleet` command, with the groups of all installed packages.

The options of commands can also be set by environment variables. The option `--site` of `wattfleet coordinator devices`
has the variable `WATTFLEET_COORDINATOR_DEVICES_SITE`. An option with its own variable keeps it, such as
`--coordinator`. An option that has to be given each time, such as `--yes`, is declared with `allow_from_autoenv=False`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points

import click
import typer

from wattfleet.common.console import plain_text, print_line
from wattfleet.common.help import Help, prefix_of, settable_options
from wattfleet.common.settings.command import SettingsCommand
from wattfleet.common.settings.user_file import DefaultsFromFile, key_of, with_origin
from wattfleet.common.tasks import print_completion
from wattfleet.common.version import show_version
from wattfleet.core.errors import WattfleetError

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1

_MAX_ERROR_LENGTH = 5_000
"""Maximum of characters shown of an error, since it may quote a file."""

_NAME = "wattfleet"

_EXTRAS = {
    "advise": "agent",
    "evaluate": "simulation",
    "join": "",
    "reference": "simulation",
    "simulate": "simulation",
}
"""The extra with a command's dependencies, if it is not named like the command; empty if none is needed."""


class InstalledCommands(click.Group):
    """Commands registered by entry points; each is imported only when it is used."""

    context_class = Help

    def _entry_points(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group="wattfleet.commands")}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all registered commands, and of those in every installation."""
        return sorted([*self._entry_points(), *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; if its dependencies are missing, calling it reports how to install them."""
        entry = self._entry_points().get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        try:
            return _built(entry)
        except ModuleNotFoundError as error:
            return _not_installed(cmd_name, error.name or str(error))

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; its errors name a missing dependency, or the file with an invalid value."""
        try:
            return super().invoke(ctx)
        except click.BadParameter as error:
            raise with_origin(error) from None
        except ModuleNotFoundError as error:
            raise _missing(ctx.invoked_subcommand or "", error.name or str(error)) from None


@cache
def _built(entry: EntryPoint) -> click.Command:
    """Import a command and build its options, once in a process, since groups of many commands take 0.1 s."""
    command: click.Command = typer.main.get_command(entry.load())
    command.name = entry.name
    name_variables(command, [_NAME, entry.name])
    return command


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


def installation_of(name: str) -> str:
    """Return the command that installs the dependencies of a group of commands."""
    extra = _EXTRAS.get(name, name)
    return f"pip install 'wattfleet[{extra}]'" if extra else "pip install wattfleet"


def _missing(name: str, module: str) -> click.ClickException:
    return click.ClickException(f"{name} needs {module}: {installation_of(name)}")


def _not_installed(name: str, module: str) -> click.Command:
    @click.command(
        name,
        help=f"(needs `{installation_of(name)}`)",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def command() -> None:
        raise _missing(name, module)

    return command


@click.command(cls=InstalledCommands, no_args_is_help=True)
@click.version_option(package_name="wattfleet")
def wattfleet() -> None:
    """Federated learning on a fleet of NVIDIA Jetsons under a power budget."""


for own_command in (print_completion, show_version):
    name_variables(own_command, [_NAME, str(own_command.name)])
    wattfleet.add_command(own_command)


def main() -> None:
    """Run the command. Errors are printed as one line; the exit code is 2 for invalid input, and 1 for other errors."""
    # Otherwise, gRPC's core bypasses the log and its limits with a line for each failed handshake, as often as
    # strangers connect.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        wattfleet(prog_name=_NAME)
    except WattfleetError as error:
        print_error(plain_text(f"wattfleet: {error}", _MAX_ERROR_LENGTH))
        sys.exit(exit_code(error))
    except UnicodeEncodeError as error:
        # Python decodes invalid UTF-8 in an argument to lone surrogates, which cannot be printed or sent.
        if error.object not in sys.argv:
            raise
        click.echo(f"wattfleet: {os.fsencode(error.object)!r} is not valid UTF-8: pass it in UTF-8", err=True)
        sys.exit(EXIT_BAD_INPUT)


def print_error(line: str) -> None:
    """Print a line to standard error; a service that logs JSON there logs it."""
    from wattfleet.common.logs import (
        logs_json,  # imported only after the command has run, so that commands start faster
    )

    if logs_json():
        logging.getLogger(__name__).error("%s", line)
    else:
        print_line(line, to_stderr=True)


def exit_code(error: WattfleetError) -> int:
    """Return the exit code for an error: 2 if the input must be corrected, otherwise 1."""
    return EXIT_BAD_INPUT if error.caller_must_correct else EXIT_FAILED
