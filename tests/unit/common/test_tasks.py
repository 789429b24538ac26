"""Tasks that are cancelled or shielded, the rate limit, and the timing of minibatches in a loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from wattfleet.common.tasks import (
    TokenBucket,
    background_task,
    run_until_first,
    shield_until_done,
    stop_tasks,
    with_timeout,
)
from wattfleet.common.wrapped_loader import BatchTimes, timed_batches

# --- Tasks ------------------------------------------------------------------------------------------------------------
# Tasks: cancelled ones stay cancelled, and shielded ones are finished.


@pytest.mark.parametrize("fails", [False, True])
async def test_shielded_work_ends_however_often_it_is_cancelled(fails: bool) -> None:
    go_on, done = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait(10)
        done.set()
        if fails:
            raise ValueError("of its own")

    try:
        running = asyncio.create_task(shield_until_done(work))
        for _ in range(3):
            await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.sleep(0.01)
            assert not running.done(), "the work has not ended"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert done.is_set()
    finally:
        go_on.set()


@pytest.mark.parametrize("steps", range(6))
async def test_a_cancellation_counts_even_if_the_work_ends_at_the_same_moment(steps):

    ends = asyncio.Event()
    waiting = asyncio.create_task(with_timeout(60, ends.wait()))
    await asyncio.sleep(0.001)
    ends.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    cancelled = waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() == cancelled


async def test_work_past_its_timeout_is_cancelled_and_other_work_returns_or_raises():

    ended = []

    async def endless():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def failing():
        raise ValueError("of its own")

    with pytest.raises(asyncio.TimeoutError):
        await with_timeout(0.001, endless())
    assert ended == [True]
    assert await with_timeout(60, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ValueError, match="of its own"):
        await with_timeout(60, failing())


async def failing() -> None:
    raise ValueError("of its own")


async def test_a_background_task_logs_its_failure_by_name(caplog):
    task = background_task("recovery", failing())
    await asyncio.wait([task])
    (record,) = caplog.records
    assert record.message == "the background task 'recovery' failed"
    assert record.exc_info is not None and str(record.exc_info[1]) == "of its own"
    assert task.get_name() == "recovery"


async def test_stopped_tasks_have_ended_and_log_nothing(caplog):
    task = background_task("watch", asyncio.Event().wait())
    await asyncio.sleep(0)
    await stop_tasks(task, None)
    assert task.cancelled() and not caplog.records


async def test_the_first_to_end_ends_the_others():
    ended = []

    async def endless():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    await run_until_first({"endless": endless(), "short": asyncio.sleep(0)})
    assert ended == [True]
    with pytest.raises(ValueError, match="of its own"):
        await run_until_first({"endless": endless(), "failing": failing()})
    assert ended == [True, True]


async def test_an_error_while_the_others_are_cancelled_is_raised():
    async def fails_at_its_end():
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("cannot be put back")

    with pytest.raises(ValueError, match="cannot be put back"):
        await run_until_first({"device": fails_at_its_end(), "stop": asyncio.sleep(0.01)})


# --- Token bucket -----------------------------------------------------------------------------------------------------
# The rate limit: bursts pass, and the long-term rate is kept.


def test_a_burst_passes_and_the_next_event_waits_for_its_turn() -> None:
    bucket = TokenBucket.full(per_s=2.0, burst=3.0, now_s=10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(10.4)
    assert bucket.take(10.5) and not bucket.take(10.5)


def test_a_long_pause_allows_no_more_than_a_burst() -> None:
    bucket = TokenBucket.full(per_s=2.0, burst=3.0, now_s=0.0)
    assert [bucket.take(1e6) for _ in range(4)] == [True, True, True, False]


def test_events_that_are_taken_in_advance_wait_longer_and_longer() -> None:
    bucket = TokenBucket.full(per_s=2.0, burst=1.0, now_s=0.0)
    assert [bucket.take_later(0.0) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert bucket.take_later(1.0) == 0.5


# --- Batch timing -----------------------------------------------------------------------------------------------------
# Timing minibatches from inside a training loop.


class FakeClock:
    """A clock that only moves when a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def now_s(self) -> float:
        return self.now


def test_fetching_and_computing_are_timed_apart() -> None:
    clock = FakeClock()
    times: list[BatchTimes] = []

    def loader():
        for batch in "ab":
            clock.now += 0.25
            yield batch

    def finish_step() -> None:
        clock.now += 0.5

    for _ in timed_batches(loader(), lambda: True, times.append, finish_step, clock.now_s):
        clock.now += 1.0

    assert times == [BatchTimes(250.0, 1500.0, 1.75), BatchTimes(250.0, 1500.0, 3.5)]


def test_batches_pass_untimed_once_timing_is_off() -> None:
    times: list[BatchTimes] = []

    batches = list(timed_batches(range(4), lambda: len(times) < 2, times.append, lambda: None))

    assert batches == [0, 1, 2, 3]
    assert len(times) == 2
