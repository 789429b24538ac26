"""Waiting no longer than a limit: what is cancelled stays cancelled."""

import asyncio

import pytest

from wattfleet_io.time_limit import within


@pytest.mark.parametrize("steps", range(6))
async def test_a_cancellation_is_heeded_even_when_the_work_ends_at_the_same_moment(steps):

    ends = asyncio.Event()
    waiting = asyncio.create_task(within(60, ends.wait()))
    await asyncio.sleep(0.001)
    ends.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    cancelled = waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() == cancelled


async def test_what_takes_too_long_is_ended_and_what_does_not_is_returned_or_raised():

    ended = []

    async def endless():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def failing():
        raise ValueError("of its own")

    with pytest.raises(asyncio.TimeoutError):
        await within(0.001, endless())
    assert ended == [True]
    assert await within(60, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ValueError, match="of its own"):
        await within(60, failing())
