"""Unknown facts of a workload are inferred from its measurements, and wrong references get little weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.synthetic_workloads import (
    FOUR_WORKERS,
    POWER,
    SPACE,
    TIME,
    WITHOUT_WORKERS,
    drawn,
    errors_pct,
    measured,
    reference,
    scaled,
)
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile, WorkloadFacts
from wattfleet.prediction import Prediction, RooflinePredictor

ELSEWHERE = drawn(400, 99)
NOTHING = measured(SPACE[:0])


def columns(found: Prediction) -> np.ndarray:
    return np.stack([found.minibatch_ms, found.power_mw, found.time_log_sd, found.power_log_sd])


def test_hypotheses_are_weighed_until_the_facts_are_known() -> None:
    unknown = RooflinePredictor.fit(NOTHING, reference())
    assert [round(each.probability, 6) for each in unknown.hypotheses] == [0.8, 0.2]
    for workers in (0, 4):
        known = RooflinePredictor.fit(NOTHING, reference(), WorkloadFacts(loader_workers=workers))
        assert [each.probability for each in known.hypotheses] == [1.0]


@pytest.mark.parametrize(("time", "workers"), [(WITHOUT_WORKERS, 0), (scaled(2.0), 4)])
def test_loader_workers_are_recognised_from_ten_rows(time, workers: int) -> None:
    for seed in range(3):
        rows = measured(drawn(10, seed), time)
        found = RooflinePredictor.fit(rows, reference())
        known = RooflinePredictor.fit(rows, reference(), WorkloadFacts(loader_workers=workers))
        assert found.likeliest.probability > 0.8
        assert found.likeliest.time == known.likeliest.time
        assert len(known.hypotheses) == 1


def test_a_workload_without_loader_workers_is_predicted_from_ten_rows() -> None:
    truth = measured(ELSEWHERE, WITHOUT_WORKERS)
    found, misled = [], []
    for seed in range(3):
        rows = measured(drawn(10, seed), WITHOUT_WORKERS)
        found.append(errors_pct(RooflinePredictor.fit(rows, reference()).predict(ELSEWHERE), truth))
        wrong = RooflinePredictor.fit(rows, reference(), FOUR_WORKERS)
        misled.append(errors_pct(wrong.predict(ELSEWHERE), truth))
    assert np.median(found, axis=0)[0] < 6
    assert np.median(found, axis=0)[0] <= np.median(misled, axis=0)[0]


def test_a_mixture_is_as_good_as_its_best_reference() -> None:
    # An odd board: thirty times the work, half the power, and no overlap.
    odd_time = replace(scaled(30.0), gpu_overlap=0.01, launch_overlap=0.01, loading_overlap=0.01, workers=1.0)
    odd = RooflinePredictor.fit(measured(drawn(450, 3), odd_time, replace(POWER, floor_mw=2_000, gpu_busy_mw=1_000)))
    truth = measured(ELSEWHERE, scaled(2.0))
    alone, mixed = [], []
    for seed in range(4):
        rows = measured(drawn(10, seed), scaled(2.0))
        alone.append(errors_pct(RooflinePredictor.fit_mixed(rows, [reference()]).predict(ELSEWHERE), truth))
        mixed.append(errors_pct(RooflinePredictor.fit_mixed(rows, [odd, reference()]).predict(ELSEWHERE), truth))
    for one, other in zip(np.median(alone, axis=0), np.median(mixed, axis=0), strict=True):
        assert other < 1.15 * one + 0.1


def test_a_mixture_of_one_reference_is_a_transfer_from_it() -> None:
    rows = measured(drawn(8, 0), scaled(2.0))
    assert RooflinePredictor.fit_mixed(rows, [reference()]).save() == RooflinePredictor.fit(rows, reference()).save()
    with pytest.raises(InvalidInputError, match="at least 5, or give a reference"):
        RooflinePredictor.fit_mixed(rows.rows(np.arange(4)), [])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_hardly_any_rows_give_wide_intervals_that_hold(count: int) -> None:
    truth = measured(ELSEWHERE, scaled(5.0))
    held = []
    for seed in range(4):
        found = RooflinePredictor.fit(measured(drawn(count, seed), scaled(5.0)), reference()).predict(ELSEWHERE)
        assert np.isfinite(columns(found)).all() and (columns(found) > 0).all()
        assert np.median(found.time_log_sd) > (0.5 if count == 0 else 0.05)
        below, above = found.minibatch_ms_quantile(0.05), found.minibatch_ms_quantile(0.95)
        held.append(((below <= truth.minibatch_ms) & (truth.minibatch_ms <= above)).mean())
    assert np.mean(held) > 0.85


def rows_of_any_value(count: int) -> st.SearchStrategy[Profile]:
    """Rows with arbitrary times and powers, including ones that no physics explains."""
    modes = st.lists(st.integers(0, len(SPACE) - 1), min_size=count, max_size=count, unique=True)
    times = st.lists(st.floats(0.01, 1e6), min_size=count, max_size=count)
    powers = st.lists(st.floats(100, 1e6), min_size=count, max_size=count)
    return st.builds(lambda m, t, p: Profile(SPACE[m], np.array(t), np.array(p)), modes, times, powers)


@settings(max_examples=15)
@given(profile=st.integers(1, 7).flatmap(rows_of_any_value))
def test_any_rows_give_finite_positive_predictions(profile: Profile) -> None:
    found = columns(RooflinePredictor.fit(profile, reference()).predict(SPACE[::500]))
    assert np.isfinite(found).all() and (found > 0).all()


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 12), factor=st.floats(0.1, 20))
def test_the_order_of_few_rows_does_not_matter(seed: int, count: int, factor: float) -> None:
    rows = measured(drawn(count, seed), scaled(factor))
    turned = rows.rows(np.random.default_rng(seed).permutation(count))
    one, other = (columns(RooflinePredictor.fit(each, reference()).predict(SPACE[::500])) for each in (rows, turned))
    np.testing.assert_allclose(one, other, rtol=2e-3)


def test_rows_at_one_mode_of_several_batches_can_be_fitted() -> None:
    same = np.repeat(SPACE[-1:], 6, axis=0)
    rows = measured(same, TIME, batch=np.array([1, 2, 4, 8, 16, 32]))
    for known in (reference(), None):
        found = columns(RooflinePredictor.fit(rows, known).predict(SPACE[::500], np.full(len(SPACE[::500]), 64)))
        assert np.isfinite(found).all() and (found > 0).all()


def unit(seed: int) -> tuple:
    """The parameters of one unit, a few percent off those of its kind. The workload is larger than any known one."""
    rng = np.random.default_rng(seed)
    time, power = scaled(2.5).log(), replace(POWER, gpu_busy_mw=16_000).log()
    return (
        type(TIME).from_log(time + rng.normal(0, 0.03, len(time))),
        type(POWER).from_log(power + rng.normal(0, 0.03, len(power))),
    )


def test_rows_of_other_units_predict_a_unit_that_has_measured_nothing() -> None:
    knows_units = reference().with_units([measured(drawn(6, 10 + k), *unit(k)) for k in range(3)])
    alone, together = [], []
    for seed in range(20, 23):
        truth = measured(ELSEWHERE, *unit(seed), noise=0.0)
        alone.append(errors_pct(RooflinePredictor.fit(NOTHING, reference()).predict(ELSEWHERE), truth))
        found = RooflinePredictor.fit(NOTHING, knows_units).predict(ELSEWHERE)
        together.append(errors_pct(found, truth))
        assert (np.abs(np.log(found.power_mw / truth.power_mw)) < 1.645 * found.power_log_sd).mean() > 0.8
    assert (np.median(together, axis=0) < np.median(alone, axis=0) / 2).all()
    assert np.median(together, axis=0)[0] < 6


def test_rows_of_units_that_train_something_else_are_recognised() -> None:
    own, truth = measured(drawn(5, 1), scaled(2.5)), measured(ELSEWHERE, scaled(2.5), noise=0.0)
    elsewhere = measured(drawn(16, 2), scaled(9.0), replace(POWER, gpu_busy_mw=20_000))
    alone = RooflinePredictor.fit(own, reference()).predict(ELSEWHERE)
    misled = RooflinePredictor.fit(own, reference().with_units([elsewhere])).predict(ELSEWHERE)
    assert errors_pct(misled, truth)[0] == pytest.approx(errors_pct(alone, truth)[0], abs=1.0)


def test_absurd_rows_of_units_change_hardly_anything() -> None:
    own, truth = measured(drawn(5, 1)), measured(ELSEWHERE, noise=0.0)
    alone = RooflinePredictor.fit(own, reference()).predict(ELSEWHERE)
    absurd = [replace(measured(drawn(5, 2)), minibatch_ms=np.full(5, ms)) for ms in (1e300, 1e-300)]
    found = RooflinePredictor.fit(own, reference().with_units(absurd)).predict(ELSEWHERE)
    assert errors_pct(found, truth) == pytest.approx(errors_pct(alone, truth), abs=1.0)
    assert reference().with_units([NOTHING]).units == ()
