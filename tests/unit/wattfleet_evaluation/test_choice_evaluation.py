"""Scores of a choice method, computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile, array_to_modes
from wattfleet_evaluation.choice_methods import BruteForce, Choose, MeasurementSession
from wattfleet_evaluation.judging.transfer import evaluate_choice

MODES = np.array([[cores, 1_000_000, 600_000_000, 2_133_000_000] for cores in (1, 2, 3, 4)], dtype=np.float64)
CORPUS = Profile(MODES, np.array([80.0, 40.0, 20.0, 10.0]), np.array([10e3, 12e3, 14.2e3, 17e3]))


@dataclass(frozen=True)
class Fixed:
    """A method that measures the same two modes in every run, and whose choices are given in a dictionary."""

    rows: dict[float, int | None]
    name: str = "fixed"

    def profile(self, session: MeasurementSession, budgets_w: Sequence[float], seed: int) -> Choose:
        session.measure_all(session.modes[:2])
        chosen = {watts: None if row is None else array_to_modes(MODES)[row] for watts, row in self.rows.items()}
        return chosen.__getitem__


def test_the_figures_of_five_budgets_by_hand() -> None:
    # 9 W: no mode is within it. 10 W: the best is 80 ms, the choice 40 ms at 12 W. 12 W: the best is 40 ms; nothing is
    # chosen, so the lowest mode counts with 80 ms. 14 W: the best is 40 ms, the choice 20 ms at 14.2 W. 17 W: the best
    # is 10 ms, the choice 20 ms.
    method = Fixed({10.0: 1, 12.0: None, 14.0: 2, 17.0: 2})
    cases = evaluate_choice(CORPUS, method, 3, [9.0, 10.0, 12.0, 14.0, 17.0], runs=2, seed=0)
    np.testing.assert_allclose(cases.penalty_pct, [[0, 100, 0, 100]] * 2)
    np.testing.assert_allclose(cases.signed_penalty_pct, [[-50, 100, -50, 100]] * 2)
    np.testing.assert_allclose(cases.excess_w, [[2, 0, 0.2, 0]] * 2)
    assert cases.figures() == {
        "time_penalty_pct": {"median": 50.0, "mean": 50.0, "p90": 100.0},
        "over_budget_pct": 50.0,
        "over_budget_1w_pct": 25.0,
        "signed_penalty_pct": 25.0,
        "excess_w": 0.55,
        "modes_measured": 2.0,
        "budgets": {"evaluated": 4, "left_out": 1},
    }


def test_choices_are_also_scored_on_the_rows_that_pass_an_audit() -> None:
    method = Fixed({10.0: 1, 12.0: None, 14.0: 2, 17.0: 2})
    trusted = np.array([True, True, False, True])
    figures = evaluate_choice(CORPUS, method, 3, [10.0, 12.0, 14.0, 17.0], 2, 0, trusted=trusted).figures()
    # The third row fails the audit, so the choices at 14 and 17 W are not scored. At 12 W the best is still 40 ms.
    assert figures["time_penalty_pct_passing"] == {"median": 50.0, "mean": 50.0, "p90": 100.0}
    assert figures["over_budget_pct_passing"] == figures["over_budget_1w_pct_passing"] == 50.0
    assert figures["time_penalty_pct"] == {"median": 50.0, "mean": 50.0, "p90": 100.0}

    # The best row within 17 W fails the audit. Among the rows that pass, the chosen one is the best.
    with_false_row = Profile(MODES, CORPUS.minibatch_ms, np.array([10e3, 12e3, 14e3, 11e3]))
    cases = evaluate_choice(
        with_false_row, Fixed({17.0: 2}), 3, [17.0], 1, 0, trusted=np.array([True, True, True, False])
    )
    np.testing.assert_allclose(cases.penalty_pct, [[100]])
    assert cases.penalty_passing_pct is not None
    np.testing.assert_allclose(cases.penalty_passing_pct, [[0]])


def test_brute_force_has_no_penalty_and_keeps_every_budget() -> None:
    cases = evaluate_choice(CORPUS, BruteForce(), 4, range(8, 20), runs=1, seed=0)
    assert not cases.penalty_pct.any()
    assert not cases.excess_w.any()
    assert cases.left_out == 2


@pytest.mark.parametrize(
    ("budgets", "runs", "limit", "what"),
    [
        ([5.0], 1, 4, "no mode meets any"),
        ([], 1, 4, "budgets above 0 W"),
        ([-1.0], 1, 4, "budgets above 0 W"),
        ([15.0], 0, 4, "give 1 run or more"),
        ([15.0], 1, -1, "modes and a seed of 0 or more"),
    ],
)
def test_bad_input_is_refused(budgets: list[float], runs: int, limit: int, what: str) -> None:
    with pytest.raises(InvalidInputError, match=what):
        evaluate_choice(CORPUS, BruteForce(), limit, budgets, runs, seed=0)
