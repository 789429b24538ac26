"""Options that several commands share, and how they show what they found."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coordinator.client import CoordinatorClient

DEFAULT_ADDRESS = "127.0.0.1:7070"
WATCHED_EVERY_S = 2.0

CoordinatorOption = Annotated[str, typer.Option("--coordinator", help="host:port of the coordinator.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")]


def connected(address: str) -> CoordinatorClient:
    """A connection to the coordinator that `--coordinator` names.

    Raises:
        InvalidInputError: it is no address.
    """
    from coordinator.client import CoordinatorClient

    return CoordinatorClient(address)


def print_json(content: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(content, indent=2))


def show(content: Callable[[], Any], table: Callable[[Any], RenderableType], json_: bool, watch: bool) -> None:
    """Print what a look finds, once or again and again.

    Args:
        content: looks; what it finds can be written as JSON.
        table: the same for people.
        json_: print JSON; while watching, a line for every look.
        watch: look until Ctrl-C. Then a coordinator that goes away is waited for, if it was there at first.
    """
    from rich.console import Console

    console = Console(highlight=False)
    found = content()
    if watch:
        try:
            _watch(console, found, content, table, json_)
        except KeyboardInterrupt:  # the usual way to end it
            if not console.is_terminal and not json_:
                console.line()  # what is shown last has no end of line there
    elif json_:
        print_json(found)
    else:
        console.print(table(found))


def _watch(
    console: Any, found: Any, content: Callable[[], Any], table: Callable[[Any], RenderableType], json_: bool
) -> None:
    import time

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from coordinator.client import CoordinatorUnreachableError, RequestFailedError

    if json_:
        while True:
            print(json.dumps(found), flush=True)
            time.sleep(WATCHED_EVERY_S)
            found = content()
    with Live(table(found), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.refresh()
            time.sleep(WATCHED_EVERY_S)
            try:
                found = content()
                live.update(table(found))
            except (CoordinatorUnreachableError, RequestFailedError) as error:
                live.update(Group(table(found), Text(str(error), style="bold red")))


def number(value: float | None, digits: int = 1) -> str:
    """A number in a table; a dash where it is not known."""
    return "-" if value is None else f"{value:,.{digits}f}"


def duration(seconds: float | None) -> str:
    """Seconds in a table, as minutes and hours where they are many."""
    if seconds is None:
        return "-"
    if seconds < 600:
        return f"{seconds:,.1f} s"
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{minutes} min" if minutes < 120 else f"{hours:,.1f} h"
