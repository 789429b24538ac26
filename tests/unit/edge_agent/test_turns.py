"""Turns of the device: requests come first, minibatches run in the time left, also after disturbances."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from edge_agent.serving.turns import LiveTimes, TurnPurpose, Turns
from tests.fakes.short_forms import first
from wattfleet.core.duties import ConstantArrivals, Duty
from wattfleet.core.modes import PowerMode

# --- Turns ------------------------------------------------------------------------------------------------------------
# Turns of the device: requests come first, and minibatches only run if requests are still answered in time.


SERVER = 1
LIMIT_MS = 200.0
MODE = PowerMode(12, 2_000_000, 1_000_000_000, 3_000_000_000)


def duty(latency_ms: float = LIMIT_MS, quantile: float = 0.95) -> Duty:
    return Duty("camera", ConstantArrivals(10), latency_ms, quantile)


def turns_of(minibatch_ms: float | None, inference_ms: float | None, switch_ms: float = 0.0) -> Turns:
    """Turns with settled estimates of times, for batches of one request."""
    times = LiveTimes()
    for _ in range(40):
        if minibatch_ms is not None:
            times.minibatch_ended(MODE, minibatch_ms)
        if inference_ms is not None:
            times.batch_answered(MODE, 1, inference_ms, after_minibatch=False)
            times.batch_answered(MODE, 1, inference_ms + switch_ms, after_minibatch=True)
    turns = Turns(times)
    turns.duty, turns.mode = duty(), MODE
    return turns


def test_without_a_duty_a_free_device_is_handed_out_at_once():
    turns = Turns(LiveTimes())
    first, second = turns.request(TurnPurpose.MINIBATCH, 0.0), turns.request(TurnPurpose.MINIBATCH, 0.0)
    assert turns.granted(0.0) == [first]
    assert turns.granted(0.1) == []
    turns.end(first, 0.2)
    assert turns.granted(0.2) == [second]


def test_requests_are_answered_before_the_next_minibatch():
    turns = turns_of(50, 20)
    running = turns.request(TurnPurpose.MINIBATCH, 0.0)
    assert turns.granted(0.0) == [running]
    waiting = turns.request(TurnPurpose.MINIBATCH, 0.01)
    turns.requests_waiting(SERVER, 1, 0.02)
    requests = turns.request(TurnPurpose.INFERENCE, 0.02)
    assert turns.granted(0.02) == [], "the minibatch fits and is waited for"
    turns.end(running, 0.05)
    assert turns.granted(0.05) == [requests]
    turns.requests_waiting(SERVER, 0, None)
    turns.end(requests, 0.07)
    assert turns.granted(0.07) == [waiting]


@pytest.mark.parametrize(("age_ms", "may_begin"), [(0, True), (119, True), (121, False)])
def test_a_minibatch_begins_only_if_it_ends_in_time_for_the_waiting_requests(age_ms, may_begin):
    turns = turns_of(50, 20, switch_ms=10)
    turns.requests_waiting(SERVER, 1, 1.0 - age_ms / 1e3)
    minibatch = turns.request(TurnPurpose.MINIBATCH, 1.0)
    assert turns.granted(1.0) == ([minibatch] if may_begin else [])


@pytest.mark.parametrize(("minibatch_ms", "fits"), [(169, True), (171, False)])
def test_without_requests_a_minibatch_leaves_time_for_one_that_arrives_at_once(minibatch_ms, fits):
    turns = turns_of(minibatch_ms, 20, switch_ms=10)
    first = turns.request(TurnPurpose.MINIBATCH, 0.0)
    turns.granted(0.0)  # a minibatch that does not fit is tried once
    turns.end(first, 0.1, is_complete=False)
    second = turns.request(TurnPurpose.MINIBATCH, 0.2)
    assert turns.granted(0.2) == ([second] if fits else [])
    assert (turns.why_training_waits(0.2) is not None) == (not fits)


def test_a_minibatch_that_does_not_fit_is_tried_rarely_as_the_estimates_may_be_old():
    turns = turns_of(500, 20)
    ends_s, tried = 600.0, []
    now_s, ticket = 0.0, turns.request(TurnPurpose.MINIBATCH, 0.0)
    while now_s < ends_s:
        if turns.granted(now_s):
            tried.append(now_s)
            turns.end(ticket, now_s + 0.5)
            ticket = turns.request(TurnPurpose.MINIBATCH, now_s + 0.5)
        next_s = turns.next_check_s(now_s)
        assert next_s is not None, "it is looked at again without an event"
        now_s = next_s
    assert 2 <= len(tried) <= 6
    # A request may be late if it comes during such a minibatch or up to a limit before it: at most a tenth of 5 %.
    assert sum(0.5 + LIMIT_MS / 1e3 for _ in tried[1:]) <= 0.1 * 0.05 * ends_s


def test_a_trial_that_is_allowed_begins_once_no_request_waits():
    """Otherwise an app whose training was stopped would not reach its next minibatch, where it learns of the stop."""
    turns = turns_of(500, 20)
    turns.end(turns.request(TurnPurpose.MINIBATCH, 0.0), 0.5)
    first = turns.request(TurnPurpose.MINIBATCH, 0.5)
    assert turns.granted(0.5) == [first]
    turns.end(first, 1.0)
    waiting = turns.request(TurnPurpose.MINIBATCH, 1.0)
    turns.requests_waiting(SERVER, 1, 1.0)
    turns.allow_trial()
    assert turns.granted(1.1) == []
    turns.requests_waiting(SERVER, 0, None)
    assert turns.granted(1.2) == [waiting]


def test_minibatches_that_became_faster_begin_again_after_a_trial():
    turns = turns_of(500, 20)
    begun, now_s = 0, 0.0
    for _ in range(400):
        ticket = turns.request(TurnPurpose.MINIBATCH, now_s)
        while not turns.granted(now_s):
            now_s = turns.next_check_s(now_s) or now_s + 1
        begun += 1
        now_s += 0.05
        turns.end(ticket, now_s)
    assert turns.why_training_waits(now_s) is None
    ticket = turns.request(TurnPurpose.MINIBATCH, now_s)
    assert turns.granted(now_s) == [ticket]


def test_the_first_minibatch_and_the_first_batch_tell_nothing_of_later_ones():
    turns = turns_of(50, None)
    warm_up = turns.request(TurnPurpose.MINIBATCH, 0.0, is_first=True)
    assert turns.granted(0.0) == [warm_up]
    turns.end(warm_up, 3.0)
    assert turns.times.minibatch_ms(MODE) == 50
    answered = turns.request(TurnPurpose.INFERENCE, 3.0, is_first=True)
    assert turns.granted(3.0) == [answered]
    turns.end(answered, 5.0)
    assert turns.times.inference_ms(MODE, 1) is None


def test_unknown_minibatches_begin_only_while_no_request_waits():
    turns = turns_of(None, 20)
    turns.requests_waiting(SERVER, 1, 0.0)
    minibatch = turns.request(TurnPurpose.MINIBATCH, 0.0)
    assert turns.granted(0.0) == []
    turns.requests_waiting(SERVER, 0, None)
    assert turns.granted(0.01) == [minibatch]


def test_requests_are_answered_beside_a_minibatch_that_lasts_too_long():
    turns = turns_of(50, 20)
    turns.granted(turns.request(TurnPurpose.MINIBATCH, 0.0) * 0.0)
    turns.requests_waiting(SERVER, 1, 0.01)
    requests = turns.request(TurnPurpose.INFERENCE, 0.01)
    assert turns.granted(0.1) == []
    latest_s = turns.next_check_s(0.1)
    assert latest_s == pytest.approx(0.01 + (LIMIT_MS - 20) / 1e3)
    assert turns.granted(latest_s) == [requests]
    before = turns.times.inference_ms(MODE, 1)
    turns.end(requests, latest_s + 5.0)
    assert turns.times.inference_ms(MODE, 1) == before, "side by side, both are slower than alone"


def test_a_minibatch_that_is_tried_is_waited_for_as_long_as_it_is_expected_to_last():
    turns = turns_of(500, 20)
    minibatch = turns.request(TurnPurpose.MINIBATCH, 0.0)
    assert turns.granted(0.0) == [minibatch]
    turns.requests_waiting(SERVER, 1, 0.01)
    requests = turns.request(TurnPurpose.INFERENCE, 0.01)
    assert turns.next_check_s(0.3) == 0.5
    assert turns.granted(0.49) == []
    assert turns.granted(0.5) == [requests]


def test_a_turn_that_never_ends_is_given_up():
    turns = turns_of(50, 20)
    turns.request(TurnPurpose.MINIBATCH, 0.0)
    turns.granted(0.0)
    other = turns.request(TurnPurpose.MINIBATCH, 0.1)
    assert turns.granted(0.9) == []
    check_s = turns.next_check_s(0.9)
    assert turns.granted(check_s) == [other]


def test_the_mode_changes_between_turns_and_nothing_begins_meanwhile():
    turns = turns_of(50, 20)
    minibatch = turns.request(TurnPurpose.MINIBATCH, 0.0)
    turns.granted(0.0)
    change, next_ = turns.request(TurnPurpose.CHANGE, 0.01), turns.request(TurnPurpose.MINIBATCH, 0.01)
    assert turns.granted(0.01) == []
    turns.end(minibatch, 0.05)
    assert turns.granted(0.05) == [change]
    turns.requests_waiting(SERVER, 1, 0.06)
    requests = turns.request(TurnPurpose.INFERENCE, 0.06)
    assert turns.granted(0.06) == []
    turns.end(change, 0.07)
    assert turns.granted(0.07) == [requests]
    turns.requests_waiting(SERVER, 0, None)
    turns.end(requests, 0.09)
    assert turns.granted(0.09) == [next_]


def test_a_mode_change_waits_for_requests_but_not_for_ever():
    turns = turns_of(50, 20)
    now_s = 0.0
    change = turns.request(TurnPurpose.CHANGE, now_s)
    while True:  # requests without a gap
        turns.requests_waiting(SERVER, 1, now_s)
        requests = turns.request(TurnPurpose.INFERENCE, now_s)
        begun = turns.granted(now_s)
        if begun == [change]:
            break
        assert begun == [requests]
        now_s += 0.02
        turns.end(requests, now_s)
    assert 0.9 < now_s < 1.1


def test_no_minibatch_begins_while_a_mode_change_waits():
    turns = turns_of(50, 20)
    for _ in range(10):
        turns.times.mode_changed(190.0)
    change = turns.request(TurnPurpose.CHANGE, 0.0)
    turns.request(TurnPurpose.MINIBATCH, 0.0)
    assert turns.granted(0.0) == [], "the change takes too long for a request that arrives meanwhile"
    assert turns.next_check_s(0.0) == 1.0
    assert turns.granted(1.0) == [change]


def test_in_a_slower_mode_minibatches_are_taken_for_as_slow_as_the_clocks_allow():
    turns = turns_of(50, 20)
    turns.mode = MODE._replace(gpu_hz=MODE.gpu_hz // 4)
    ticket = turns.request(TurnPurpose.MINIBATCH, 0.0)
    turns.granted(0.0)
    turns.end(ticket, 0.1, is_complete=False)
    turns.request(TurnPurpose.MINIBATCH, 0.2)
    assert turns.granted(0.2) == [], "4 x 50 ms and 4 x 20 ms do not fit into 200 ms"


@dataclass
class Board:
    """A brute-force simulation of one board in steps of 1 ms, which knows all times in advance."""

    minibatch_ms: int
    inference_ms: Callable[[int], int]
    switch_ms: int
    largest_batch: int
    waiting_ms: list[int] = field(default_factory=list)

    def would_be_late(self, now_ms: int, limit_ms: float, arrives: int) -> bool:
        """Whether a request would be late if a minibatch began now and `arrives` more requests came now."""
        requests = [*self.waiting_ms, *[now_ms] * arrives]
        time_ms = now_ms + self.minibatch_ms + self.switch_ms
        batch = requests[: self.largest_batch]
        time_ms += self.inference_ms(len(batch))
        return bool(batch) and time_ms - min(batch) > limit_ms


@pytest.mark.parametrize("seed", first(4, range(12)))
def test_every_minibatch_fits_by_brute_force_and_none_that_fits_is_held_back(seed):
    chance = random.Random(seed)
    board = Board(
        minibatch_ms=chance.choice([20, 60, 110]),
        inference_ms=lambda batch: 15,
        switch_ms=chance.choice([0, 8]),
        largest_batch=8,
    )
    per_s, gathers_ms = chance.choice([5, 15, 30]), chance.choice([0, 60, 120])
    turns = turns_of(board.minibatch_ms, 15, board.switch_ms)
    for _ in range(40):  # the times of all batch sizes are known
        for batch in (2, 4, 8):
            turns.times.batch_answered(MODE, batch, 15, after_minibatch=False)
            turns.times.batch_answered(MODE, batch, 15 + board.switch_ms, after_minibatch=True)
    turns.largest_batch, turns.arrivals_per_s = board.largest_batch, per_s
    held: tuple[TurnPurpose, int, int] | None = None  # the kind of turn, its ticket, and when it ends
    minibatch, requests = turns.request(TurnPurpose.MINIBATCH, 0.0), None
    begun = {TurnPurpose.MINIBATCH: 0, TurnPurpose.INFERENCE: 0}
    last, batch, latencies_ms = None, [], []
    for now_ms in range(20_000):
        now_s = now_ms / 1e3
        if held is not None and now_ms >= held[2]:
            kind, ticket, _ = held
            held, last = None, kind
            if kind is TurnPurpose.INFERENCE:
                latencies_ms += [now_ms - each for each in batch]
                turns.end(ticket, now_s, len(batch))
                oldest_s = board.waiting_ms[0] / 1e3 if board.waiting_ms else None
                turns.requests_waiting(SERVER, len(board.waiting_ms), oldest_s)
                requests = None
            else:
                turns.end(ticket, now_s)
                minibatch = turns.request(TurnPurpose.MINIBATCH, now_s)
        if chance.random() < per_s / 1e3:
            board.waiting_ms.append(now_ms)
            turns.requests_waiting(SERVER, len(board.waiting_ms), board.waiting_ms[0] / 1e3)
        is_due = len(board.waiting_ms) >= 4 or (board.waiting_ms and now_ms - board.waiting_ms[0] >= gathers_ms)
        if requests is None and is_due and (held is None or held[0] is TurnPurpose.MINIBATCH):
            requests = turns.request(TurnPurpose.INFERENCE, now_s)
        late = board.would_be_late(now_ms, LIMIT_MS, arrives=0 if board.waiting_ms else 1)
        granted = turns.granted(now_s)
        if granted == [minibatch]:
            assert held is None and requests is None and not late
            held, minibatch = (TurnPurpose.MINIBATCH, minibatch, now_ms + board.minibatch_ms), 0
            begun[TurnPurpose.MINIBATCH] += 1
        elif granted:
            assert granted == [requests] and (held is None or held[0] is TurnPurpose.MINIBATCH)
            batch, board.waiting_ms = board.waiting_ms[:8], board.waiting_ms[8:]
            took_ms = board.inference_ms(len(batch)) + (board.switch_ms if last is TurnPurpose.MINIBATCH else 0)
            held = (TurnPurpose.INFERENCE, requests, now_ms + took_ms)
            begun[TurnPurpose.INFERENCE] += 1
        elif minibatch and held is None and requests is None:
            assert late, "the device is free, and a minibatch fits"
    assert begun[TurnPurpose.MINIBATCH] > 50 and begun[TurnPurpose.INFERENCE] > 50
    assert max(latencies_ms) <= LIMIT_MS


# --- Turns after disturbances -----------------------------------------------------------------------------------------
# Training continues after a slow minibatch, a hung server, or trainings of single minibatches.

LONG_LIMIT_MS = 300.0


def disturbed_turns(minibatches: int = 5, minibatch_ms: float = 100.0) -> Turns:
    times = LiveTimes()
    for _ in range(minibatches):
        times.minibatch_ended(MODE, minibatch_ms)
    times.batch_answered(MODE, 1, 20.0, after_minibatch=False)
    turns = Turns(times)
    turns.duty, turns.mode = Duty("camera", ConstantArrivals(10), LONG_LIMIT_MS), MODE
    return turns


def train(turns: Turns, took_ms: list[float], now_s: float = 0.0, is_first: bool = False) -> float:
    """Train some minibatches one after the other in virtual time; returns when the last one ended."""
    for each_ms in took_ms:
        ticket = turns.request(TurnPurpose.MINIBATCH, now_s, is_first=is_first)
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
    turns = disturbed_turns(minibatches=0)
    ends_s = train(turns, [100.0] * before + [slow_ms] + [100.0] * 50)
    assert ends_s - 0.1 * (before + 50) - slow_ms / 1e3 < 1.0


def test_minibatches_that_are_slow_now_and_then_are_still_tried_rarely():
    # Without a limit on trials, one in ten minibatches would last 400 ms and make requests late.
    turns = disturbed_turns()
    now_s, slow = 0.0, 0
    while now_s < 3600.0:
        now_s = train(turns, [100.0] * 9 + [400.0], now_s)
        slow += 1
    assert slow * (0.4 + LONG_LIMIT_MS / 1e3) <= 0.1 * 0.05 * now_s * 1.1


def test_minibatches_that_became_much_longer_are_learnt_although_one_may_be_a_pause():
    turns = disturbed_turns(minibatches=40)
    train(turns, [5_000.0])
    assert turns.times.minibatch_ms(MODE) == 100.0
    train(turns, [5_000.0] * 8)
    assert turns.times.minibatch_ms(MODE) == 5_000.0


def test_a_first_time_is_not_taken_for_a_pause_however_long():
    turns = disturbed_turns(minibatches=0)
    train(turns, [3_000.0])
    assert turns.times.minibatch_ms(MODE) == 3_000.0


def test_training_goes_on_beside_an_inference_server_that_hangs_in_its_turn():
    turns = disturbed_turns()
    turns.requests_waiting(SERVER, 1, 0.0, 0.0)
    hung = turns.request(TurnPurpose.INFERENCE, 0.0, server=SERVER)
    assert turns.granted(0.0) == [hung]
    assert train(turns, [100.0] * 10) < 3.0


def test_training_goes_on_after_an_app_has_announced_requests_and_gone_silent():
    turns = disturbed_turns()
    turns.requests_waiting(SERVER, 1, 0.0, 0.0)
    train(turns, [100.0])  # this minibatch still fits
    assert train(turns, [100.0] * 10, 0.2) < 4.0


@pytest.mark.parametrize("in_turn", [True, False])
def test_the_requests_of_a_silent_server_count_again_at_its_next_message(in_turn):
    turns = disturbed_turns()
    turns.requests_waiting(SERVER, 1, 0.0, 0.0)
    if in_turn:
        hung = turns.request(TurnPurpose.INFERENCE, 0.0, server=SERVER)
        assert turns.granted(0.0) == [hung]
    now_s = train(turns, [100.0] * 10)
    turns.requests_waiting(SERVER, 2, now_s - 0.29, now_s)
    turns.request(TurnPurpose.MINIBATCH, now_s)
    assert turns.granted(now_s) == []


def test_an_overloaded_server_that_says_so_is_not_taken_for_a_silent_one():
    turns = disturbed_turns()
    turns.request(TurnPurpose.MINIBATCH, 0.0)
    for tenth in range(300):
        turns.requests_waiting(SERVER, 5, -10.0, tenth / 10)
        assert turns.granted(tenth / 10 + 0.09) == []


def test_a_training_of_one_minibatch_per_pass_is_learnt_from_its_firsts():
    turns = disturbed_turns(minibatches=0)
    turns.duty = Duty("camera", ConstantArrivals(10), 150.0)
    train(turns, [160.0, 160.0], is_first=True)
    turns.request(TurnPurpose.MINIBATCH, 10.0)
    assert turns.granted(10.0) == [], "160 ms do not fit into 150 ms, and one was tried"
    assert turns.why_training_waits(10.0) is not None


def test_later_minibatches_replace_what_the_first_ones_have_told():
    turns = disturbed_turns(minibatches=0)
    now_s = train(turns, [3_000.0], is_first=True)
    assert train(turns, [100.0] * 10, now_s) - now_s < 1.1
    train(turns, [3_000.0], 10.0, is_first=True)
    assert turns.times.minibatch_ms(MODE) == pytest.approx(100.0)


def test_first_minibatches_that_have_become_faster_train_on():
    turns = disturbed_turns(minibatches=0)
    now_s = train(turns, [3_000.0], is_first=True)
    assert train(turns, [100.0] * 10, now_s, is_first=True) - now_s < 1.1


def test_a_server_with_a_huge_largest_batch_is_given_up_after_half_a_minute():
    turns = disturbed_turns()
    turns.largest_batch = 100_000
    hung = turns.request(TurnPurpose.INFERENCE, 0.0, server=SERVER)
    assert turns.granted(0.0) == [hung]
    waiting = turns.request(TurnPurpose.INFERENCE, 1.0, server=2)
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
        held = turns.request(TurnPurpose.MINIBATCH, now_s, is_first=not now_s)
        assert turns.granted(now_s) == [held]
        now_s += held_s
        turns.end(held, now_s)
    turns.request(TurnPurpose.MINIBATCH, now_s)
    turns.granted(now_s)
    change = turns.request(TurnPurpose.CHANGE, now_s)
    waited_s = next(seconds for seconds in range(1, 10_000) if turns.granted(now_s + seconds) == [change])
    assert waited_s <= 31
