"""Tables for terminals of any width: what does not fit is left out and said, or comes below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

_MOST_NAMES = 12
_MOST_FOR_NAMES = 32


@dataclass(frozen=True)
class Way:
    """One way to show something.

    Attributes:
        table: what must not be cut off.
        room: columns of the terminal that are needed beside it.
        parts: all that is shown, one below the other; the table itself, unless something else is given.
    """

    table: Table
    room: int = 0
    parts: Sequence[RenderableType] = ()


class Fitting:
    """The first of several ways to show the same that the terminal is wide enough for, or else the last."""

    def __init__(self, *ways: Callable[[], Way]) -> None:
        """Show one of several ways, the widest first."""
        self._ways = ways

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Show what fits."""
        from rich.measure import Measurement

        unbounded = options.update(max_width=10_000)
        for each in self._ways:
            way = each()
            if Measurement.get(console, unbounded, way.table).maximum + way.room <= options.max_width:
                break
        yield from way.parts or [way.table]


def columns(left: Iterable[str] = (), right: Iterable[str] = (), after: Iterable[str] = ()) -> Table:
    """A table without lines, of columns of words, of numbers, and of words again."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, no_wrap=True, justify="right")
    for name in after:
        table.add_column(name, no_wrap=True)
    return table


def grouped(said: Iterable[tuple[str, str]], style: str = "") -> RenderableType:
    """What is said of devices, with all devices of which the same is said in one row.

    Args:
        said: pairs of a device's id and what is said of it.
        style: of the words.
    """
    from rich.table import Table
    from rich.text import Text

    groups: dict[str, list[str]] = {}
    for device_id, words in said:
        groups.setdefault(words, []).append(device_id)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("devices", overflow="fold", max_width=_MOST_FOR_NAMES)
    table.add_column("words", overflow="fold")
    for words, ids in groups.items():
        more = f" and {len(ids) - _MOST_NAMES:,} more" if len(ids) > _MOST_NAMES else ""
        table.add_row(Text(", ".join(ids[:_MOST_NAMES]) + more), Text(words, style=style))
    return table
