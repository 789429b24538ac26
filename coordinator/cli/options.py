"""Options that several commands share, and how they print what they found."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coordinator.cli.client import CoordinatorClient

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
    from coordinator.cli.client import CoordinatorClient

    return CoordinatorClient(address)


def print_json(content: Any) -> None:
    """Print one JSON document."""
    print(_json(content, indent=2))


def _json(content: Any, indent: int | None = None) -> str:
    """JSON, in which what is no number is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(content), indent=indent, allow_nan=False)


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
            if json_:
                _watch_as_json(found, content)
            else:
                _watch_in_place(console, found, content, table)
        except KeyboardInterrupt:  # the usual way to end it
            if not console.is_terminal and not json_:
                console.line()  # what is shown last has no end of line there
    elif json_:
        print_json(found)
    else:
        console.print(table(found))


def _watch_as_json(found: Any, content: Callable[[], Any]) -> None:
    import time

    from coordinator.cli.client import CoordinatorUnreachableError, RequestFailedError

    print(_json(found), flush=True)
    while True:
        time.sleep(WATCHED_EVERY_S)
        try:
            print(_json(content()), flush=True)
        except (CoordinatorUnreachableError, RequestFailedError) as error:
            print(error, file=sys.stderr, flush=True)


def _watch_in_place(
    console: Any, found: Any, content: Callable[[], Any], table: Callable[[Any], RenderableType]
) -> None:
    import time

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from coordinator.cli.client import CoordinatorUnreachableError, RequestFailedError

    with Live(table(found), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.refresh()
            time.sleep(WATCHED_EVERY_S)
            try:
                found = content()
                live.update(table(found))
            except (CoordinatorUnreachableError, RequestFailedError) as error:
                live.update(Group(table(found), Text(str(error), style="bold red")))
