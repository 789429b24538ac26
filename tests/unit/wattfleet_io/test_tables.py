"""Tables in terminals of any width."""

from __future__ import annotations

import io
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from wattfleet_io.tables import Column, FittingTable, columns, facts, numbers, texts

ROOT = Path(__file__).resolve().parents[3]
NOT_COMMANDS = {".venv", "benchmarks", "docs", "examples", "out", "tests"}
WORDS = st.text("abcdefghij-/ ", min_size=1, max_size=60).map(str.strip).filter(bool)
FIGURES = st.integers(0, 10**7).map("{:,}".format)


def shown(table: RenderableType, width: int) -> list[str]:
    """The lines of a table in a terminal."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, highlight=False).print(table)
    return file.getvalue().splitlines()


def is_within(cell: str, printed: str) -> bool:
    """Whether the letters of a cell are printed in their order, whatever is between them."""
    letters = iter(printed)
    return all(letter in letters for letter in cell if not letter.isspace())


def runs(has_lines: bool = False) -> FittingTable:
    """A list of runs with names as long as Flower's run ids and derived workloads."""
    table = FittingTable(
        columns(
            "run",
            "state",
            numbers("rounds"),
            numbers("time", rank=3),
            numbers("energy", rank=2),
            numbers("failed", rank=4),
            Column("started", rank=1),
            texts("workload"),
        ),
        has_lines=has_lines,
    )
    workload = "wattfleet/quickstart-sklearn #d276a4d4"
    table.add("10442098795564059557", "finished", "3 of 3", "15.9 s", "2.8 kJ", "0", "20:54:21", workload)
    return table


def test_a_text_keeps_its_room_and_the_columns_that_matter_least_are_left_out() -> None:
    lines = shown(runs(), 80)
    assert lines[0].split() == ["run", "state", "rounds", "energy", "started", "workload"]
    assert lines[1].endswith("wattfleet/quickstart-s") and lines[2].split() == ["klearn", "#d276a4d4"]
    assert lines[3] == "no room for time, failed: widen the terminal, or use --json"
    assert shown(runs(), 60)[0].split() == ["run", "state", "rounds", "workload"]


def test_a_table_with_room_shows_every_column_without_a_note() -> None:
    heading, row = shown(runs(), 200)
    assert heading.split()[-3:] == ["failed", "started", "workload"] and "15.9 s" in row


def test_headings_break_before_a_column_is_left_out() -> None:
    table = FittingTable(columns("mode", numbers("power at the plug"), numbers("watts", rank=1)))
    table.add("6c 1.51", "7.5", "3.0")
    assert [line.split() for line in shown(table, 21)] == [
        ["power"],
        ["at"],
        ["the"],
        ["mode", "plug", "watts"],
        ["6c", "1.51", "7.5", "3.0"],
    ]


def test_a_cell_is_text_and_no_markup() -> None:
    table = FittingTable(columns("device"))
    table.add("[red]orin[/]")
    assert shown(table, 80)[1].strip() == "[red]orin[/]"
    assert "[red]orin[/]" in shown(facts({"device": "[red]orin[/]"}), 80)[0]


def test_lines_below_know_which_columns_are_shown() -> None:
    table = FittingTable(columns("device", texts("detail", rank=1)), below=lambda names: [", ".join(names)])
    table.add("d" * 30, "parked")
    assert shown(table, 80)[-1] == "device, detail" and shown(table, 28)[-1] == "device"


@given(
    st.lists(st.tuples(WORDS, FIGURES, FIGURES, WORDS, WORDS), min_size=1, max_size=4),
    st.integers(50, 140),
    st.booleans(),
)
def test_nothing_is_cut_off_at_any_width(
    rows: list[tuple[str, str, str, str, str]], width: int, has_lines: bool
) -> None:
    named = columns("name of it", numbers("watts drawn"), numbers("s", rank=2), Column("state", rank=1), texts("why"))
    table = FittingTable(named, has_lines=has_lines)
    for row in rows:
        table.add(*row)
    lines = shown(table, width)
    assert max(map(len, lines)) <= width
    printed = "\n".join(lines)
    assert "…" not in printed
    note = " ".join(printed.partition("no room for ")[2].split()).partition(":")[0]
    left_out = note.split(", ") if note else []
    for k, column in enumerate(named):
        for row in rows:
            assert column.title in left_out or is_within(row[k], printed), (column, row)
    for row in rows:  # numbers are never broken
        assert row[1] in printed


@given(st.integers(50, 200))
def test_a_wider_terminal_never_shows_fewer_columns(width: int) -> None:
    narrow, wide = (shown(runs(), each)[0].split() for each in (width, width + 10))
    assert set(narrow) <= set(wide)


def test_tables_are_made_in_one_place() -> None:
    sources = [path for path in ROOT.glob("*/**/*.py") if path.relative_to(ROOT).parts[0] not in NOT_COMMANDS]
    makers = [
        path.relative_to(ROOT).as_posix()
        for path in sources
        if re.search(r"= Table\(|return Table\(", path.read_text())
    ]
    assert makers == ["wattfleet_io/tables.py"]
