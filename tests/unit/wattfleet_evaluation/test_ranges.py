"""Ranges of numbers in command-line options, compared with exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.errors import InvalidInputError
from wattfleet_evaluation.cli.options import parse_range


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 500), st.sampled_from([1, 10, 100]))
def test_both_ends_are_included_without_rounding_errors(first: int, more: int, step: int, parts: int) -> None:
    expected = [Fraction(number, parts) for number in range(first, first + more + 1, step)]
    text = ":".join(str(number / parts) for number in (first, first + more, step))
    assert parse_range("--x", text, 7) == [float(number) for number in expected]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("10:13", [10, 11, 12, 13]), ("7", [7]), ("2:3.5", [2, 3]), ("5:5:9", [5]), ("0.5:0.7:0.1", [0.5, 0.6, 0.7])],
)
def test_forms_of_a_range(text: str, numbers: list[float]) -> None:
    assert parse_range("--x", text, 1) == numbers


@pytest.mark.parametrize("text", ["", ":", "1:", "1:2:3:4", "a:b", "0:5", "-1:5", "1:inf", "nan", "1:5:0", "1:5:-1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="^--x: invalid range .* give FIRST:LAST:STEP, such as 30:120:10$"):
        parse_range("--x", text, 1)


def test_descending_and_endless_ranges_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="'9:3' ends below its start: give the lower number first"):
        parse_range("--x", "9:3", 1)
    assert len(parse_range("--x", "1:10000", 1)) == 10_000
    with pytest.raises(InvalidInputError, match="has too many numbers: give at most 10,000"):
        parse_range("--x", "1:10001", 1)
    with pytest.raises(InvalidInputError, match="give at most 10,000"):
        parse_range("--x", "1:1e300:1e-9", 1)
