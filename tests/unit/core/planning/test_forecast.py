"""Forecasts of a run's end, against what happened in recorded runs, and against sums by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import wattfleet.core.planning.forecast as forecast
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import Interval, Target, Tariff, rounds_to, still_needed

NINE_TENTHS = Target("accuracy", 0.9)


def recorded(data: str) -> list[list[float]]:
    """Accuracies of federated runs with 6 to 50 devices, before round 1 and after each."""
    runs = json.loads(Path(__file__).with_name("accuracy_curves.json").read_text())
    return [run["accuracy"] for run in runs if run["data"] == data]


def reached_after(values: list[float], target: float) -> float:
    """The first round at which the mean of three rounds is high enough."""
    means = [sum(values[k - 2 : k + 1]) / 3 for k in range(3, len(values))]
    return next((k + 3 for k, mean in enumerate(means) if mean >= target), math.inf)


@pytest.mark.parametrize(("data", "targets"), [("digits", (0.85, 0.93)), ("fashion", (0.6, 0.7, 0.75))])
def test_nine_of_ten_recorded_runs_reach_a_target_within_their_interval(
    monkeypatch: pytest.MonkeyPatch, data: str, targets: tuple[float, ...]
):
    monkeypatch.setattr(forecast, "HORIZON", 200)  # longer than the recorded runs
    held = []
    for values in recorded(data):
        for now in (6, 10, 20):
            for target in targets:
                true = reached_after(values, target)
                if true > now:
                    found = Interval.of(rounds_to(Target("accuracy", target), values[: now + 1]))
                    # A run that does not reach it in the recorded rounds could have done so at any time after them.
                    ends = found.high > len(values) - 1 - now
                    held.append(found.low <= true - now <= found.high if true < math.inf else ends)
    assert len(held) > 25
    assert np.mean(held) >= 0.85


def test_more_rounds_narrow_the_interval():
    values = [0.1 + 0.85 * (1 - 0.9**k) + 0.01 * (-1) ** k for k in range(60)]
    early, late = (Interval.of(rounds_to(Target("accuracy", 0.93), values[: now + 1])) for now in (8, 30))
    assert late.high - late.low < early.high - early.low


def test_a_target_that_is_reached_needs_no_further_round():
    assert set(rounds_to(NINE_TENTHS, [0.1, 0.8, 0.9, 0.91, 0.92, 0.7])) == {0.0}


def test_a_curve_that_has_ended_below_its_target_may_never_reach_it():
    values = [0.1, 0.4, 0.5, 0.55, 0.57] + [0.58 + 0.001 * (-1) ** k for k in range(40)]
    found = still_needed(rounds_to(NINE_TENTHS, values), [10.0] * 44, [100.0] * 44, [Tariff.constant("EUR", 0.3)])
    assert found.reached < 0.5 and math.isinf(found.rounds.median)
    assert math.isinf(found.seconds.high) and math.isinf(found.costs[0].high)


def test_a_loss_is_forecast_as_what_falls():
    losses = [2.3 * (1 + k / 4) ** -1.3 * (1 + 0.02 * (-1) ** k) for k in range(100)]
    true = reached_after([-each for each in losses], -0.1) - 20
    found = Interval.of(rounds_to(Target("eval_loss", 0.1), losses[:21]))
    assert found.low <= true <= found.high < 10 * true


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(bad: float):
    with pytest.raises(InvalidInputError, match="the target of accuracy must be finite"):
        Target("accuracy", bad)
    with pytest.raises(InvalidInputError, match="a value of accuracy that is not finite"):
        rounds_to(NINE_TENTHS, [0.1, 0.2, bad, 0.4, 0.5, 0.6])


def test_too_few_rounds_are_refused_with_their_number():
    with pytest.raises(InvalidInputError, match=r"needs 4 rounds with its value, and the run has 3: ask again later"):
        rounds_to(NINE_TENTHS, [0.1, 0.2, 0.3, 0.4])
    with pytest.raises(InvalidInputError, match="no round has ended yet"):
        still_needed(np.array([3.0]), [], [])


def test_equal_rounds_need_as_much_as_they_have_needed():
    found = still_needed(np.full(1000, 20.0), [90.0, *[10.0] * 9], [500.0] * 10)
    assert (found.rounds, found.reached) == (Interval(20.0, 20.0, 20.0), 1.0)
    assert found.seconds == Interval(200.0, 200.0, 200.0), "the first round, with its survey, is not typical"
    assert found.energy_j == Interval(1e4, 1e4, 1e4)
    assert found.costs == ()
    assert still_needed(np.full(9, 20.0), [10.0], []).energy_j is None


def test_nine_of_ten_sums_of_uneven_rounds_lie_within_the_interval():
    random = np.random.default_rng(0)
    held = []
    for seed in range(300):
        rounds = random.gamma(9.0, 10 / 9, 40)
        found = still_needed(np.full(1000, 30.0), list(rounds[:10]), [], seed=seed)
        held.append(found.seconds.low <= rounds[10:].sum() <= found.seconds.high)
    assert 0.85 <= np.mean(held) <= 0.97


@pytest.mark.parametrize(("from_hour", "hours"), [(0.0, 1.0), (22.5, 3.0), (6.25, 49.5), (23.99, 0.1)])
def test_a_tariff_counts_each_hour_for_as_long_as_it_lasts(from_hour: float, hours: float):
    tariff = Tariff("EUR", tuple(0.1 + 0.05 * (hour % 7) for hour in range(24)))
    moments = from_hour + hours * (np.arange(100_000) + 0.5) / 100_000
    by_hand = np.mean([tariff.per_kwh[int(each) % 24] for each in moments])
    assert tariff.mean(from_hour, np.array([hours * 3600]))[0] == pytest.approx(by_hand, rel=1e-3)


def test_a_tariff_needs_24_finite_values():
    with pytest.raises(InvalidInputError, match="a finite value for each of 24 hours"):
        Tariff("EUR", (0.3,) * 23)
    with pytest.raises(InvalidInputError, match="a finite value for each of 24 hours"):
        Tariff.constant("EUR", math.nan)


def test_the_cost_is_that_of_the_energy():
    found = still_needed(np.full(100, 10.0), [60.0] * 5, [3.6e6] * 5, [Tariff.constant("EUR", 0.25)])
    assert found.costs == (Interval(2.5, 2.5, 2.5),)
