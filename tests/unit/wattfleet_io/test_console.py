"""What commands print for programs and for people."""

import json
from math import inf, nan

import pytest

from wattfleet_io.console import count_of, duration_text, json_text, print_json


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
