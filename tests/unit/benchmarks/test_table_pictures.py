"""Figures drawn from the tables of a document: which tables and numbers are read."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.table_pictures import draw_choices, draw_errors, numbers, tables_of

ERRORS = """
## Errors

| to MobileNetV3, AGX Orin | n = 5 | 10 | 50 |
|---|---|---|---|
| `roofline`, the default | 5.9 / 2.2 | 4.1 / 1.7 | |
| `powertrain` as published (4.2) | | 26.7 / – | 15.7 / 5.2 (14.5 / 5.6 in figure 6) |
"""

CHOICES = """
### ResNet-18 on the Orin Nano (reference: another)

| method | N | median | mean | over | by 1 W |
|---|---|---|---|---|---|
| `wattfleet` | 10 | 1 | 4 | 7 | 0.5 |
| `wattfleet` | 50 | 0 | 2 | 6 | 0 |
| `binary-search`, shared | 50 | 9 | 9 | 9 | 9 |
| `binary-search`, each budget alone | 5 to 7 | 3 | 8 | 0 | 0 |

## Which method when

| method | modes | slower, % | over |
|---|---|---|---|
| `transfer` | 0 | 275.6 | 0 |
| `transfer` | 5 | 12.2 | 0.5 |
| `binary-search` | 12; 11 | 8.3 | 0 |
"""


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("", []),
        ("5.9 / 2.2", [5.9, 2.2]),
        ("26.7 / –", [26.7, None]),
        ("15.7 / 5.2 (14.5 / 5.6 in figure 6)", [15.7, 5.2]),
        ("18,096", [18096]),
        ("–", [None]),
        ("below 20 / –", [None, None]),
    ],
)
def test_a_cell_has_the_numbers_that_a_reader_sees(cell: str, found: list[float | None]) -> None:
    assert numbers(cell) == found


def test_each_error_is_drawn_at_its_number_of_modes() -> None:
    time, power = draw_errors(tables_of(ERRORS)).axes
    drawn = {line.get_label(): np.array(line.get_xydata()).tolist() for line in time.lines}
    assert drawn["Wattfleet's predictor"] == [[5, 5.9], [10, 4.1]]
    assert drawn["PowerTrain as published"] == [[10, 26.7], [50, 15.7]]
    assert np.array(power.lines[2].get_xydata()).tolist() == [[50, 5.2]], "a dash is no error"


def test_choices_are_drawn_at_the_row_of_their_method() -> None:
    penalty, broken, losses = draw_choices(tables_of(CHOICES)).axes
    rows = {
        label.get_text(): place for place, label in zip(penalty.get_yticks(), penalty.get_yticklabels(), strict=True)
    }
    (nano,) = (points for line in penalty.lines if (points := np.array(line.get_xydata()).tolist()))
    shown = ("Wattfleet, 10 modes", "Wattfleet, 50 modes", "binary search, each budget")
    assert nano == [[penalty_pct, rows[name]] for penalty_pct, name in zip((4, 2, 8), shown, strict=True)]
    (over,) = (watts for line in broken.lines if (watts := np.array(line.get_xdata()).tolist()))
    assert over == [0.5, 0, 0]
    drawn = {line.get_label(): np.array(line.get_xydata()).tolist() for line in losses.lines}
    assert drawn["transfer"] == [[5, 12.2]], "the choice without measurements is left out"
    assert drawn["binary search for one budget"] == [[12, 8.3]]
