"""Rounds in the boards' own time, compared with sums by hand."""

from __future__ import annotations

import pytest

from edge_agent.devices.virtual.virtual_board import WorkSpan
from wattfleet.modes import PowerMode
from wattfleet_simulation.virtual_time import site_watts, stretches

OWN, OTHER = PowerMode(4, 1, 1, 1), PowerMode(2, 1, 1, 1)
IDLE_W = {"a": 5.0, "b": 3.0, "idle": 2.0}


def span(begin_s: float, end_s: float, mode: PowerMode, watts: float) -> WorkSpan:
    return WorkSpan(begin_s, end_s, mode, watts * (end_s - begin_s))


FIRST = {
    # Its clock stands at 100 s. Between the spans it waited, in which no time passes for it.
    "a": [span(100, 104, OTHER, 15), span(104, 110, OWN, 25)],
    "b": [span(7, 11, OWN, 13)],
}
SECOND = {"b": [span(11, 31, OWN, 13)]}
PLANNED = {"a": [OWN], "b": [OWN]}


def test_a_round_ends_with_its_slowest_board_and_the_others_idle_until_then() -> None:
    first, second = stretches([(1, FIRST, PLANNED), (2, SECOND, PLANNED)], IDLE_W)
    assert (first.begin_s, first.end_s) == (0.0, 10.0)
    assert (second.begin_s, second.end_s) == (10.0, 30.0)
    a_j, b_j, idle_j = 4 * 15 + 6 * 25, 4 * 13 + 6 * 3, 10 * 2
    assert first.energy_j == pytest.approx(a_j + b_j + idle_j)
    assert second.energy_j == pytest.approx(20 * (5 + 13 + 2))


def test_boards_that_measure_beside_a_round_end_with_it() -> None:
    beside = {**FIRST, "idle": [span(0, 8, OTHER, 5), span(8, 500, OTHER, 5), span(500, 900, OTHER, 5)]}
    first, second = stretches([(1, beside, PLANNED), (2, SECOND, PLANNED)], IDLE_W)
    assert (first.end_s, second.end_s) == (10.0, 30.0)
    assert [(draw.begin_s, draw.end_s) for draw in first.draws[-2:]] == [(0.0, 8.0), (8.0, 10.0)]
    a_j, b_j, beside_j = 4 * 15 + 6 * 25, 4 * 13 + 6 * 3, 10 * 5
    assert first.energy_j == pytest.approx(a_j + b_j + beside_j)
    [survey] = stretches([(0, {"idle": beside["idle"]}, {})], IDLE_W)
    assert survey.end_s == 900.0, "nobody trains meanwhile"


def test_other_modes_than_the_planned_one_are_measured() -> None:
    first, nobody_planned = stretches([(1, FIRST, PLANNED), (2, SECOND, {})], IDLE_W)
    assert [(draw.begin_s, draw.end_s, draw.extra_w, draw.kind) for draw in first.draws] == [
        (0.0, 4.0, 10.0, "measuring"),
        (4.0, 10.0, 20.0, "training"),
        (0.0, 4.0, 10.0, "training"),
    ]
    assert {draw.kind for draw in nobody_planned.draws} == {"measuring"}


def test_the_sites_watts_change_where_a_board_begins_or_ends() -> None:
    watts = site_watts(stretches([(1, FIRST, PLANNED), (2, SECOND, PLANNED)], IDLE_W), IDLE_W)
    assert watts.idle_w == 10.0
    assert watts.at_s == [0.0, 4.0, 10.0, 30.0]
    assert watts.extra_w == {"training": [10.0, 20.0, 10.0, 0.0], "measuring": [10.0, 0.0, 0.0, 0.0]}


def test_a_round_without_work_takes_no_time() -> None:
    (nothing,) = stretches([(1, {}, {})], IDLE_W)
    assert (nothing.begin_s, nothing.end_s, nothing.energy_j) == (0.0, 0.0, 0.0)
    assert site_watts([nothing], IDLE_W).extra_w == {"training": [0.0], "measuring": [0.0]}
