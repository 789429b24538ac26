from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.page.plots import Timeline, round_log_values, round_values
from wattfleet_io.console import duration_text


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (0.3, [0, 0.1, 0.2, 0.3]),
        (1, [0, 0.5, 1]),
        (23.1, [0, 10, 20]),
        (60, [0, 20, 40, 60]),
        (12_345.6, [0, 5_000, 10_000]),
    ],
)
def test_an_axis_has_round_values(most: float, expected: list[float]) -> None:
    assert round_values(most, 4) == expected


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (90.0, ["0.0 s", "20.0 s", "40.0 s", "60.0 s", "80.0 s"]),
        (3_000.0, ["0.0 s", "10 min", "20 min", "30 min", "40 min", "50 min"]),
        (9_000.0, ["0.0 s", "30 min", "60 min", "90 min", "2.0 h", "2.5 h"]),
        (72_000.0, ["0.0 s", "5.0 h", "10.0 h", "15.0 h", "20.0 h"]),
    ],
)
def test_a_rounds_timeline_is_labelled_at_round_times(seconds: float, labels: list[str]) -> None:
    drawn = Timeline.of([], {"planned_s": seconds})
    assert [duration_text(tick_s) for _, tick_s in drawn.ticks] == labels


@given(most=st.floats(1e-6, 1e9), about=st.integers(3, 8))
def test_values_are_few_evenly_spaced_and_within_the_axis(most: float, about: int) -> None:
    values = round_values(most, about)
    assert values[0] == 0 and 2 <= len(values) <= about + 1
    assert values[-1] <= most * 1.001
    step = values[1]
    assert f"{step:.0e}"[0] in "125" and step == pytest.approx(float(f"{step:.0e}"))
    assert values == pytest.approx([k * step for k in range(len(values))])
    assert values[-1] + step > most * 0.999, "no further value has room"


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        (12, 43.2, [15, 20, 30]),
        (0.8, 21, [1, 3, 10]),
        (0.02, 700, [0.1, 1, 10, 100]),
        (3, 90, [3, 10, 30]),
        (40, 400, [50, 100, 200]),
        (104, 131, [110, 120, 130]),
        (27.1, 27.9, [27.2, 27.4, 27.6, 27.8]),
        (31, 31, [31]),
    ],
)
def test_a_logarithmic_axis_has_round_values(least: float, most: float, expected: list[float]) -> None:
    assert round_log_values(least, most, 5) == expected


@given(least=st.floats(1e-3, 1e7), ratio=st.floats(1.001, 1e6))
def test_a_logarithmic_axis_has_a_few_ascending_values_within(least: float, ratio: float) -> None:
    most = least * ratio
    values = round_log_values(least, most, 5)
    assert 2 <= len(values) <= 9
    assert values == sorted(set(values))
    assert least * 0.999 <= values[0] and values[-1] <= most * 1.001
    assert all(float(f"{value:.5g}") == pytest.approx(value, rel=1e-12) for value in values)
