"""Options that several commands share, the coordinator of this machine, and printing once or repeatedly (`--watch`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from click.core import ParameterSource
from typer.core import TyperCommand, TyperOption

from coordinator.lock_file import noted_address
from wattfleet.common.addresses import (
    COORDINATOR_VARIABLE,
    IDENTITY_VARIABLE,
    INSECURE_VARIABLE,
    OPERATOR_FOLDER,
    reachable_here,
)
from wattfleet.common.console import json_text, print_json, print_line, terminal
from wattfleet.common.parsing import parse_toml
from wattfleet.common.settings.user_file import config_folder, in_home, user_folder
from wattfleet.core.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from coordinator.cli.client import CoordinatorClient


# --- This machine -----------------------------------------------------------------------------------------------------
# Finds the coordinators of this machine: their operators' identities, and the addresses at which they serve
# operators.
#
# A coordinator notes its address in the lock file of its store, and in its first operator's identity. Its settings
# say where these are. They are read without pydantic, since the operator's commands also work without the extra
# `coordinator`.


PREFIX = "WATTFLEET_COORDINATOR_"
INSTALLED_SETTINGS, INSTALLED_FOLDER = Path("/etc/wattfleet/coordinator.toml"), Path("/var/lib/wattfleet-coordinator")
"""Equal to those of `coordinator.systemd.installation`, which imports the settings."""
DEFAULTS = {
    ("identity", "directory"): str(OPERATOR_FOLDER.parent),
    ("store", "location"): "wattfleet-coordinator.db",
    ("server", "address"): "",
    ("identity", "operator_address"): "",
}
"""The settings that are read; an address is empty if it is not set. Equal to those of `coordinator.settings`."""


@dataclass(frozen=True)
class LocalCoordinator:
    """What the settings of a coordinator on this machine say.

    Attributes:
        folder: the folder in which it runs.
        file: its settings file; None without one.
        variables: its environment variables.
    """

    folder: Path
    file: Path | None
    variables: Mapping[str, str]

    @property
    def operator_folder(self) -> Path:
        """The folder of its first operator's identity."""
        return self.folder / self._setting("identity", "directory")[0] / OPERATOR_FOLDER.name

    def address(self) -> tuple[str, str] | None:
        """Return the host:port at which it serves operators, and how that is known; None if it is unknown."""
        store = self._setting("store", "location")[0].removeprefix("sqlite:///")
        if "://" not in store and (noted := noted_address(self.folder / store)) is not None:
            return noted, f"where the coordinator of {self.folder / store} served last"
        for group, key in (("identity", "operator_address"), ("server", "address")):
            configured, origin = self._setting(group, key)
            try:
                address = reachable_here(configured)
            except InvalidInputError:
                continue
            if not address.endswith(":0"):
                return address, f"as {origin} says"
        return None

    def _setting(self, group: str, key: str) -> tuple[str, str]:
        """Return a setting, and the variable or file that has set it."""
        variable = f"{PREFIX}{group}_{key}".upper()
        if value := self.variables.get(variable):
            return value, variable
        table = self._tables().get(group)
        value = table.get(key) if isinstance(table, dict) else None
        return (value, str(self.file)) if isinstance(value, str) else (DEFAULTS[group, key], "")

    def _tables(self) -> dict[str, Any]:
        try:
            return {} if self.file is None else parse_toml(self.file.read_bytes())
        except (OSError, ValueError):  # the command can do without; `serve` explains what is wrong with the file
            return {}


def local_coordinators() -> Iterator[LocalCoordinator]:
    """Return the coordinator of the current folder, then that of the installed service if this user may read it."""
    named = os.environ.get(f"{PREFIX}CONFIG")
    yield LocalCoordinator(Path(), Path(named) if named else None, os.environ)
    if os.access(INSTALLED_SETTINGS, os.R_OK) and os.access(INSTALLED_FOLDER, os.R_OK | os.X_OK):
        yield LocalCoordinator(INSTALLED_FOLDER, INSTALLED_SETTINGS, {})


# --- Options ----------------------------------------------------------------------------------------------------------
# Options that several commands share, and printing once or repeatedly (`--watch`).

_DEFAULT_ADDRESS = "127.0.0.1:7070"
"""Equals `wattfleet.common.identity.channels.DEFAULT_ADDRESS`, whose module is too slow to import here."""

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
    from wattfleet.common.identity.channels import named_folder

    here, *installed = [each.operator_folder for each in local_coordinators()]
    return named_folder(named, here, user_folder(), *installed)


def _coordinator_of(folder: Path | None) -> tuple[str, str]:
    """Return the coordinator's host:port if the user names none, and how it is known."""
    from wattfleet.common.identity.identity_folder import read_identity

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
    from wattfleet.common.identity.channels import Endpoint
    from wattfleet.common.identity.renewal import renew_if_due

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


# --- Watching ---------------------------------------------------------------------------------------------------------
# The display of `--watch`: a table that is redrawn repeatedly, and scrolls if it is higher than the terminal.

WATCHED_EVERY_S = 2.0
_LOWEST = 4
"""The fewest lines of a terminal in which something is shown."""


class Viewport:
    """The visible part of content that is higher than the terminal, above a line with the time and the visible range.

    Attributes:
        top: the number of lines above the visible part.
        content: what is shown.
    """

    def __init__(self, content: RenderableType, now: Callable[[], datetime] = datetime.now) -> None:
        """Begin at the top.

        Args:
            content: what is shown at first.
            now: returns the local time.
        """
        self.top = 0
        self.content = content
        self._now = now
        self._page = 1
        self._lines = 0

    def press(self, key: str) -> None:
        """Scroll if the key is a scroll key; the next drawing keeps the position within the content."""
        self.top = {
            "up": self.top - 1,
            "down": self.top + 1,
            "page up": self.top - self._page,
            "page down": self.top + self._page,
            "home": 0,
            "end": self._lines,
        }.get(key, self.top)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the visible part and the line below it."""
        from rich.segment import SegmentLines
        from rich.text import Text

        lines = console.render_lines(self.content, options.update(height=None), pad=False)
        self._lines, self._page = len(lines), max(1, max(_LOWEST, console.size.height) - 2)
        self.top = max(0, min(self.top, len(lines) - self._page))
        shown = lines[self.top : self.top + self._page]
        yield SegmentLines(shown, new_lines=True)
        parts = [f"{self._now():%H:%M:%S}"]
        if len(shown) < len(lines):
            parts.append(f"lines {self.top + 1:,} to {self.top + len(shown):,} of {len(lines):,}")
            parts.append("arrows, space and b scroll")
        parts.append("q ends")
        yield Text("; ".join(parts), style="dim", no_wrap=True, overflow="crop", end="")


def watch_as_json(found: Any, content: Callable[[], Any]) -> None:
    """Print the result of a query every two seconds, one line each; connection errors go to standard error.

    Args:
        found: the first result.
        content: runs the query.
    """
    from coordinator.cli.client import RequestFailedError
    from wattfleet.common.coordinator_channel import CoordinatorUnreachableError

    print(json_text(found), flush=True)
    while True:
        time.sleep(WATCHED_EVERY_S)
        try:
            print(json_text(content()), flush=True)
        except (CoordinatorUnreachableError, RequestFailedError) as error:
            print_line(str(error), to_stderr=True)


def watch_in_place(
    console: Console,
    found: Any,
    content: Callable[[], Any],
    table: Callable[[Any], RenderableType],
    warning: str | None = None,
) -> None:
    """Draw the result of a query every two seconds, until Ctrl-C or q.

    Args:
        console: where it is drawn.
        found: the first result.
        content: runs the query. While the coordinator is away, the last result stays, with the error below it.
        table: formats the result.
        warning: stays above the table.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from coordinator.cli.client import RequestFailedError
    from wattfleet.common.console import keyboard
    from wattfleet.common.coordinator_channel import CoordinatorUnreachableError

    def screen(*problems: str) -> RenderableType:
        above = [] if warning is None else [Text(f"warning: {warning}", style="bold red")]
        return Group(*above, *(Text(each, style="bold red") for each in problems), table(found))

    view = Viewport(screen())
    shown: RenderableType = view if console.is_terminal else view.content
    with keyboard() as wait_for_key, Live(shown, console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.refresh()
            until_s = time.monotonic() + WATCHED_EVERY_S
            while (key := wait_for_key(max(0.0, until_s - time.monotonic()))) is not None:
                if key == "quit":
                    return
                view.press(key)
                live.refresh()
            try:
                found = content()
                view.content = screen()
            except (CoordinatorUnreachableError, RequestFailedError) as error:
                view.content = screen(str(error))
            live.update(view if console.is_terminal else view.content)
