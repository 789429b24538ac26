"""Tables for terminals of any width.

A table that is too wide breaks its headings, then leaves out the columns that matter least, with a note, and folds what
is left. Nothing is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

_LEAST_TEXT = 16
"""Least columns of the terminal for a text that goes over several lines."""
_LONG_NAME = 30
"""Names up to this length go over several lines only where a table has no column left to leave out."""
_LEAST_NAME = 6
_MAX_IDS = 12
_MAX_IDS_WIDTH = 32


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: the heading; it may have several lines.
        is_number: whether the cells are numbers, which never go over several lines.
        folds: whether the cells are texts that may go over several lines in any terminal.
        rank: where the table is too wide, the columns with the highest rank are left out first, all of the same rank
            together; 0 is never left out.
    """

    name: str
    is_number: bool = False
    folds: bool = False
    rank: int = 0

    @property
    def title(self) -> str:
        """The heading in one line."""
        return " ".join(self.name.split())

    def heading(self, width: int) -> str:
        """The heading, with a line for each word if it is too wide."""
        return self.name if max(map(len, self.name.split("\n"))) <= width else "\n".join(self.name.split())


def numbers(name: str, rank: int = 0) -> Column:
    """Return a column of numbers."""
    return Column(name, is_number=True, rank=rank)


def texts(name: str, rank: int = 0) -> Column:
    """Return a column of texts that may go over several lines."""
    return Column(name, folds=True, rank=rank)


def columns(*named: Column | str) -> list[Column]:
    """Return columns; a string is a column of words that is never left out."""
    return [Column(each) if isinstance(each, str) else each for each in named]


@dataclass
class FittingTable:
    """A table that fits the terminal it is printed in.

    Attributes:
        columns: its columns.
        title: a line above it; empty for none.
        has_lines: whether lines separate the cells.
        has_headings: whether the names of the columns are printed.
        all_shown_by: what shows the columns that are left out.
        below: lines below the table, for the columns that are shown: returns nothing to show none.
    """

    columns: Sequence[Column]
    title: str = ""
    has_lines: bool = False
    has_headings: bool = True
    all_shown_by: str = "--json"
    below: Callable[[Sequence[str]], Iterable[RenderableType]] = lambda shown: ()
    _rows: list[tuple[Sequence[RenderableType], str, bool]] = field(default_factory=list)

    def add(self, *cells: RenderableType, style: str = "", ends_section: bool = False) -> None:
        """Add a row with one cell for each column."""
        from rich.text import Text

        assert len(cells) == len(self.columns), "a row has one cell for each column"
        row = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        self._rows.append((row, style, ends_section))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the title, the table, the note about columns that are left out, and the lines below."""
        from rich.text import Text

        widths = self._widths(console, options)
        if self.title:
            yield Text(self.title, style="italic" if self.has_lines else "bold")
        yield self._table(widths)
        if left_out := [each.title for k, each in enumerate(self.columns) if k not in widths]:
            more = f": widen the terminal, or use {self.all_shown_by}"
            yield Text(f"no room for {', '.join(left_out)}{more}", style="dim")
        yield from self.below([self.columns[k].title for k in widths])

    def _widths(self, console: Console, options: ConsoleOptions) -> dict[int, int]:
        """Return the columns to show, by index, with their widths."""
        from rich.measure import Measurement

        unbounded = options.update(max_width=100_000)
        cells = [
            max((Measurement.get(console, unbounded, row[k]).maximum for row, _, _ in self._rows), default=0)
            for k in range(len(self.columns))
        ]
        names = [each.name if self.has_headings else "" for each in self.columns]
        whole = [max(cell, *map(len, name.split("\n"))) for cell, name in zip(cells, names, strict=True)]

        def least(k: int, longest_name: int) -> int:
            column = self.columns[k]
            longest = whole[k] if column.is_number else _LEAST_TEXT if column.folds else longest_name
            return max(min(cells[k], longest), *map(len, names[k].split()), 1)

        def room(widths: Mapping[int, int]) -> int:
            lines = 3 * len(widths) + 1 if self.has_lines else 2 * (len(widths) - 1)
            return options.max_width - lines - sum(widths.values())

        shown = dict(enumerate(whole))
        if room(shown) >= 0:
            return shown
        shown = {k: least(k, _LONG_NAME) for k in shown}
        while room(shown) < 0:
            highest = max(self.columns[k].rank for k in shown)
            if not highest:
                shown = {k: least(k, _LEAST_NAME) for k in shown}
                break
            shown = {k: width for k, width in shown.items() if self.columns[k].rank < highest}
        # What is left goes to numbers and their headings first, then to names, then to texts.
        for kind in ((True, False), (False, False), (False, True)):
            same = [k for k in shown if (self.columns[k].is_number, self.columns[k].folds) == kind]
            while room(shown) > 0 and (short := [k for k in same if shown[k] < whole[k]]):
                shown[min(short, key=lambda k: shown[k])] += 1
        return shown

    def _table(self, widths: Mapping[int, int]) -> Table:
        from rich.text import Text

        table = _empty(self.has_lines, self.has_headings)
        headings = {k: self.columns[k].heading(width) for k, width in widths.items()}
        lines = max(each.count("\n") for each in headings.values())
        for k, heading in headings.items():
            table.add_column(
                Text("\n" * (lines - heading.count("\n")) + heading),
                justify="right" if self.columns[k].is_number else "left",
                width=widths[k],
                overflow="fold",
            )
        for cells, style, ends_section in self._rows:
            table.add_row(*(cells[k] for k in widths), style=style or None, end_section=ends_section)
        return table


def facts(lines: Mapping[str, RenderableType] | None = None, title: str = "", has_lines: bool = False) -> Table:
    """Return a table of facts: what each is about, and a text that may go over several lines."""
    from rich.text import Text

    table = _empty(has_lines, has_headings=False)
    table.title, table.title_justify = title or None, "left"
    table.add_column("about", no_wrap=True)
    table.add_column("fact", overflow="fold")
    for about, fact in (lines or {}).items():
        table.add_row(about, Text(fact) if isinstance(fact, str) else fact)
    return table


def grouped(reasons: Iterable[tuple[str, str]], style: str = "") -> RenderableType:
    """Return a table of devices with their reasons; devices with the same reason share a row.

    Args:
        reasons: pairs of a device's id and its reason.
        style: the style of the reasons.
    """
    from rich.text import Text

    groups: dict[str, list[str]] = {}
    for device_id, words in reasons:
        groups.setdefault(words, []).append(device_id)
    table = _empty(has_lines=False, has_headings=False)
    table.add_column("devices", overflow="fold", max_width=_MAX_IDS_WIDTH)
    table.add_column("words", overflow="fold")
    for words, ids in groups.items():
        more = f" and {len(ids) - _MAX_IDS:,} more" if len(ids) > _MAX_IDS else ""
        table.add_row(Text(", ".join(ids[:_MAX_IDS]) + more), Text(words, style=style))
    return table


def _empty(has_lines: bool, has_headings: bool) -> Table:
    from rich.table import Table

    return Table(show_header=has_headings) if has_lines else Table(box=None, pad_edge=False, show_header=has_headings)
