"""Asyncio tasks: named and watched in the background, stopped together, limited in time, or finished when cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


def background_task(name: str, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start a task that nobody awaits; if it fails, its name and error go into the log at once.

    Keep a reference to it, as the event loop keeps none, and end it with `stop_tasks`.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the background task %r failed", task.get_name(), exc_info=error)


async def stop_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended; how they ended is ignored. None stands for no task."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def run_until_first(works: Mapping[str, Coroutine[Any, Any, Any]]) -> None:
    """Run coroutines, by their names, until the first of them ends; then cancel the others and wait for them.

    Raises:
        Exception: the error of the first one, or else an error of another while it was cancelled.
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

    Before Python 3.12, `asyncio.wait_for` loses a cancellation that comes in the moment in which the work ends. A
    session that was cancelled then went on, and kept the agent from stopping.

    Raises:
        TimeoutError: it took longer, and was cancelled.
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
    """Run `work` in a thread and wait for its end, even when cancelled: a change of the device is never half done."""
    return await run_uncancelled(asyncio.to_thread(work, *arguments))


async def run_uncancelled(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end; a cancellation takes effect only then."""
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    # There may be several cancellations: by gRPC as the client is gone, and by the agent as it stops.
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not running.cancelled():
        raise cancelled from running.exception()
    return running.result()
