"""How long a simulation still takes."""

from __future__ import annotations

import pytest

from wattfleet_simulation.run import Forecast, Stage, left_text

START_S = sum(stage.usual_s(2) for stage in Stage)


def test_at_first_the_usual_times_count_down_and_a_slow_stage_delays_the_rest() -> None:
    forecast = Forecast(devices=2, rounds=3, together=[1], now_s=100.0)
    at_first_s = forecast.left_s(100.0)
    runs_s = at_first_s - START_S
    assert runs_s > 0
    assert forecast.left_s(103.0) == pytest.approx(at_first_s - 3.0)
    assert forecast.left_s(900.0) == pytest.approx(at_first_s - Stage.COORDINATOR.usual_s(2))
    forecast.begin(Stage.FLOWER, 900.0)
    forecast.begin(Stage.IDLE_POWER, 1000.0)
    forecast.begin(Stage.IDLE_POWER, 1001.0)
    assert forecast.left_s(1002.0) == pytest.approx(Stage.IDLE_POWER.usual_s(2) - 2.0 + runs_s)


def test_later_the_rounds_of_this_simulation_count() -> None:
    forecast = Forecast(devices=2, rounds=3, together=[1, 2])
    forecast.begin_group(0, 50.0)
    forecast.note_rounds([], 0, 60.0)
    forecast.note_rounds([30.0], 0, 80.0)
    forecast.note_rounds([30.0, 35.0], 1, 130.0)  # a round takes 50 s
    before_first_plan_s = forecast.left_s(130.0) - (2 * 50.0 + 3 * 2 * 50.0)
    assert 0 < before_first_plan_s < 60.0, "of the second group, whose two apps share the boards"
    assert forecast.left_s(140.0) == pytest.approx(forecast.left_s(130.0) - 10.0)
    forecast.note_rounds([30.0, 35.0, 35.0], 3, 320.0)  # 80 s in the mean
    assert forecast.left_s(320.0) == pytest.approx(before_first_plan_s + 3 * 2 * 80.0)
    forecast.begin_group(1, 330.0)
    forecast.note_rounds([30.0], 0, 350.0)
    assert forecast.left_s(350.0) == pytest.approx(3 * 2 * 80.0)
    forecast.note_rounds([30.0, 30.0, 30.0], 3, 950.0)
    assert forecast.left_s(960.0) == 0


def test_a_round_that_takes_longer_than_expected_delays_the_later_ones() -> None:
    forecast = Forecast(devices=2, rounds=3, together=[1])
    forecast.begin_group(0, 0.0)
    forecast.note_rounds([90.0], 0, 20.0)
    assert forecast.left_s(20.0) == pytest.approx(3 * 90.0), "as planned, since no round has ended"
    assert forecast.left_s(50.0) == pytest.approx(3 * 90.0 - 30.0)
    assert forecast.left_s(320.0) == pytest.approx(2 * 300.0)
    forecast.note_rounds([90.0, 90.0], 1, 340.0)
    assert forecast.left_s(340.0) == pytest.approx(2 * 320.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "almost done"), (23.0, "about 20 s left"), (55.1, "about 60 s left"), (140.0, "about 2 min left")],
)
def test_an_estimate_is_stated_with_its_precision(seconds: float, text: str) -> None:
    assert left_text(seconds) == text
