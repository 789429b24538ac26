"""Work on the device that is done to its end, however often whoever asked for it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def shield_until_done(work: Callable[..., Result], *arguments: Any) -> Result:
    """Run in a thread, which nothing can cancel: not even a ClientApp that is gone leaves it half done."""
    return await uncancelled(asyncio.to_thread(work, *arguments))


async def uncancelled(work: Coroutine[Any, Any, Result]) -> Result:
    """Do all of `work`, and only then be cancelled."""
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    # One who is gone may be cancelled more than once: by gRPC, and by the agent that ends.
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not running.cancelled():
        raise cancelled from running.exception()
    return running.result()
