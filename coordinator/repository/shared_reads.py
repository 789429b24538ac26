"""Reads from the store that are in progress, each shared by all tasks that ask for the same thing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

Key = tuple[str, str]
"""The kind of thing that is read, and its id."""


class SharedReads:
    """Each read runs once for all who ask, and continues to its end when they are cancelled.

    Reading a large run's history takes longer than Flower's server waits for an answer: its retry finds the result.
    """

    def __init__(self) -> None:
        """Start without any read."""
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._waiting: Counter[Key] = Counter()

    def __contains__(self, key: object) -> bool:
        """Whether something is being read, or was read for a task that has not continued yet."""
        return key in self._tasks or key in self._waiting

    async def once(self, key: Key, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Read something, or wait for the read in progress.

        Args:
            key: what is read.
            read: reads it from the store into the fleet.
        """
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(self._run(key, read))
            task.add_done_callback(_retrieve_error)
        self._waiting[key] += 1
        try:
            await asyncio.shield(task)
        finally:
            self._waiting[key] -= 1
            self._waiting += Counter()  # drops keys that no task waits for

    async def _run(self, key: Key, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await read()
        finally:
            del self._tasks[key]


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Mark a read's error as retrieved: if all waiting tasks were cancelled, nobody else does."""
    if not task.cancelled():
        task.exception()
