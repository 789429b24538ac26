"""Training continues after a slow minibatch, a hung server, or trainings of single minibatches."""

from __future__ import annotations

import pytest

from edge_agent.serving.turns import Kind, LiveTimes, Turns
from wattfleet.duties import ConstantArrivals, Duty
from wattfleet.modes import PowerMode

SERVER = 1
LIMIT_MS = 300.0
MODE = PowerMode(12, 2_000_000, 1_000_000_000, 3_000_000_000)


def turns_of(minibatches: int = 5, minibatch_ms: float = 100.0) -> Turns:
    times = LiveTimes()
    for _ in range(minibatches):
        times.minibatch_ended(MODE, minibatch_ms)
    times.batch_answered(MODE, 1, 20.0, after_minibatch=False)
    turns = Turns(times)
    turns.duty, turns.mode = Duty("camera", ConstantArrivals(10), LIMIT_MS), MODE
    return turns


def train(turns: Turns, took_ms: list[float], now_s: float = 0.0, is_first: bool = False) -> float:
    """Train some minibatches one after the other in virtual time; returns when the last one ended."""
    for each_ms in took_ms:
        ticket = turns.request(Kind.MINIBATCH, now_s, is_first=is_first)
        while not turns.granted(now_s):
            next_s = turns.next_check_s(now_s)
            assert next_s is not None, "it is looked at again without an event"
            now_s = next_s
        now_s += each_ms / 1e3
        turns.end(ticket, now_s)
    return now_s


@pytest.mark.parametrize("slow_ms", [400.0, 5_000.0])
@pytest.mark.parametrize("before", [1, 10])
def test_one_slow_minibatch_holds_training_up_for_one_trial_at_most(slow_ms, before):
    turns = turns_of(minibatches=0)
    ends_s = train(turns, [100.0] * before + [slow_ms] + [100.0] * 50)
    assert ends_s - 0.1 * (before + 50) - slow_ms / 1e3 < 1.0


def test_minibatches_that_are_slow_now_and_then_are_still_tried_rarely():
    # Without a limit on trials, one in ten minibatches would last 400 ms and make requests late.
    turns = turns_of()
    now_s, slow = 0.0, 0
    while now_s < 3600.0:
        now_s = train(turns, [100.0] * 9 + [400.0], now_s)
        slow += 1
    assert slow * (0.4 + LIMIT_MS / 1e3) <= 0.1 * 0.05 * now_s * 1.1


def test_minibatches_that_became_much_longer_are_learnt_although_one_may_be_a_pause():
    turns = turns_of(minibatches=40)
    train(turns, [5_000.0])
    assert turns.times.minibatch_ms(MODE) == 100.0
    train(turns, [5_000.0] * 8)
    assert turns.times.minibatch_ms(MODE) == 5_000.0


def test_a_first_time_is_not_taken_for_a_pause_however_long():
    turns = turns_of(minibatches=0)
    train(turns, [3_000.0])
    assert turns.times.minibatch_ms(MODE) == 3_000.0


def test_training_goes_on_beside_an_inference_server_that_hangs_in_its_turn():
    turns = turns_of()
    turns.requests_waiting(SERVER, 1, 0.0, 0.0)
    hung = turns.request(Kind.INFERENCE, 0.0, server=SERVER)
    assert turns.granted(0.0) == [hung]
    assert train(turns, [100.0] * 10) < 3.0


def test_training_goes_on_after_an_app_has_announced_requests_and_gone_silent():
    turns = turns_of()
    turns.requests_waiting(SERVER, 1, 0.0, 0.0)
    train(turns, [100.0])  # this minibatch still fits
    assert train(turns, [100.0] * 10, 0.2) < 4.0


@pytest.mark.parametrize("in_turn", [True, False])
def test_the_requests_of_a_silent_server_count_again_at_its_next_message(in_turn):
    turns = turns_of()
    turns.requests_waiting(SERVER, 1, 0.0, 0.0)
    if in_turn:
        hung = turns.request(Kind.INFERENCE, 0.0, server=SERVER)
        assert turns.granted(0.0) == [hung]
    now_s = train(turns, [100.0] * 10)
    turns.requests_waiting(SERVER, 2, now_s - 0.29, now_s)
    turns.request(Kind.MINIBATCH, now_s)
    assert turns.granted(now_s) == []


def test_an_overloaded_server_that_says_so_is_not_taken_for_a_silent_one():
    turns = turns_of()
    turns.request(Kind.MINIBATCH, 0.0)
    for tenth in range(300):
        turns.requests_waiting(SERVER, 5, -10.0, tenth / 10)
        assert turns.granted(tenth / 10 + 0.09) == []


def test_a_training_of_one_minibatch_per_pass_is_learnt_from_its_firsts():
    turns = turns_of(minibatches=0)
    turns.duty = Duty("camera", ConstantArrivals(10), 150.0)
    train(turns, [160.0, 160.0], is_first=True)
    turns.request(Kind.MINIBATCH, 10.0)
    assert turns.granted(10.0) == [], "160 ms do not fit into 150 ms, and one was tried"
    assert turns.why_training_waits(10.0) is not None


def test_later_minibatches_replace_what_the_first_ones_have_told():
    turns = turns_of(minibatches=0)
    now_s = train(turns, [3_000.0], is_first=True)
    assert train(turns, [100.0] * 10, now_s) - now_s < 1.1
    train(turns, [3_000.0], 10.0, is_first=True)
    assert turns.times.minibatch_ms(MODE) == pytest.approx(100.0)


def test_first_minibatches_that_have_become_faster_train_on():
    turns = turns_of(minibatches=0)
    now_s = train(turns, [3_000.0], is_first=True)
    assert train(turns, [100.0] * 10, now_s, is_first=True) - now_s < 1.1


def test_a_server_with_a_huge_largest_batch_is_given_up_after_half_a_minute():
    turns = turns_of()
    turns.largest_batch = 100_000
    hung = turns.request(Kind.INFERENCE, 0.0, server=SERVER)
    assert turns.granted(0.0) == [hung]
    waiting = turns.request(Kind.INFERENCE, 1.0, server=2)
    assert turns.granted(29.9) == []
    assert turns.next_check_s(29.9) == 30.0
    assert turns.granted(30.0) == [waiting]


def test_the_times_of_a_mode_that_is_used_again_and_again_are_not_forgotten():
    times = LiveTimes()
    times.minibatch_ended(MODE, 500.0)
    for gpu in range(1, 101):
        times.minibatch_ended(MODE._replace(gpu_hz=gpu * 10_000_000 + 1), 1.0)
        if gpu % 10 == 0:
            times.minibatch_ended(MODE, 100.0)
    assert times.minibatch_ms(MODE) == 500.0


def test_no_number_of_long_minibatches_keeps_a_mode_change_waiting() -> None:
    """An app trains ever longer minibatches, so the agent expects long ones, and then it does not end its turn."""
    turns, now_s = Turns(LiveTimes()), 0.0
    turns.mode = MODE
    for held_s in (100.0, 250.0, 700.0):
        held = turns.request(Kind.MINIBATCH, now_s, is_first=not now_s)
        assert turns.granted(now_s) == [held]
        now_s += held_s
        turns.end(held, now_s)
    turns.request(Kind.MINIBATCH, now_s)
    turns.granted(now_s)
    change = turns.request(Kind.CHANGE, now_s)
    waited_s = next(seconds for seconds in range(1, 10_000) if turns.granted(now_s + seconds) == [change])
    assert waited_s <= 31
