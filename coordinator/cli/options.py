"""Options that several commands share, and printing once or repeatedly (`--watch`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from click.core import ParameterSource
from typer.core import TyperCommand, TyperOption

from coordinator.cli.watching import watch_as_json, watch_in_place
from wattfleet_io.connection_variables import COORDINATOR_VARIABLE, IDENTITY_VARIABLE, INSECURE_VARIABLE
from wattfleet_io.console import print_json, print_line, terminal
from wattfleet_io.settings.user_file import config_folder, in_home

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coordinator.cli.client import CoordinatorClient

_DEFAULT_ADDRESS = "127.0.0.1:7070"
"""Equals `wattfleet_identity.endpoint.DEFAULT_ADDRESS`, whose module is too slow to import here."""

OPERATOR_OR_USER = f"./wattfleet-identity/operator or {in_home(config_folder() / 'identity')}, if there is one"

_CONNECTION = "coordinator.cli.connection"
_WARNING, _ORIGIN = f"{_CONNECTION}.warning", f"{_CONNECTION}.origin"
_FILE = "as your settings file says"

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
WatchOption = Annotated[
    bool, typer.Option("--watch", help="Refresh every two seconds until Ctrl-C or q; arrows, space and b scroll.")
]


class ClientCommand(TyperCommand):
    """A command with the options for the connection to a running coordinator; its function calls `connected`."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own options, then those for the connection."""
        *own, help_ = super().get_params(ctx)
        return [*own, *_connection_options(), help_]


def _connection_options() -> Iterator[click.Parameter]:
    yield TyperOption(
        param_decls=["--coordinator"],
        type=str,
        envvar=COORDINATOR_VARIABLE,
        help="Connect to the coordinator at this host:port. Default: the one that the identity names, or else that of"
        f" this folder, or {_DEFAULT_ADDRESS}.",
        expose_value=False,
        callback=_note,
        rich_help_panel="Connection",
    )
    yield TyperOption(
        param_decls=["--identity"],
        type=click.Path(path_type=Path),
        envvar=IDENTITY_VARIABLE,
        help=f"Connect with the key and the certificate in this folder. Default: {OPERATOR_OR_USER}.",
        expose_value=False,
        callback=_note,
        rich_help_panel="Connection",
    )
    yield TyperOption(
        param_decls=["--insecure"],
        is_flag=True,
        envvar=INSECURE_VARIABLE,
        help="Connect in plaintext if there is no identity, even to another machine. Default: no.",
        expose_value=False,
        callback=_note,
        rich_help_panel="Connection",
    )


def _note(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    ctx.meta[f"{_CONNECTION}.{param.name}"] = value
    if param.name == "coordinator":
        source = ctx.get_parameter_source("coordinator")
        origins = {ParameterSource.ENVIRONMENT: f"as {COORDINATOR_VARIABLE} says", ParameterSource.DEFAULT_MAP: _FILE}
        ctx.meta[_ORIGIN] = "" if source is None else origins.get(source, "")
    return value


def own_identity(named: Path | None) -> Path | None:
    """Return the folder with the identity of this user: the named one, an operator's on this machine, or the user's.

    Raises:
        InvalidInputError: the named folder has no identity, or an identity is damaged.
    """
    from coordinator.cli.this_machine import local_coordinators
    from wattfleet_identity.endpoint import named_folder, user_folder

    here, *installed = [each.operator_folder for each in local_coordinators()]
    return named_folder(named, here, user_folder(), *installed)


def _coordinator_of(folder: Path | None) -> tuple[str, str]:
    """Return the coordinator's host:port if the user names none, and how it is known.

    Raises:
        InvalidInputError: the identity is damaged.
    """
    from coordinator.cli.this_machine import local_coordinators
    from wattfleet_identity.identity_folder import read_identity

    identity = None if folder is None else read_identity(folder)
    if folder is not None and identity is not None and identity.coordinator:
        return identity.coordinator, f"the address in {in_home(folder)}"
    found = (each.address() for each in local_coordinators())
    return next(filter(None, found), (_DEFAULT_ADDRESS, "the default address"))


def connected() -> CoordinatorClient:
    """Connect to the coordinator that the options of a `ClientCommand` name.

    A certificate that is due is renewed first.

    Raises:
        InvalidInputError: the address is not host:port, the identity is absent or damaged, or plaintext would leave
            this machine although it must not.
    """
    from coordinator.cli.client import CoordinatorClient
    from wattfleet_identity.endpoint import Endpoint
    from wattfleet_identity.renewal import renew_if_due

    given = click.get_current_context().meta
    folder = own_identity(given[f"{_CONNECTION}.identity"])
    address, origin = given[f"{_CONNECTION}.coordinator"], given[_ORIGIN]
    if address is None:
        address, origin = _coordinator_of(folder)
    endpoint = Endpoint.of(address, folder, given[f"{_CONNECTION}.insecure"])
    given[_WARNING] = endpoint.warning
    if endpoint.warning is not None:
        print_line(f"warning: {endpoint.warning}", to_stderr=True)
    if (problem := renew_if_due(endpoint)) is not None:
        print_line(f"warning: {problem}", to_stderr=True)
    return CoordinatorClient(endpoint, origin=origin)


def show(content: Callable[[], Any], table: Callable[[Any], RenderableType], json_: bool, watch: bool) -> None:
    """Print the result of a query, once or repeatedly.

    Args:
        content: runs the query; its result can be written as JSON.
        table: formats the result for people.
        json_: print JSON; while watching, one line for each query.
        watch: refresh until Ctrl-C. If a coordinator answers at first and then disappears, the command waits for it.
    """
    console = terminal()
    found = content()
    if watch:
        try:
            if json_:
                watch_as_json(found, content)
            else:
                warning = click.get_current_context().meta.get(_WARNING)
                watch_in_place(console, found, content, table, warning)
        except KeyboardInterrupt:  # the usual way to stop watching
            if not console.is_terminal and not json_:
                console.line()  # the last table has no end of line there
    elif json_:
        print_json(found)
    else:
        console.print(table(found))
