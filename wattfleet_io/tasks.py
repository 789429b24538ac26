"""Asyncio tasks: background tasks whose errors are logged, stopping, timeouts, and work that cannot be cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


def background_task(name: str, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start a task that is not awaited; if it fails, its name and error are logged at once.

    Keep a reference to it, since the event loop does not, and end it with `stop_tasks`.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the background task %r failed", task.get_name(), exc_info=error)


async def stop_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait for their end, ignoring their results and errors. None stands for no task."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def run_until_first(works: Mapping[str, Coroutine[Any, Any, Any]]) -> None:
    """Run named coroutines until the first one ends; then cancel the others and wait for their end.

    Raises:
        Exception: the error of the first one, or else an error of another one during its cancellation.
    """
    tasks = [asyncio.create_task(work, name=name) for name, work in works.items()]
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await stop_tasks(*tasks)
    for task in (*done, *pending):
        if not task.cancelled():
            task.result()


async def with_timeout(seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, like `asyncio.wait_for`.

    Before Python 3.12, `asyncio.wait_for` loses a cancellation that arrives just as the work ends. A session cancelled
    at that moment continued, and kept the agent from stopping.

    Raises:
        TimeoutError: the work took longer, and was cancelled.
    """
    running = asyncio.create_task(work)
    try:
        await asyncio.wait([running], timeout=seconds)
        if running.done():
            return running.result()
    finally:
        await stop_tasks(running)
    raise asyncio.TimeoutError


async def shield_until_done(work: Callable[..., Result], *arguments: Any) -> Result:
    """Run `work` in a thread and wait for its end, even if cancelled, so that no change of the device is half done."""
    return await run_uncancelled(asyncio.to_thread(work, *arguments))


async def run_uncancelled(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end; a cancellation takes effect only after that."""
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    # There may be several cancellations: by gRPC when the client disconnects, and by the agent when it stops.
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not running.cancelled():
        raise cancelled from running.exception()
    return running.result()
