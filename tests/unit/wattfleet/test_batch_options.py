"""The batch sizes that an app can train with, and the minibatches per epoch with each of them."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.errors import InvalidInputError
from wattfleet.modes import MAX_BATCH_OPTIONS, BatchOptions, Workload, WorkloadFacts

# To reach the same accuracy, a batch size of 64 needs twice as many samples as one of 16.
OPTIONS = BatchOptions((16, 32, 64), (0.5, 0.75, 1.0))


@pytest.mark.parametrize(
    ("base", "batch", "minibatches"),
    [
        (16, 16, 100.0),
        (16, 32, 75.0),  # 1,600 samples become 2,400, in batches of 32
        (16, 64, 50.0),  # 3,200 samples in batches of 64
        (64, 16, 200.0),  # 6,400 samples become 3,200, in batches of 16
        (32, 64, 200 / 3),
    ],
)
def test_minibatches_of_an_epoch_by_hand(base: int, batch: int, minibatches: float) -> None:
    assert OPTIONS.scaled_minibatches(100, base, batch) == pytest.approx(minibatches)


@given(
    st.dictionaries(st.integers(1, 4096), st.integers(1, 1000), min_size=1, max_size=MAX_BATCH_OPTIONS),
    st.integers(1, 10**6),
    st.data(),
)
def test_the_samples_of_an_epoch_keep_their_proportion(known: dict[int, int], count: int, data: st.DataObject) -> None:
    options = BatchOptions.of({batch: samples / 8 for batch, samples in known.items()})
    base, batch = (data.draw(st.sampled_from(sorted(known))) for _ in range(2))
    expected = Fraction(count * base * known[batch], batch * known[base])
    scaled = options.scaled_minibatches(count, base, batch)
    assert scaled == pytest.approx(float(expected), rel=1e-12)
    assert options.scaled_minibatches(scaled, batch, base) == pytest.approx(count, rel=1e-12), "and back"


def test_options_are_read_in_any_order() -> None:
    assert BatchOptions.of({64: 1.0, 16: 0.5, 32: 0.75}) == OPTIONS
    assert 32 in OPTIONS and 48 not in OPTIONS and 0 not in OPTIONS


@pytest.mark.parametrize(
    ("batches", "samples", "error"),
    [
        ((), (), "state 1 to 16 batch sizes, not 0"),
        (tuple(range(1, 18)), (1.0,) * 17, "state 1 to 16 batch sizes, not 17"),
        ((0, 16), (1.0, 1.0), "a whole number of samples, from 1"),
        ((-16,), (1.0,), "a whole number of samples, from 1"),
        ((16.0,), (1.0,), "a whole number of samples, from 1"),
        ((True,), (1.0,), "a whole number of samples, from 1"),
        ((10**30,), (1.0,), "a whole number of samples, from 1"),
        ((32, 16), (1.0, 1.0), "distinct and ascending"),
        ((16, 16), (1.0, 1.0), "distinct and ascending"),
        ((16, 32), (1.0,), "2 batch sizes need as many relative samples, not 1"),
        ((16,), (0.0,), "finite and above 0"),
        ((16,), (-1.0,), "finite and above 0"),
        ((16,), (math.nan,), "finite and above 0"),
        ((16,), (math.inf,), "finite and above 0"),
    ],
)
def test_options_that_cannot_be_are_refused(batches: tuple[int, ...], samples: tuple[float, ...], error: str) -> None:
    with pytest.raises(InvalidInputError, match=error):
        BatchOptions(batches, samples)


def test_the_most_options_there_may_be() -> None:
    most = BatchOptions(tuple(range(1, MAX_BATCH_OPTIONS + 1)), (1.0,) * MAX_BATCH_OPTIONS)
    assert len(most.batches) == MAX_BATCH_OPTIONS == 16


@pytest.mark.parametrize(
    ("batch", "batches", "chooses"),
    [(16, OPTIONS, True), (64, OPTIONS, True), (48, OPTIONS, False), (None, OPTIONS, False), (16, None, False)],
)
def test_a_plan_chooses_only_if_the_app_trains_with_one_of_the_options(
    batch: int | None, batches: BatchOptions | None, chooses: bool
) -> None:
    assert Workload("app", WorkloadFacts(batch=batch), batches).choice == (batches if chooses else None)


def test_a_step_of_another_batch_has_operations_in_proportion() -> None:
    workload = Workload("app", WorkloadFacts(batch=16, parameters=1e6, step_flops=3.2e9), OPTIONS)
    larger = workload.with_batch(64)
    assert larger == Workload("app", WorkloadFacts(batch=64, parameters=1e6, step_flops=12.8e9), OPTIONS)
    assert larger.with_batch(16) == workload
    assert Workload("app", WorkloadFacts(batch=16)).with_batch(64).facts == WorkloadFacts(batch=64)


def test_newer_facts_leave_the_options_as_they_are() -> None:
    workload = Workload("app", WorkloadFacts(batch=16), OPTIONS)
    assert workload.completed(WorkloadFacts(loader_workers=4)).batches == OPTIONS


def test_a_batch_that_hardly_trains_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="1,000 times"):
        BatchOptions((16, 32), (1.0, 1001.0))
    assert BatchOptions((16, 32), (1.0, 1000.0)).relative_to(16, 32) == 1000
