"""The `wattfleet` command; its groups come from the packages that are installed."""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint, entry_points

import click
import typer

from wattfleet.errors import WattfleetError

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1

_EXTRAS = {"simulate": "simulation"}
"""The extra that a command's dependencies come with, where it is not named like the command."""


class InstalledCommands(click.Group):
    """Commands announced by entry points, imported only when they are asked for."""

    def _entry_points(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group="wattfleet.commands")}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all announced commands."""
        return sorted(self._entry_points())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; one whose dependencies are not installed says so when it is called."""
        entry = self._entry_points().get(cmd_name)
        if entry is None:
            return None
        try:
            command: click.Command = typer.main.get_command(entry.load())
        except ModuleNotFoundError as error:
            return _not_installed(cmd_name, error.name or str(error))
        command.name = cmd_name
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; one that finds a dependency missing while it runs says how to install it."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise _missing(ctx.invoked_subcommand or "", error.name or str(error)) from None


def _install(name: str) -> str:
    return f"pip install 'wattfleet[{_EXTRAS.get(name, name)}]'"


def _missing(name: str, module: str) -> click.ClickException:
    return click.ClickException(f"{name} needs {module}: {_install(name)}")


def _not_installed(name: str, module: str) -> click.Command:
    @click.command(
        name,
        help=f"(needs `{_install(name)}`)",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def command() -> None:
        raise _missing(name, module)

    return command


@click.command(cls=InstalledCommands, no_args_is_help=True)
@click.version_option(package_name="wattfleet")
def wattfleet() -> None:
    """Federated learning on a fleet of NVIDIA Jetsons under a power budget."""


def main() -> None:
    """Run the command; bad input ends with 2, anything else that failed with 1, each with one line that says why."""
    try:
        wattfleet(prog_name="wattfleet")
    except WattfleetError as error:
        click.echo(f"wattfleet: {error}", err=True)
        sys.exit(exit_code(error))
    except UnicodeEncodeError as error:
        # Python keeps the bytes of an argument that are not UTF-8 as lone surrogates, which no message can hold.
        if error.object not in sys.argv:
            raise
        click.echo(f"wattfleet: {os.fsencode(error.object)!r} is no UTF-8: write it otherwise", err=True)
        sys.exit(EXIT_BAD_INPUT)


def exit_code(error: WattfleetError) -> int:
    """The exit code for an error: input that has to be corrected, or a failure on the way."""
    return EXIT_BAD_INPUT if error.caller_must_correct else EXIT_FAILED
