"""Detecting that observations contradict a predictor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, PowerMode
from wattfleet.prediction import DriftRule, Prediction, Residual, detect_drift

MODE = PowerMode(4, 1_036_800, 510_000_000, 2_133_000_000)
QUIET = Residual(0.3, -0.5)


def test_a_residual_is_in_standard_deviations_of_the_prediction() -> None:
    predicted = Prediction(np.array([100.0]), np.array([20_000.0]), np.array([0.05]), np.array([0.02]))
    residual = Residual.of(Measurement(MODE, 100 * np.exp(0.1), 20_000 * np.exp(-0.02)), predicted)
    assert (residual.time, residual.power) == (pytest.approx(2), pytest.approx(-1))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (Residual(1.7, 0), "4 of the last 6 rounds took longer than the predictor's 90% interval"),
        (Residual(-1.7, 0), "took less time"),
        (Residual(0, 1.7), "drew more power"),
        (Residual(0, -1.7), "drew less power"),
    ],
)
def test_four_of_the_last_six_rounds_beyond_one_end_are_drift(odd: Residual, words: str) -> None:
    found = detect_drift([odd, QUIET, odd, QUIET, odd, odd])
    assert found is not None
    assert words in found
    assert detect_drift([odd, odd, odd]) is None
    assert detect_drift([odd, odd, odd, QUIET, QUIET, QUIET, odd]) is None, "the first is no longer among the last six"


def test_deviations_to_alternating_sides_are_not_drift() -> None:
    assert detect_drift([Residual(1.7, -1.7), Residual(-1.7, 1.7)] * 3) is None


def test_the_interval_ends_at_its_normal_quantile() -> None:
    # The 90 % interval of a normal distribution extends to 1.645 standard deviations.
    assert detect_drift([Residual(1.64, 1.64)] * 6) is None
    assert detect_drift([Residual(1.65, 0)] * 6) is not None


def test_false_alarms_are_rarer_than_one_in_a_thousand_rounds() -> None:
    rng = np.random.default_rng(0)
    rounds = [Residual(*pair) for pair in rng.standard_normal((40_000, 2))]
    alarms = sum(detect_drift(rounds[end - 6 : end]) is not None for end in range(6, len(rounds)))
    assert 0 < alarms / len(rounds) < 1 / 1000


@pytest.mark.parametrize("wrong", [{"interval": 1.0}, {"outside": 0}, {"outside": 7}, {"modes": 0}])
def test_rules_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        DriftRule(**wrong)
