"""A limit to how long something is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def within(seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns, as by `asyncio.wait_for`.

    That one, before Python 3.12, forgets that it was cancelled where the work ends at the same moment: a session that
    was to end then went on, and the agent with it.

    Raises:
        TimeoutError: it took longer, and was cancelled.
    """
    running = asyncio.create_task(work)
    try:
        await asyncio.wait([running], timeout=seconds)
        if running.done():
            return running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    raise asyncio.TimeoutError
