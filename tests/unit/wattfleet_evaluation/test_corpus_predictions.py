"""Predictions of a corpus as measurements arrive: which rows are fitted, conditioned on, or taken from the cache."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fakes.paired_corpora import Formula, corpora
from wattfleet.modes import Profile, Task
from wattfleet.prediction import conditioned
from wattfleet_evaluation.corpus_predictions import CorpusPredictions

CORPUS = corpora(10).inference
ROWS = [7, 2, 11, 30]


def counted() -> tuple[CorpusPredictions, list[Profile]]:
    seen: list[Profile] = []

    def fit(profile: Profile) -> Formula:
        seen.append(profile)
        return Formula(Task.INFERENCE, 0.01 * (1 + len(profile)))

    return CorpusPredictions(fit), seen  # type: ignore[arg-type]


def test_without_a_number_it_fits_to_every_measurement() -> None:
    predictions, seen = counted()
    found = predictions.after(CORPUS, ROWS)
    np.testing.assert_array_equal(seen[0].minibatch_ms, CORPUS.minibatch_ms[sorted(ROWS)])
    expected = Formula(Task.INFERENCE, 0.05).predict(CORPUS.modes, CORPUS.batch)
    np.testing.assert_array_equal(found.minibatch_ms, expected.minibatch_ms)


def test_it_fits_to_the_first_and_is_conditioned_on_the_others() -> None:
    predictions, seen = counted()
    found = predictions.after(CORPUS, ROWS, 2)
    np.testing.assert_array_equal(seen[0].minibatch_ms, CORPUS.minibatch_ms[[2, 7]])
    rest = np.array(ROWS[2:])
    first = Formula(Task.INFERENCE, 0.03).predict(CORPUS.modes, CORPUS.batch)
    expected = conditioned(first, CORPUS.modes, CORPUS.batch, rest, CORPUS.rows(rest))
    np.testing.assert_array_equal(found.minibatch_ms, expected.minibatch_ms)
    np.testing.assert_array_equal(found.power_log_sd, expected.power_log_sd)


@pytest.mark.parametrize(("count", "fits"), [(None, 4), (2, 2), (0, 1)])
def test_the_same_rows_are_fitted_once_in_whatever_order(count: int | None, fits: int) -> None:
    predictions, seen = counted()
    for _ in range(2):
        for measured in range(1, len(ROWS) + 1):
            predictions.after(CORPUS, ROWS[:measured], count)
    assert len(seen) == fits
    if count is None:
        predictions.after(CORPUS, ROWS[::-1])
        assert len(seen) == fits


def test_fewer_measurements_than_are_fitted_are_all_fitted() -> None:
    predictions, seen = counted()
    predictions.after(CORPUS, [], 3)
    predictions.after(CORPUS, ROWS[:1], 3)
    assert [len(profile) for profile in seen] == [0, 1]
