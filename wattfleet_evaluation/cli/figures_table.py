"""Figures as a table of two columns."""

from __future__ import annotations

from collections.abc import Mapping


def print_figures(figures: Mapping[str, object], title: str) -> None:
    """Print figures, and the parts of those that have several."""
    from rich.console import Console

    from wattfleet_io.tables import FittingTable, columns, numbers, texts

    table = FittingTable(columns(texts("figure"), numbers("value")), title=title, has_lines=True)
    for name, value in figures.items():
        parts = value if isinstance(value, Mapping) else {"": value}
        for part, number in parts.items():
            shown = f"{number:g}" if isinstance(number, (int, float)) else str(number or "-")
            table.add(f"{name} {part}".strip().replace("_", " "), shown)
    Console().print(table)
