"""What is done to its end for whoever is gone."""

import asyncio
import threading

import pytest

from edge_agent.devices.device import ModeNotAppliedError
from wattfleet_io.shielding import shield_until_done


@pytest.mark.parametrize("fails", [False, True])
async def test_work_is_done_to_its_end_however_often_it_is_cancelled(fails: bool) -> None:
    go_on, done = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait(10)
        done.set()
        if fails:
            raise ModeNotAppliedError("gpu_hz reads back 306000000")

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
