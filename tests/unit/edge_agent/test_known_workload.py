"""An agent's knowledge of a workload whose batch size a plan may choose."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.profiling.known_workload import KnownWorkload
from wattfleet.errors import InvalidInputError
from wattfleet.modes import ASSUMED_MINIBATCHES_PER_EPOCH, BatchOptions, Workload, WorkloadFacts
from wattfleet_proto.limits import MAX_MINIBATCHES_PER_EPOCH

# To reach the same accuracy, a batch size of 64 needs twice as many samples as one of 16.
OPTIONS = BatchOptions((16, 32, 64), (0.5, 0.75, 1.0))


def known(batch: int | None = 16, length: int | None = 200, options: BatchOptions | None = OPTIONS) -> KnownWorkload:
    return KnownWorkload(Workload("app", WorkloadFacts(batch=batch), options), length)


# --- minibatches of an epoch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "minibatches"), [(16, 200.0), (32, 150.0), (64, 100.0)])
def test_an_epoch_has_other_minibatches_with_another_batch(batch: int, minibatches: float) -> None:
    assert known().minibatches_of(batch) == pytest.approx(minibatches)
    trained = known().with_batch(batch)
    assert (trained.workload.facts.batch, trained.minibatches_per_epoch) == (batch, minibatches)
    assert trained.counted_minibatches == minibatches


@pytest.mark.parametrize(
    ("workload", "reported"),
    [
        (known(), 100),
        (known(32, 150), 100),
        (known(64, 100), 100),
        (known(length=None), None),
        (known(options=None), 200),
        (known(batch=48), 200),
        (known(batch=None), 200),
        (known(length=1), 1),
    ],
    ids=["16", "32", "64", "unknown length", "no options", "another batch", "unknown batch", "one minibatch"],
)
def test_the_coordinator_is_told_the_minibatches_of_the_largest_batch(
    workload: KnownWorkload, reported: int | None
) -> None:
    assert workload.reported_minibatches == reported


@pytest.mark.parametrize("trained", OPTIONS.batches)
def test_the_assumed_length_is_that_of_the_largest_batch(trained: int) -> None:
    unknown = known(batch=trained, length=None)
    assert unknown.minibatches_of(64) == pytest.approx(ASSUMED_MINIBATCHES_PER_EPOCH)
    assert unknown.minibatches_of(16) == pytest.approx(2 * ASSUMED_MINIBATCHES_PER_EPOCH)
    assert unknown.counted_minibatches == round(unknown.minibatches_of(trained))
    assert unknown.reported_minibatches is None and unknown.with_batch(32).minibatches_per_epoch is None


def test_without_a_choice_the_assumed_length_is_that_of_the_apps_batch() -> None:
    assert known(length=None, options=None).counted_minibatches == ASSUMED_MINIBATCHES_PER_EPOCH
    assert known(batch=48, length=None).counted_minibatches == ASSUMED_MINIBATCHES_PER_EPOCH


def test_an_epoch_of_another_batch_stays_within_what_can_be_counted() -> None:
    assert known(64, 1).with_batch(16).minibatches_per_epoch == 2
    assert known(16, 1).with_batch(64).minibatches_per_epoch == 1
    most = known(64, MAX_MINIBATCHES_PER_EPOCH)
    assert most.with_batch(16).minibatches_per_epoch == MAX_MINIBATCHES_PER_EPOCH


# --- memory -------------------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_leaves_the_smaller_ones() -> None:
    after = known(64, 100).out_of_memory()
    assert after.too_large_batch == 64
    assert after.offered_batches == (16, 32)
    assert (after.workload.facts.batch, after.minibatches_per_epoch) == (32, 150), "the largest that is left"
    assert after.reported_minibatches == 100, "as other devices count"


def test_batches_that_do_not_fit_one_after_the_other_leave_none() -> None:
    after = known(64, 100).out_of_memory().out_of_memory()
    assert after.offered_batches == (16,)
    assert (after.too_large_batch, after.workload.facts.batch) == (32, 16)
    none = after.out_of_memory()
    assert (none.offered_batches, none.too_large_batch, none.workload.facts.batch) == ((), 16, 16)
    assert none.out_of_memory() == none


def test_a_batch_above_one_that_does_not_fit_is_not_offered_when_options_come_again() -> None:
    after = known(32, 150).out_of_memory()
    assert after.with_batches(OPTIONS).offered_batches == (16,)
    assert after.with_batches(BatchOptions((32, 64), (1.0, 1.0))).offered_batches == ()
    assert after.with_batches(None).offered_batches == ()
    assert known().with_batches(OPTIONS) == known()


@pytest.mark.parametrize("workload", [known(options=None), known(batch=48), known(batch=None)])
def test_an_app_that_lets_no_plan_choose_keeps_its_batch(workload: KnownWorkload) -> None:
    assert workload.out_of_memory() == workload


@given(
    st.dictionaries(st.integers(1, 512), st.floats(0.1, 10), min_size=1, max_size=16),
    st.lists(st.integers(0, 15), max_size=20),
)
def test_after_any_failures_only_smaller_batches_are_trained(samples: dict[int, float], chosen: list[int]) -> None:
    options = BatchOptions.of(samples)
    state = known(batch=options.batches[0], length=1_000, options=options)
    failed: set[int] = set()
    for number in chosen:
        left = state.offered_batches
        if not left:
            break
        batch = left[number % len(left)]
        failed.add(batch)
        state = state.with_batch(batch).out_of_memory()
        assert state.offered_batches == tuple(each for each in options.batches if each < min(failed))


# --- stored -------------------------------------------------------------------------------------------------------


def through_json(workload: KnownWorkload) -> KnownWorkload:
    return KnownWorkload.from_content(json.loads(json.dumps(workload.content())))


def test_what_was_learned_survives_a_restart_without_the_options_of_the_run() -> None:
    """The coordinator sends the options again, but only the device knows that a batch size does not fit."""
    after = known(64, 100).out_of_memory()
    restarted = through_json(after)
    assert restarted == after.with_batches(None)
    assert restarted.with_batches(OPTIONS) == after


def test_a_file_of_an_earlier_version_knows_no_batch_that_is_too_large() -> None:
    content = known().content()
    del content["too_large_batch"]
    assert KnownWorkload.from_content(content) == known(options=None)


@pytest.mark.parametrize("damaged", ["64", 64.0, True, [64]])
def test_a_damaged_batch_is_refused(damaged: object) -> None:
    with pytest.raises(TypeError, match="too_large_batch is not a whole number"):
        KnownWorkload.from_content({**known().content(), "too_large_batch": damaged})


@pytest.mark.parametrize("length", [0, -1, MAX_MINIBATCHES_PER_EPOCH + 1])
def test_a_length_out_of_range_is_refused(length: int) -> None:
    with pytest.raises(InvalidInputError, match="minibatches_per_epoch must be 1 to"):
        replace(known(), minibatches_per_epoch=length)
