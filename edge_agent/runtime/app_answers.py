"""The agent's answers to an app that may not read them: a training never waits for its app's stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from wattfleet_io.tasks import run_uncancelled, stop_tasks
from wattfleet_proto.v1 import local_pb2


class AppAnswers:
    """The answers that wait for one app, in order."""

    def __init__(self) -> None:
        """Start without any."""
        self._waiting: asyncio.Queue[local_pb2.TrainResponse | None] = asyncio.Queue()

    def put(self, answer: local_pb2.TrainResponse) -> None:
        """Answer as soon as the app reads."""
        self._waiting.put_nowait(answer)

    async def taken(self) -> None:
        """Wait until the app can read further answers. Read no request before that, so that few answers wait."""
        await self._waiting.join()

    async def of(self, work: Callable[[AppAnswers], Coroutine[Any, Any, None]]) -> AsyncGenerator[Any, None]:
        """Run a training in a task of its own; yields its answers, and then raises its error.

        If the app has disconnected, the training is cancelled, and has ended when this ends.
        """
        working = asyncio.create_task(work(self), name="training of an app")
        working.add_done_callback(lambda _: self._waiting.put_nowait(None))
        try:
            while (answer := await self._waiting.get()) is not None:
                yield answer
                self._waiting.task_done()
            working.result()
        finally:
            await run_uncancelled(stop_tasks(working))
