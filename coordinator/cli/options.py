"""Options that several commands share, and printing once or repeatedly (`--watch`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattfleet_io.console import json_text, print_json, print_line, terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coordinator.cli.client import CoordinatorClient

DEFAULT_ADDRESS = "127.0.0.1:7070"
WATCHED_EVERY_S = 2.0

CoordinatorOption = Annotated[
    str,
    typer.Option(
        "--coordinator",
        help=f"Connect to the coordinator at this host:port. Default: {DEFAULT_ADDRESS}.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Refresh every two seconds until Ctrl-C.")]


def connected(address: str) -> CoordinatorClient:
    """A connection to the coordinator that `--coordinator` names.

    Raises:
        InvalidInputError: it is not host:port.
    """
    from coordinator.cli.client import CoordinatorClient

    return CoordinatorClient(address)


def show(content: Callable[[], Any], table: Callable[[Any], RenderableType], json_: bool, watch: bool) -> None:
    """Print what a query finds, once or repeatedly.

    Args:
        content: runs the query; its result can be written as JSON.
        table: formats the result for people.
        json_: print JSON; while watching, one line for each query.
        watch: refresh until Ctrl-C. A coordinator that answered at first and then goes away is waited for.
    """
    console = terminal()
    found = content()
    if watch:
        try:
            if json_:
                _watch_asjson_text(found, content)
            else:
                _watch_in_place(console, found, content, table)
        except KeyboardInterrupt:  # the usual way to end it
            if not console.is_terminal and not json_:
                console.line()  # the last table has no end of line there
    elif json_:
        print_json(found)
    else:
        console.print(table(found))


def _watch_asjson_text(found: Any, content: Callable[[], Any]) -> None:
    import time

    from coordinator.cli.client import RequestFailedError
    from wattfleet_io.coordinator_channel import CoordinatorUnreachableError

    print(json_text(found), flush=True)
    while True:
        time.sleep(WATCHED_EVERY_S)
        try:
            print(json_text(content()), flush=True)
        except (CoordinatorUnreachableError, RequestFailedError) as error:
            print_line(str(error), to_stderr=True)


def _watch_in_place(
    console: Any, found: Any, content: Callable[[], Any], table: Callable[[Any], RenderableType]
) -> None:
    import time

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from coordinator.cli.client import RequestFailedError
    from wattfleet_io.coordinator_channel import CoordinatorUnreachableError

    with Live(table(found), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.refresh()
            time.sleep(WATCHED_EVERY_S)
            try:
                found = content()
                live.update(table(found))
            except (CoordinatorUnreachableError, RequestFailedError) as error:
                live.update(Group(table(found), Text(str(error), style="bold red")))
