"""The output of commands for programs and for people."""

import json
import re
from math import inf, nan

import pytest
from rich.table import Table
from rich.text import Text

from wattfleet_io.console import count_of, duration_text, json_text, plain_text, print_json, print_line, terminal


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


HOSTILE = "ok\x1b[2J\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x1b\\\x9b31m\u202egnirts\u2066\rnew\nline\x00"


def test_plain_text_has_no_control_characters() -> None:
    assert plain_text(HOSTILE) == "ok[2J]0;title]52;c;ZXZpbA==\\31mgnirts new line"
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
    table.add_row(Text(HOSTILE, style="red"), f"plain {HOSTILE}")

    terminal().print(table)

    shown = capsys.readouterr().out
    assert "\x1b[31mok[2J]0;title" in shown
    assert set(re.findall(r"\x1b\[?[^m]*m?", shown)) == {"\x1b[31m", "\x1b[0m"}
    assert not set("\x07\x9b\u202e\u2066\x00") & set(shown)
