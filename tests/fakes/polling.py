"""Waits for a condition that another thread, task or process brings about."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

_TIMEOUT_S = 110.0
_POLL_S = 0.005


def until(condition: Callable[[], bool], within_s: float = _TIMEOUT_S) -> None:
    """Wait until a condition holds; fails after almost two minutes, the limit of a test, or after the given time."""
    give_up_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_s, f"the condition did not hold within {within_s:g} s"
        time.sleep(_POLL_S)


async def eventually(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait, while other tasks of the event loop run, until a condition holds; fails after almost two minutes."""
    give_up_s = time.monotonic() + _TIMEOUT_S
    while not (await holds if inspect.isawaitable(holds := condition()) else holds):
        assert time.monotonic() < give_up_s, f"the condition did not hold within {_TIMEOUT_S:g} s"
        await asyncio.sleep(_POLL_S)
