"""Scores of a transfer, for predictors whose errors are known."""

from __future__ import annotations

from itertools import count
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from reference_models.training import require_disjoint
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BatchArray, ModeArray, Profile, WorkloadFacts
from wattfleet.prediction import Prediction, Predictor
from wattfleet_evaluation.judging.transfer import TransferScores, evaluate_transfer, quartiles

MODES = np.array([[1 + k, 1e6, 1e9, 2e9] for k in range(10)])
TARGET = Profile(MODES, np.full(10, 100.0), np.full(10, 10_000.0))


class TenPercentOff:
    """A predictor with times 10 % too long and wide intervals, and powers 5 % too low and narrow ones."""

    name = "ten-percent-off"
    seen: list[Profile] = []

    @classmethod
    def fit(cls, profile: Profile, reference: object = None, facts: object = None) -> TenPercentOff:
        cls.seen.append(profile)
        return cls()

    def predict(self, modes: ModeArray, batch: BatchArray | None = None) -> Prediction:
        n = len(modes)
        return Prediction(np.full(n, 110.0), np.full(n, 9500.0), np.full(n, 0.2), np.full(n, 0.01))


@pytest.fixture(autouse=True)
def forget_profiles() -> None:
    TenPercentOff.seen.clear()


def evaluate(
    target: Profile = TARGET, modes: int = 4, runs: int = 3, seed: int = 7, trusted: NDArray[np.bool_] | None = None
) -> TransferScores:
    ticks = count(step=2.5)
    return evaluate_transfer(
        cast(type[Predictor], TenPercentOff), [], target, modes, runs, seed, lambda: next(ticks), trusted
    )


def test_errors_coverage_and_seconds() -> None:
    scores = evaluate()
    np.testing.assert_allclose(scores.time_mape, [10, 10, 10])
    np.testing.assert_allclose(scores.power_mape, [5, 5, 5])
    assert scores.time_coverage.tolist() == [100, 100, 100]
    assert scores.power_coverage.tolist() == [0, 0, 0]
    assert scores.fit_seconds.tolist() == [2.5, 2.5, 2.5]


def test_the_summary_has_the_keys_of_the_command() -> None:
    summary = evaluate().summary()
    assert set(summary) == {"time_mape", "power_mape", "coverage_90", "fit_seconds"}
    assert set(summary["time_mape"]) == {"median", "q1", "q3"}
    assert summary["coverage_90"] == {"time": 100.0, "power": 0.0}


def test_each_run_draws_with_its_own_seed() -> None:
    evaluate(seed=7)
    for run, profile in enumerate(TenPercentOff.seen):
        drawn = np.random.default_rng(7 + run).choice(10, 4, replace=False)
        np.testing.assert_array_equal(profile.modes, MODES[drawn])


def test_only_modes_that_were_not_drawn_are_scored() -> None:
    # One row is predicted wrongly. It only counts in the runs that did not draw it.
    power = np.full(10, 9500.0)
    time = np.full(10, 110.0)
    time[3] = 55.0
    scores = evaluate(Profile(MODES, time, power), runs=20)
    held_out = [3 not in np.random.default_rng(7 + k).choice(10, 4, replace=False) for k in range(20)]
    np.testing.assert_allclose(scores.time_mape, [100 / 6 if out else 0 for out in held_out], atol=1e-9)
    assert 0 < sum(held_out) < 20


def test_errors_over_the_passing_rows_are_scored_separately() -> None:
    time = np.full(10, 110.0)
    time[3] = 55.0
    scores = evaluate(Profile(MODES, time, TARGET.power_mw), trusted=np.arange(10) != 3)
    np.testing.assert_allclose(scores.summary()["time_mape_passing"]["median"], 0, atol=1e-9)
    np.testing.assert_allclose(scores.summary()["power_mape_passing"]["median"], 5)
    assert scores.time_mape.max() > 1


def test_without_passing_rows_there_are_no_passing_errors() -> None:
    scores = evaluate(trusted=np.zeros(10, dtype=bool))
    assert scores.time_mape_passing is None and scores.power_mape_passing is None
    np.testing.assert_allclose(scores.time_mape, 10)


def test_a_target_that_shares_rows_with_the_corpus_is_refused() -> None:
    time = np.arange(100.0, 110.0)
    corpus = Profile(MODES, time, TARGET.power_mw)

    def sharing(rows: int) -> Profile:
        return Profile(MODES, np.append(time[:rows], time[rows:] + 0.5), TARGET.power_mw)

    require_disjoint(corpus, sharing(3))
    with pytest.raises(InvalidInputError, match="4 of the target's 10 rows are also in the reference's corpus"):
        require_disjoint(corpus, sharing(4))
    with pytest.raises(InvalidInputError, match="2 of the target's 2 rows"):
        require_disjoint(TARGET, TARGET.rows(np.arange(2)))


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"modes": 10}, {"modes": -1}, {"seed": -1}])
def test_bad_numbers_of_runs_modes_and_seeds_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        evaluate(**wrong)


def test_quartiles() -> None:
    assert quartiles(np.array([4.0, 0, 1, 2, 3])) == {"median": 2, "q1": 1, "q3": 3}


class ByBatch:
    """A predictor that knows the time of every batch size if the facts state 3 loader workers."""

    name = "by-batch"

    def __init__(self, facts: WorkloadFacts) -> None:
        self.right = facts.loader_workers == 3

    @classmethod
    def fit(cls, profile: Profile, reference: object, facts: WorkloadFacts) -> ByBatch:
        return cls(facts)

    def predict(self, modes: ModeArray, batch: BatchArray) -> Prediction:
        ms = 100.0 * batch if self.right else np.ones(len(modes))
        return Prediction(ms, np.full(len(modes), 10_000.0), np.full(len(modes), 0.1), np.full(len(modes), 0.1))


class Together(ByBatch):
    """The same predictor, fitted to all draws at once."""

    @classmethod
    def fit_all(cls, profiles: list[Profile], reference: object, facts: WorkloadFacts) -> list[Together]:
        return [cls(facts) for _ in profiles]


@pytest.mark.parametrize("kind", [ByBatch, Together])
def test_facts_reach_every_fit_and_each_row_is_predicted_at_its_batch(kind: type[ByBatch]) -> None:
    batch = np.arange(10) % 2 + 1
    target = Profile(MODES, 100.0 * batch, np.full(10, 10_000.0), batch)
    facts = WorkloadFacts(loader_workers=3)
    scores = evaluate_transfer(cast(type[Predictor], kind), [], target, 4, 2, 0, lambda: 0.0, facts=facts)
    assert scores.time_mape.tolist() == [0, 0]
