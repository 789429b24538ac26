"""The history of earlier rounds that policies read."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.fakes.fleets import history_of
from wattfleet.errors import InvalidInputError
from wattfleet.planning import History, Participation

FAILED = Participation(failed=True)
HISTORY = history_of(
    {"a": Participation(False, 100, 2.0), "b": FAILED},
    {"a": FAILED, "b": FAILED, "c": Participation(False, 50, None)},
    {"a": Participation(False, 100, 0.5), "c": Participation(False, None, 1.0)},
    {"a": FAILED},
)


def test_only_completed_rounds_count() -> None:
    assert HISTORY.times_completed == {"a": 2, "c": 2}


def test_the_latest_completed_participation_is_kept() -> None:
    assert {device: number for device, (number, _) in HISTORY.latest.items()} == {"a": 3, "c": 3}
    assert [HISTORY.loss_of(device) for device in "abcd"] == [0.5, None, 1.0, None]


def test_the_last_selection_counts_failures_too() -> None:
    assert HISTORY.last_selected == {"a": 4, "b": 2, "c": 3}


def test_failures_are_counted_since_the_last_completed_round() -> None:
    assert HISTORY.consecutive_failures == {"a": (1, 4), "b": (2, 2)}


def test_statistical_utility_is_samples_times_loss_if_both_are_known() -> None:
    assert [HISTORY.statistical_utility(device) for device in "abcd"] == [50.0, None, None, None]


def test_a_negative_loss_counts_as_zero_utility() -> None:
    assert history_of({"a": Participation(False, 100, -0.5)}).statistical_utility("a") == 0.0


def test_rounds_keep_their_utility_without_participations() -> None:
    assert [(past.number, past.device_ids, past.utility) for past in HISTORY.rounds] == [
        (1, ("a", "b"), 200.0),
        (2, ("a", "b", "c"), 0.0),
        (3, ("a", "c"), 50.0),
        (4, ("a",), 0.0),
    ]


def test_a_round_that_is_added_twice_counts_once() -> None:
    assert HISTORY.after(2, {"b": Participation(False, 1, 1.0)}) == HISTORY


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_rounds_may_end_in_any_order(order: tuple[int, ...]) -> None:
    rounds = {
        1: {"a": Participation(), "b": FAILED},
        2: {"a": FAILED, "b": FAILED, "c": Participation(loss=2.0)},
        3: {"c": Participation(loss=1.0)},
    }
    history = History()
    for number in order:
        history = history.after(number, rounds[number])
    assert history == history_of(*rounds.values())


def test_a_new_history_is_empty() -> None:
    assert (History().times_completed, History().latest, History().consecutive_failures) == ({}, {}, {})


@pytest.mark.parametrize(
    ("num_examples", "loss"), [(-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (10.0, math.nan), (10.0, math.inf)]
)
def test_invalid_samples_and_losses_are_refused(num_examples: float, loss: float) -> None:
    with pytest.raises(InvalidInputError):
        Participation(False, num_examples, loss)
