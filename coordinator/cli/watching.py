"""The display of `--watch`: a table that is redrawn repeatedly, and scrolls if it is higher than the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from wattfleet_io.console import json_text, print_line

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

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
    from wattfleet_io.coordinator_channel import CoordinatorUnreachableError

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
    from wattfleet_io.coordinator_channel import CoordinatorUnreachableError
    from wattfleet_io.keyboard import keyboard

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
