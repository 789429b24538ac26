"""Tables for terminals of any width: columns that do not fit are left out, with a note."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

_MAX_IDS = 12
_MAX_IDS_WIDTH = 32


@dataclass(frozen=True)
class Layout:
    """One of several layouts of the same content.

    Attributes:
        table: the table; it must fit without being cut off.
        room: additional terminal columns that the layout needs.
        parts: what is printed, from top to bottom; empty to print only the table.
    """

    table: Table
    room: int = 0
    parts: Sequence[RenderableType] = ()


class Fitting:
    """The first of several layouts that fits the terminal, or else the last."""

    def __init__(self, *layouts: Callable[[], Layout]) -> None:
        """Choose among layouts, the widest first."""
        self._layouts = layouts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the first layout that fits."""
        from rich.measure import Measurement

        unbounded = options.update(max_width=10_000)
        for each in self._layouts:
            layout = each()
            if Measurement.get(console, unbounded, layout.table).maximum + layout.room <= options.max_width:
                break
        yield from layout.parts or [layout.table]


def columns(left: Iterable[str] = (), right: Iterable[str] = (), after: Iterable[str] = ()) -> Table:
    """Create a table without lines: columns of words, of numbers, and again of words."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, no_wrap=True, justify="right")
    for name in after:
        table.add_column(name, no_wrap=True)
    return table


def grouped(reasons: Iterable[tuple[str, str]], style: str = "") -> RenderableType:
    """A table of devices with their reasons; devices with the same reason share a row.

    Args:
        reasons: pairs of a device's id and its reason.
        style: the style of the reasons.
    """
    from rich.table import Table
    from rich.text import Text

    groups: dict[str, list[str]] = {}
    for device_id, words in reasons:
        groups.setdefault(words, []).append(device_id)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("devices", overflow="fold", max_width=_MAX_IDS_WIDTH)
    table.add_column("words", overflow="fold")
    for words, ids in groups.items():
        more = f" and {len(ids) - _MAX_IDS:,} more" if len(ids) > _MAX_IDS else ""
        table.add_row(Text(", ".join(ids[:_MAX_IDS]) + more), Text(words, style=style))
    return table
