"""The batch size and mode in which a device answers requests, and how its plans account for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from edge_agent.learning.fitting import NoFrontError
from edge_agent.serving.turns import Batching
from tests.fakes.planned_duty import FAST, HALF, MODES, NONE, SLOW, TRAINING, Planning, duty
from wattfleet.choosing import KnownModes
from wattfleet.duties import Demand, keep_duty
from wattfleet.modes import ModeArray, Profile
from wattfleet.prediction import Prediction

PER_S = 40.0


class Batches(Planning):
    """Doubling the batch size takes 1.5 times as long and draws 1 W more. The middle mode draws the least."""

    def predict(self, workload: str, batches: tuple[int, ...], rows: Profile) -> Mapping[int, Prediction]:
        times_ms, power_mw = np.array([40.0, 20.0, 10.0]), np.array([9e3, 7e3, 20e3])
        return {
            batch: Prediction(times_ms * 1.5 ** np.log2(batch), power_mw + 1e3 * np.log2(batch), NONE, NONE)
            for batch in batches
        }


@pytest.fixture
def planning(tmp_path: Path) -> Batches:
    """A server that accepts batches of 8 requests, and a duty that leaves time for training."""
    planning = Batches(tmp_path)
    planning.turns.plan_batching = planning.batching
    planning.turns.server_connected(8)
    for _ in range(8):
        planning.times.batch_answered(FAST, 1, 10.0, False)
    planning.turns.duty = duty(400.0, PER_S)
    return planning


def training() -> tuple[ModeArray, Prediction]:
    return MODES, TRAINING


def test_a_server_is_limited_to_the_batch_of_the_plan_in_each_mode(planning: Batches) -> None:
    front = planning.front()
    planned = front.power_w[[tuple(mode) for mode in front.modes.tolist()].index(FAST)]
    planning.trains(training, 100.0)
    found = {}
    for mode in (FAST, HALF):
        planning.turns.in_mode(mode)
        found[mode] = planning.turns.batching
    # The expected batch size is the one that allows the most minibatches of training per second.
    batches = [1, 2, 4, 8]
    inference = KnownModes.of(
        np.repeat(MODES, 4, axis=0),
        Prediction(
            np.array([ms * 1.5 ** np.log2(b) for ms in (40.0, 20.0, 10.0) for b in batches]),
            np.ones(12),
            np.zeros(12),
            np.zeros(12),
        ),
        None,
        np.array(3 * batches),
    )
    kept = keep_duty(KnownModes.of(MODES, TRAINING), inference, Demand(PER_S, 400.0), 0.0)
    for mode, batching in found.items():
        rows = np.flatnonzero((kept.beside.modes == np.array(mode)).all(axis=1))
        best = rows[kept.beside.minibatch_ms[rows].argmin()]
        assert batching.batch == kept.beside.stated_batch()[best] > 1
        assert 0 < batching.wait_ms < kept.cycle_ms[best]
    assert found[FAST] != found[HALF]
    assert planned > 20.0, "a larger batch draws more than a single request"


def test_watts_that_allow_no_larger_batch_lead_to_a_smaller_one(planning: Batches) -> None:
    planning.front()
    planning.turns.in_mode(FAST)
    planning.trains(training, 100.0)
    largest = planning.turns.batching
    planning.trains(training, 21.0)
    assert 1 <= planning.turns.batching.batch <= 2 < largest.batch
    planning.trains(training, 12.0)
    assert planning.turns.batching == Batching(), "the plan has no training with so few watts"


def test_without_training_requests_are_answered_at_once_with_the_least_power(planning: Batches) -> None:
    assert planning.turns.batching == Batching(), "nothing is planned yet"
    planning.front()
    planning.turns.in_mode(FAST)
    assert planning.turns.batching == Batching(1, 0.0)
    planning.turns.in_mode(SLOW)
    assert planning.turns.batching == Batching(8, 0.0), "smaller ones would not keep up"
    planning.trains(lambda: (MODES, Prediction(2 * TRAINING.minibatch_ms, TRAINING.power_mw, NONE, NONE)), 100.0)
    assert planning.turns.batching == Batching(), "no front was reported of this training"
    planning.trains(None)
    planning.turns.duty = duty(399.0, PER_S)
    assert planning.turns.batching == Batching(), "another duty"
    planning.turns.duty = None
    assert planning.turns.batching == Batching()


def test_servers_hear_of_another_batch_whoever_changes_the_mode(planning: Batches) -> None:
    told: list[Batching] = []
    planning.turns.batching_changed = lambda: told.append(planning.turns.batching)
    planning.turns.in_mode(FAST)
    planning.front()
    changing = threading.Thread(target=planning.turns.in_mode, args=(SLOW,))
    changing.start()
    changing.join()
    planning.turns.in_mode(SLOW)
    assert told == [Batching(1), Batching(8)]


def test_a_device_rests_where_requests_take_the_least_power(planning: Batches) -> None:
    planning.turns.in_mode(FAST)
    assert planning.turns.is_rested(SLOW, MODES), "nothing is known of the others' power"
    assert planning.resting_w() == 0.0
    planning.turns.changed.clear()
    planning.front()
    assert planning.turns.changed.is_set()
    assert not planning.turns.is_rested(SLOW, MODES)
    assert planning.turns.resting_mode(SLOW, MODES) == HALF
    planning.turns.in_mode(HALF)
    assert planning.turns.is_rested(SLOW, MODES)
    assert planning.resting_w() == 7.0
    planning.turns.duty = None
    assert (planning.turns.resting_mode(SLOW, MODES), planning.resting_w()) == (SLOW, 0.0)


def test_a_device_that_cannot_keep_its_duty_draws_what_the_highest_mode_does(planning: Batches) -> None:
    planning.turns.duty = duty(1.0, PER_S)
    with pytest.raises(NoFrontError, match="cannot be kept"):
        planning.front()
    assert planning.turns.resting_mode(SLOW, MODES) == FAST
    assert planning.resting_w() == 23.0, "with a batch of 8"
    assert planning.turns.batching == Batching()
