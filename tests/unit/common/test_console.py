"""The output of commands and services: for programs and people, tables of any width, and short log lines."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import time
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from wattfleet.common.console import count_of, duration_text, json_text, plain_text, print_json, print_line, terminal
from wattfleet.common.logs import (
    DEVICE_LINES_AT_ONCE,
    FORMAT_VARIABLE,
    LEVEL_VARIABLE,
    LINES_AT_ONCE,
    LINES_PER_S,
    MAX_LINE_BYTES,
    BoundedPlainText,
    RateLimit,
    fields,
    log_level,
    service_handler,
)
from wattfleet.common.tables import Column, FittingTable, columns, facts, numbers, texts
from wattfleet.core.errors import InvalidInputError

# --- Console ----------------------------------------------------------------------------------------------------------
# The output of commands for programs and for people.


def test_json_has_null_for_numbers_that_json_lacks() -> None:
    content = {"power_w": nan, "rows": [{"epoch_s": inf}, 1.5], "pair": (1, -inf)}

    assert json.loads(json_text(content)) == {"power_w": None, "rows": [{"epoch_s": None}, 1.5], "pair": [1, None]}


def test_json_text_is_one_line_unless_indented() -> None:
    assert json_text({"a": [1, 2]}) == '{"a": [1, 2]}'


def test_print_json_prints_one_indented_document(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"modes": 3})

    assert capsys.readouterr().out == '{\n  "modes": 3\n}\n'


@pytest.mark.parametrize(("count", "text"), [(0, "0 modes"), (1, "1 mode"), (2304, "2,304 modes")])
def test_a_count_comes_with_its_noun(count: int, text: str) -> None:
    assert count_of(count, "mode") == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (12.46, "12.5 s"), (2520, "42 min"), (11_160, "3.1 h"), (7_200_000, "2,000.0 h")]
)
def test_a_duration_is_given_in_a_readable_unit(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


HOSTILE_TEXT = "ok\x1b[2J\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x1b\\\x9b31m\u202egnirts\u2066\rnew\nline\x00"


def test_plain_text_has_no_control_characters() -> None:
    assert plain_text(HOSTILE_TEXT) == "ok[2J]0;title]52;c;ZXZpbA==\\31mgnirts new line"
    assert plain_text("mode 6, 15 W, 20 °C – fine") == "mode 6, 15 W, 20 °C – fine"


def test_long_text_is_cut_off_with_a_note() -> None:
    assert plain_text("x" * 1200, max_length=200) == "x" * 200 + " ... (1,000 more characters)"


def test_a_printed_line_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("a\x1b[31m")
    print_line("b\x1b[31m", to_stderr=True)

    assert capsys.readouterr() == ("a[31m\n", "b[31m\n")


def test_a_terminal_keeps_its_colours_and_drops_those_of_the_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    table = Table(box=None, show_header=False)
    table.add_row(Text(HOSTILE_TEXT, style="red"), f"plain {HOSTILE_TEXT}")

    terminal().print(table)

    shown = capsys.readouterr().out
    assert "\x1b[31mok[2J]0;title" in shown
    assert set(re.findall(r"\x1b\[?[^m]*m?", shown)) == {"\x1b[31m", "\x1b[0m"}
    assert not set("\x07\x9b\u202e\u2066\x00") & set(shown)


# --- Tables -----------------------------------------------------------------------------------------------------------
# Tables in terminals of any width.

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
    assert makers == ["wattfleet/common/tables.py"]


# --- Logs -------------------------------------------------------------------------------------------------------------
# The log of a service: whatever peers send, its lines stay short and their rate limited.

HOSTILE_LINE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\n2026-01-01 coordinator: all is well"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def written(clock: Clock) -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(clock: Clock, written: io.StringIO) -> logging.Logger:
    logger = logging.Logger("test")
    handler = logging.StreamHandler(written)
    handler.setFormatter(BoundedPlainText("%(name)s: %(message)s"))
    handler.addFilter(RateLimit(clock))
    logger.addHandler(handler)
    return logger


def test_a_long_line_is_cut(log: logging.Logger, written: io.StringIO) -> None:
    log.warning("refused %r", "\0" * 1_000_000)
    line = written.getvalue()
    assert len(line.encode()) <= MAX_LINE_BYTES + 1
    assert line.startswith("test: refused '") and line.endswith("bytes in all)\n")


def test_the_limit_counts_bytes(log: logging.Logger, written: io.StringIO) -> None:
    log.warning("ä" * MAX_LINE_BYTES)
    assert len(written.getvalue().encode()) <= MAX_LINE_BYTES + 1


def test_a_traceback_is_cut_in_its_middle_and_keeps_its_error(log: logging.Logger, written: io.StringIO) -> None:
    try:
        raise RuntimeError("x" * 100_000 + " the end")
    except RuntimeError:
        log.exception("failed")
    text = written.getvalue()
    assert len(text.encode()) <= MAX_LINE_BYTES + 1
    assert text.startswith("test: failed\nTraceback") and "the end" in text


def warn(log: logging.Logger, text: str) -> None:
    log.warning("refused: %s", text)


def test_lines_of_one_place_are_limited_and_the_others_are_counted(
    log: logging.Logger, written: io.StringIO, clock: Clock
) -> None:
    for k in range(100_000):
        warn(log, str(k))
    lines = written.getvalue().splitlines()
    assert len(lines) == LINES_AT_ONCE
    assert "further lines like this one are left out" in lines[-1] and "left out" not in lines[-2]
    clock.now_s += 1.0
    warn(log, "later")
    assert written.getvalue().splitlines()[-1].startswith("test: refused: later (99,980 lines like this one")


def test_another_place_is_not_affected(log: logging.Logger, written: io.StringIO) -> None:
    for _ in range(1000):
        warn(log, "again")
    log.warning("another")
    assert written.getvalue().splitlines()[-1] == "test: another"


def test_lines_come_back_as_time_passes(log: logging.Logger, written: io.StringIO, clock: Clock) -> None:
    for _ in range(LINES_AT_ONCE * 3):
        warn(log, "slow")
        clock.now_s += 1.0
    assert len(written.getvalue().splitlines()) == LINES_AT_ONCE * 3
    assert "left out" not in written.getvalue()


def test_a_service_logs_within_the_limits() -> None:
    program = (
        "import logging; from wattfleet.common.logs import start_logging; start_logging()\n"
        "for _ in range(1000): logging.warning('x' * 1_000_000)"
    )
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    most = LINES_AT_ONCE + LINES_PER_S * (time.monotonic() - began_s)
    lines = done.stderr.splitlines()
    assert LINES_AT_ONCE <= len(lines) <= most and all(len(line) <= MAX_LINE_BYTES for line in lines)


def test_a_client_that_has_gone_leaves_no_traceback_of_grpc(written: io.StringIO) -> None:
    class ExecuteBatchError(Exception):
        """Stands in for gRPC's own error, which gRPC does not export."""

    for error in (ExecuteBatchError("Failed execute_batch"), ValueError("told")):
        caught = type(error), error, None
        service_handler(written).handle(
            logging.LogRecord("grpc._cython.cygrpc", logging.ERROR, __file__, 1, "raised", (), caught)
        )
    assert "execute_batch" not in written.getvalue() and "told" in written.getvalue()


def test_a_damaged_answer_leaves_no_traceback_of_grpc(written: io.StringIO) -> None:
    handler = service_handler(written)
    logged = logging.LogRecord("grpc._common", logging.ERROR, __file__, 1, "Exception deserializing message!", (), None)
    handler.handle(logged)
    assert written.getvalue() == ""


def test_a_message_is_one_line_of_plain_text(log: logging.Logger, written: io.StringIO) -> None:
    log.warning("orin: %s", HOSTILE_LINE)
    assert written.getvalue() == "test: orin: [2J]0;title31m 2026-01-01 coordinator: all is well\n"


def test_a_traceback_keeps_its_lines_and_has_no_escapes(log: logging.Logger, written: io.StringIO) -> None:
    try:
        raise ValueError(HOSTILE_LINE)
    except ValueError:
        log.exception("failed")
    lines = written.getvalue().splitlines()
    assert lines[:2] == ["test: failed", "Traceback (most recent call last):"]
    assert all(line.isprintable() for line in lines) and len(lines) >= 5


@pytest.fixture
def json_log(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    logger = logging.Logger("test")
    logger.addHandler(service_handler(written))
    return logger


def test_json_has_the_message_in_words_and_its_fields(json_log: logging.Logger, written: io.StringIO) -> None:
    json_log.warning("%s is ready", "orin-1", extra=fields(device="orin-1", modes=12, detail=None))
    content = json.loads(written.getvalue())
    assert content.pop("time").endswith("Z")
    assert content == {
        "level": "warning", "logger": "test", "message": "orin-1 is ready", "device": "orin-1", "modes": 12,
    }  # fmt: skip


def test_json_is_one_short_line_of_plain_text_whatever_is_logged(
    json_log: logging.Logger, written: io.StringIO
) -> None:
    for text in (HOSTILE_LINE, "ä" * 100_000, "\U0001f600" * 100_000, '"' * 100_000):
        try:
            raise ValueError(text)
        except ValueError:
            json_log.exception("refused: %s", text, extra=fields(detail=text))
    lines = written.getvalue().splitlines()
    assert len(lines) == 4 and all(len(line.encode()) <= MAX_LINE_BYTES for line in lines)
    assert all(json.loads(line)["traceback"].startswith("Traceback") for line in lines)
    assert json.loads(lines[0])["message"].isprintable()


def test_a_fleet_that_starts_at_once_has_a_line_for_each_device(json_log: logging.Logger, written: io.StringIO) -> None:
    for k in range(10 * DEVICE_LINES_AT_ONCE):
        json_log.info("%d is ready", k, extra=fields(device=str(k)))
    assert DEVICE_LINES_AT_ONCE <= len(written.getvalue().splitlines()) < 2 * DEVICE_LINES_AT_ONCE


@pytest.mark.parametrize("variable", [FORMAT_VARIABLE, LEVEL_VARIABLE])
def test_an_unknown_choice_in_the_environment_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "loud")
    with pytest.raises(InvalidInputError, match=f"{variable} is 'loud': set it to "):
        (service_handler if variable == FORMAT_VARIABLE else log_level)()


def test_a_process_that_a_service_starts_logs_as_the_service_does() -> None:
    child = "import logging; from wattfleet.common import logs; logs.start_logging(); logging.debug('of the child')"
    program = (
        "import subprocess, sys; from wattfleet.common.logs import start_logging; start_logging('json', 'debug')\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == ["of the child"]


def test_what_python_prints_of_failures_is_an_object_in_json() -> None:
    program = (
        "import threading, warnings; from wattfleet.common.logs import start_logging; start_logging('json')\n"
        "def fail(): raise ValueError('in a thread')\n"
        "warnings.warn('a warning')\n"
        "thread = threading.Thread(target=fail, name='worker'); thread.start(); thread.join()\n"
        "raise RuntimeError('in the main thread')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    warning, of_thread, of_process = (json.loads(line) for line in done.stderr.splitlines())
    assert done.returncode == 1
    assert warning["level"] == "warning" and "a warning" in warning["message"]
    assert of_thread["message"] == "thread worker ends: ValueError: in a thread"
    assert of_process["message"] == "the process ends: RuntimeError: in the main thread"
    assert all(each["traceback"].startswith("Traceback") for each in (of_thread, of_process))
