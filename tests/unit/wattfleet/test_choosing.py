"""Choosing a mode from measured and predicted values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.choosing import (
    InfeasibleDeadlineError,
    KnownModes,
    fastest_within_budget,
    least_energy_by_deadline,
    lowest_power_by_deadline,
)
from wattfleet.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.modes import Profile, array_to_modes
from wattfleet.prediction import Prediction

MODES = np.array([[cores, 1_000_000, 600_000_000, 2_133_000_000] for cores in (1, 2, 3, 4)], dtype=np.float64)
ONE, TWO, THREE, FOUR = array_to_modes(MODES)
# Energies: 400, 500, 440, 600 mJ.
PREDICTED = Prediction(
    np.array([40.0, 25.0, 20.0, 15.0]), np.array([10e3, 20e3, 22e3, 40e3]), np.full(4, 0.1), np.full(4, 0.1)
)


def profile(row: int, minibatch_ms: float, power_mw: float) -> Profile:
    return Profile(MODES[[row]], np.array([minibatch_ms]), np.array([power_mw]))


def test_the_fastest_mode_whose_power_quantile_keeps_the_budget_is_chosen() -> None:
    known = KnownModes.of(MODES, PREDICTED)
    assert fastest_within_budget(known, 22e3, 0.5).mode == THREE
    # Its 95 % quantile is 22 W * exp(1.645 * 0.1) = 25.93 W.
    assert fastest_within_budget(known, 25.9e3, 0.95).mode == TWO
    assert fastest_within_budget(known, 26.0e3, 0.95).mode == THREE


def test_among_equal_times_the_mode_most_certain_to_keep_the_budget_wins() -> None:
    nearly_equal = Prediction(
        np.array([20.1, 20.0, 20.05, 20.3]), np.array([9e3, 10e3, 12e3, 5e3]), np.full(4, 0.02), np.full(4, 0.05)
    )
    # 20.1 ms is within 0.6 % of the fastest, 20.3 ms is not.
    assert fastest_within_budget(KnownModes.of(MODES, nearly_equal), 13e3, 0.9).mode == ONE
    # Modes that certainly keep the budget, such as measured ones, are compared by time alone.
    assert fastest_within_budget(KnownModes.of(MODES, nearly_equal), 40e3, 0.9).mode == TWO


def test_a_measured_power_replaces_the_predicted_one() -> None:
    cheap = KnownModes.of(MODES, PREDICTED, profile(3, 16.0, 21e3))
    chosen = fastest_within_budget(cheap, 21e3, 0.999)
    assert (chosen.mode, chosen.minibatch_ms, chosen.power_mw, chosen.measured) == (FOUR, 16.0, 21e3, True)
    hungry = KnownModes.of(MODES, PREDICTED, profile(2, 20.0, 22.001e3))
    assert fastest_within_budget(hungry, 22e3, 0.5).mode == TWO


def test_deadlines_are_kept_with_least_energy_or_lowest_power() -> None:
    known = KnownModes.of(MODES, PREDICTED)
    assert least_energy_by_deadline(known, 40.0, 0.5).mode == ONE
    assert least_energy_by_deadline(known, 39.0, 0.5).mode == THREE
    assert lowest_power_by_deadline(known, 39.0, 0.5).mode == TWO
    # 25 ms * exp(1.645 * 0.1) is 29.5 ms.
    assert lowest_power_by_deadline(known, 29.4, 0.95).mode == THREE


def test_an_infeasible_limit_is_refused_with_the_lowest_feasible_one() -> None:
    known = KnownModes.of(MODES, PREDICTED, profile(0, 40.0, 9e3))
    with pytest.raises(InfeasibleBudgetError, match=r"give a budget of at least 9\.0 W"):
        fastest_within_budget(known, 8e3)
    with pytest.raises(InfeasibleDeadlineError, match=r"allow at least 15\.0 ms"):
        least_energy_by_deadline(known, 14.0, 0.5)
    with pytest.raises(InfeasibleDeadlineError):
        lowest_power_by_deadline(known, 14.0, 0.5)


@pytest.mark.parametrize("probability", [0.0, 1.0, -1.0, float("nan")])
def test_probabilities_outside_0_to_1_are_refused(probability: float) -> None:
    with pytest.raises(InvalidInputError, match="between 0 and 1"):
        fastest_within_budget(KnownModes.of(MODES, PREDICTED), 20e3, probability)


def test_measured_modes_outside_the_space_are_ignored() -> None:
    foreign = Profile(MODES[:1] * 2, np.array([1.0]), np.array([1.0]))
    assert not KnownModes.of(MODES, PREDICTED, foreign).measured.any()


@given(seed=st.integers(0, 10_000), budget=st.floats(5e3, 5e4), probability=st.floats(0.01, 0.99))
def test_a_choice_keeps_the_budget_and_no_measured_mode_would_be_faster(
    seed: int, budget: float, probability: float
) -> None:
    rng = np.random.default_rng(seed)
    modes = np.column_stack([np.arange(1, 31), *np.full((3, 30), 1e9)])
    prediction = Prediction(*(rng.uniform(low, high, 30) for low, high in ((1, 9), (5e3, 5e4), (0, 0.1), (0, 0.1))))
    rows = rng.permutation(30)[:12]
    measured = Profile(modes[rows], rng.uniform(1, 9, 12), rng.uniform(5e3, 5e4, 12))
    known = KnownModes.of(modes, prediction, measured)
    try:
        chosen = fastest_within_budget(known, budget, probability)
    except InfeasibleBudgetError:
        assert (measured.power_mw > budget).all()
        return
    if chosen.measured:
        assert chosen.power_mw <= budget
    within = measured.power_mw <= budget
    assert not (measured.minibatch_ms[within] < chosen.minibatch_ms).any()
