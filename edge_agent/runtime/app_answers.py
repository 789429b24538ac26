"""Queues the agent's answers to an app, so that a training never waits for an app that does not read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from wattfleet_io.tasks import run_uncancelled, stop_tasks
from wattfleet_proto.v1 import local_pb2


class AppAnswers:
    """A queue of the answers to one app."""

    def __init__(self) -> None:
        """Start with an empty queue."""
        self._waiting: asyncio.Queue[local_pb2.TrainResponse | None] = asyncio.Queue()

    def put(self, answer: local_pb2.TrainResponse) -> None:
        """Queue an answer; it is sent as soon as the app reads."""
        self._waiting.put_nowait(answer)

    async def wait_until_read(self) -> None:
        """Wait until the app has read all queued answers.

        Do so before reading the next request: this keeps the queue short.
        """
        await self._waiting.join()

    async def run(self, work: Callable[[AppAnswers], Coroutine[Any, Any, None]]) -> AsyncGenerator[Any, None]:
        """Run a training in its own task; yield its answers, then raise its error if it failed.

        If the app disconnects, the training is cancelled, and this generator ends only after the training has.
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
