"""The default predictor over power modes and batch sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.fakes.synthetic_workloads import POWER, TIME, drawn, errors_pct, measured, reference
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BatchArray, FittedWorkload, Profile, WorkloadFacts
from wattfleet.prediction import Prediction, RooflinePredictor, pack_artefact, restore_predictor

BATCHES = np.array([1, 4, 8, 16, 64])
# Small batches do not fill the GPU, and launching the kernels takes the same time for every batch.
GROWS = replace(TIME, compute_fixed=0.4, traffic_fixed=0.3, launch_fixed=8.0, loading_fixed=0.05)
ELSEWHERE = drawn(300, 98)


def over_batches(count: int, seed: int) -> Profile:
    modes = drawn(count, seed)
    return measured(modes, GROWS, batch=BATCHES[np.arange(count) % len(BATCHES)])


@cache
def fitted(count: int, seed: int = 0) -> RooflinePredictor:
    return RooflinePredictor.fit(over_batches(count, seed), reference())


def at(batch: int) -> BatchArray:
    return np.full(len(ELSEWHERE), batch)


def width(found: Prediction) -> float:
    return float(np.median(found.time_log_sd))


@pytest.mark.parametrize("batch", [1, 16, 32, 64])
def test_thirty_rows_predict_measured_and_unmeasured_batches(batch: int) -> None:
    truth = measured(ELSEWHERE, GROWS, batch=at(batch))
    errors = [errors_pct(fitted(30, seed).predict(ELSEWHERE, at(batch)), truth) for seed in range(3)]
    time_pct, power_pct = np.median(errors, axis=0)
    assert time_pct < 6 and power_pct < 4


@pytest.mark.parametrize("count", [30, 450])
def test_an_unmeasured_batch_has_wider_intervals(count: int) -> None:
    between = width(fitted(count).predict(ELSEWHERE, at(32)))
    for batch in (16, 64):
        assert between > 1.05 * width(fitted(count).predict(ELSEWHERE, at(batch)))


def test_a_corpus_of_one_batch_does_not_widen_its_intervals_at_that_batch() -> None:
    corpus = RooflinePredictor.fit(measured(drawn(450, 0)))
    own, other = corpus.predict(ELSEWHERE), corpus.predict(ELSEWHERE, at(128))
    truth = measured(ELSEWHERE)
    below, above = own.minibatch_ms_quantile(0.05), own.minibatch_ms_quantile(0.95)
    assert 0.8 < ((below <= truth.minibatch_ms) & (truth.minibatch_ms <= above)).mean() < 0.99
    assert own.time_log_sd.max() < 0.03 < width(other)


def test_a_batch_is_stated_after_a_fit_to_several() -> None:
    with pytest.raises(InvalidInputError, match="fitted to several batch sizes: state the batch size of each row"):
        fitted(30).predict(ELSEWHERE)
    again = RooflinePredictor.load(fitted(30).save())
    with pytest.raises(InvalidInputError, match="several batch sizes"):
        again.predict(ELSEWHERE)
    np.testing.assert_array_equal(
        again.predict(ELSEWHERE, at(32)).minibatch_ms, fitted(30).predict(ELSEWHERE, at(32)).minibatch_ms
    )


def test_an_artefact_of_several_batches_is_restored() -> None:
    artefact = pack_artefact(fitted(30), FittedWorkload("w", 64, 100), "agx-orin", {}, {})
    assert restore_predictor(artefact).save() == fitted(30).save()


@pytest.mark.parametrize("stated", ["rows", "facts"])
def test_the_only_batch_is_predicted_by_default(stated: str) -> None:
    modes = drawn(12, 0)
    if stated == "rows":
        found = RooflinePredictor.fit(measured(modes, GROWS, batch=np.full(12, 64)), reference())
    else:
        plain = measured(modes, GROWS, batch=np.full(12, 64))
        rows = Profile(plain.modes, plain.minibatch_ms, plain.power_mw)
        found = RooflinePredictor.fit(rows, reference(), WorkloadFacts(batch=64))
    assert found.batch == 64
    own, default = found.predict(ELSEWHERE, at(64)), found.predict(ELSEWHERE)
    np.testing.assert_array_equal(own.minibatch_ms, default.minibatch_ms)
    assert (found.predict(ELSEWHERE, at(1)).minibatch_ms < default.minibatch_ms).all()


def test_two_false_rows_of_a_hundred_hardly_change_a_fit() -> None:
    truth = measured(ELSEWHERE, GROWS, batch=at(16))
    before, after = [], []
    for seed in range(4):
        rows = over_batches(100, seed)
        time, power = rows.minibatch_ms.copy(), rows.power_mw.copy()
        time[[7, 41]] *= [2.5, 0.4]
        power[[7, 41]] *= [0.6, 1.7]
        damaged = Profile(rows.modes, time, power, rows.batch, rows.task)
        before.append(errors_pct(RooflinePredictor.fit(rows, reference()).predict(ELSEWHERE, at(16)), truth))
        after.append(errors_pct(RooflinePredictor.fit(damaged, reference()).predict(ELSEWHERE, at(16)), truth))
    for one, other in zip(np.median(before, axis=0), np.median(after, axis=0), strict=True):
        assert other < 1.25 * one + 0.1


def test_power_depends_on_the_batch_only_through_the_step() -> None:
    found = fitted(100).predict(ELSEWHERE, at(64))
    truth = measured(ELSEWHERE, GROWS, POWER, batch=at(64))
    assert errors_pct(found, truth)[1] < 2.5
