"""The history of earlier rounds that policies read, and the trust in a device that follows from it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.fleets import front, history_of
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import (
    Assignment,
    Contradiction,
    History,
    Participation,
    PredictionError,
    Trust,
    contradiction_of,
)

# --- History ----------------------------------------------------------------------------------------------------------
# The history of earlier rounds that policies read.


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


# --- Trust ------------------------------------------------------------------------------------------------------------
# Trust in a device: its observations compared with its own predictions.

FRONT = front((10, 40), (20, 20))


def contradiction(epoch_s: float, power_w: float, epoch_log_sd: float = 0.0) -> Contradiction | None:
    """The contradiction, if any, between an observation and a device's prediction of 10 s and 40 W."""
    assignment = Assignment("a", FRONT.mode(0), 10.0, 40.0, 40.0, 0.0, epoch_log_sd)
    return contradiction_of(assignment, epoch_s, power_w)


@pytest.mark.parametrize(
    ("epoch_s", "power_w"),
    [(10.0, 40.0), (30.0, 60.0), (3.34, 60.0), (10.0, 0.5)],
    ids=["same", "slow", "fast", "idle"],
)
def test_an_observation_near_the_prediction_is_no_contradiction(epoch_s: float, power_w: float) -> None:
    assert contradiction(epoch_s, power_w) is None


@pytest.mark.parametrize(
    ("epoch_s", "power_w", "text"),
    [
        (31.0, 40.0, "31 s per epoch, predicted 10 s"),
        (3.2, 40.0, "3.2 s per epoch, predicted 10 s"),
        (10.0, 61.0, "61.0 W, at most 40.0 W planned"),
    ],
)
def test_an_observation_far_from_the_prediction_is_a_contradiction(epoch_s: float, power_w: float, text: str) -> None:
    found = contradiction(epoch_s, power_w)
    assert found is not None and found.text == text


def test_an_uncertain_prediction_is_contradicted_later() -> None:
    assert contradiction(40.0, 40.0, epoch_log_sd=0.5) is None
    assert contradiction(10.0 * math.exp(1.6), 40.0, epoch_log_sd=0.5) is not None


def after(*contradicted: bool) -> Trust:
    trust = Trust()
    for each in contradicted:
        trust = trust.after(contradiction(100.0, 40.0) if each else None, PredictionError(10.0, 1.0))
    return trust


def test_trust_falls_with_each_contradiction_and_rises_as_they_are_past() -> None:
    assert [after(*[True] * k).share for k in range(4)] == [1.0, 0.875, 0.75, 0.625]
    assert after(True, *[False] * 7).share == 0.875
    assert after(True, *[False] * 8).share == 1.0


def test_a_device_is_left_out_once_its_contradictions_are_too_many() -> None:
    assert after(True, False, True).exclusion_reason(FRONT, 3) is None
    reason = after(True, False, True, True).exclusion_reason(FRONT, 3)
    assert reason == (
        "its predictions were contradicted in 3 of its last 4 observed rounds; the latest: 100 s per epoch, predicted"
        " 10 s; it may train again once its front agrees"
    )


def test_a_front_that_agrees_with_what_was_observed_ends_the_exclusion() -> None:
    trust = after(True, True, True)
    assert trust.exclusion_reason(front((11, 40), (20, 20)), 3) is not None
    assert trust.exclusion_reason(front((90, 40), (95, 20)), 3) is None


def test_after_nothing_but_contradictions_only_the_operator_ends_the_exclusion() -> None:
    reason = after(*[True] * 8).exclusion_reason(front((90, 40), (95, 20)), 3)
    assert reason is not None and "drain ID --undo" in reason


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 9))
def test_trust_is_bounded_and_keeps_a_bounded_record(contradicted: list[bool], limit: int) -> None:
    trust = after(*contradicted)
    assert 0 <= trust.share <= 1 and len(trust.contradicted) <= 8
    is_out = trust.exclusion_reason(FRONT, limit) is not None
    assert is_out == (sum(contradicted[-8:]) >= limit)
