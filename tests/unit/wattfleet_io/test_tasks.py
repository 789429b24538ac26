"""Tasks: cancelled ones stay cancelled, and shielded ones are finished."""

import asyncio
import threading

import pytest

from wattfleet_io.tasks import background_task, run_until_first, shield_until_done, stop_tasks, with_timeout


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
