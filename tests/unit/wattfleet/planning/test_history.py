"""What policies read from earlier rounds."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.fakes.fleets import history_of
from wattfleet.errors import InvalidInputError
from wattfleet.planning import History, Part

FAILED = Part(failed=True)
HISTORY = history_of(
    {"a": Part(False, 100, 2.0), "b": FAILED},
    {"a": FAILED, "b": FAILED, "c": Part(False, 50, None)},
    {"a": Part(False, 100, 0.5), "c": Part(False, None, 1.0)},
    {"a": FAILED},
)


def test_only_parts_that_were_done_count() -> None:
    assert HISTORY.times_done == {"a": 2, "c": 2}


def test_the_latest_part_that_was_done_is_what_a_device_is_known_by() -> None:
    assert {device: number for device, (number, _) in HISTORY.latest.items()} == {"a": 3, "c": 3}
    assert [HISTORY.loss_of(device) for device in "abcd"] == [0.5, None, 1.0, None]


def test_a_device_is_tried_whether_it_fails_or_not() -> None:
    assert HISTORY.last_tried == {"a": 4, "b": 2, "c": 3}


def test_failures_are_counted_since_the_last_part_that_was_done() -> None:
    assert HISTORY.failures_in_a_row == {"a": (1, 4), "b": (2, 2)}


def test_there_is_as_much_to_learn_as_samples_times_loss_where_both_are_known() -> None:
    assert [HISTORY.statistical_utility(device) for device in "abcd"] == [50.0, None, None, None]


def test_a_loss_below_zero_is_nothing_left_to_learn() -> None:
    assert history_of({"a": Part(False, 100, -0.5)}).statistical_utility("a") == 0.0


def test_what_each_round_gained_is_kept_without_its_parts() -> None:
    assert [(past.number, past.device_ids, past.gained) for past in HISTORY.rounds] == [
        (1, ("a", "b"), 200.0),
        (2, ("a", "b", "c"), 0.0),
        (3, ("a", "c"), 50.0),
        (4, ("a",), 0.0),
    ]


def test_a_round_that_is_told_again_counts_once() -> None:
    assert HISTORY.after(2, {"b": Part(False, 1, 1.0)}) == HISTORY


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_rounds_may_end_in_any_order(order: tuple[int, ...]) -> None:
    rounds = {
        1: {"a": Part(), "b": FAILED},
        2: {"a": FAILED, "b": FAILED, "c": Part(loss=2.0)},
        3: {"c": Part(loss=1.0)},
    }
    history = History()
    for number in order:
        history = history.after(number, rounds[number])
    assert history == history_of(*rounds.values())


def test_a_run_that_begins_knows_nothing() -> None:
    assert (History().times_done, History().latest, History().failures_in_a_row) == ({}, {}, {})


@pytest.mark.parametrize(
    ("num_examples", "loss"), [(-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (10.0, math.nan), (10.0, math.inf)]
)
def test_samples_and_losses_that_are_none_are_refused(num_examples: float, loss: float) -> None:
    with pytest.raises(InvalidInputError):
        Part(False, num_examples, loss)
