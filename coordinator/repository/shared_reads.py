"""Reads from the store that are in progress, each shared by all tasks that need the same data."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

Key = tuple[str, str]
"""The kind of thing that is read, and its id."""


class SharedReads:
    """Each read runs once for all waiting tasks, and continues to its end if they are cancelled.

    Reading a large run's history may take longer than a Flower server waits for an answer; its retry then finds the
    result.
    """

    def __init__(self) -> None:
        """Start without any read."""
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._waiting: Counter[Key] = Counter()

    def __contains__(self, key: object) -> bool:
        """Whether a key is being read, or was read for a task that has not continued yet."""
        return key in self._tasks or key in self._waiting

    async def once(self, key: Key, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a read, or wait for the same read in progress.

        Args:
            key: kind and id of what is read.
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
    """Mark a read's error as retrieved, because no task does so if all waiting tasks were cancelled."""
    if not task.cancelled():
        task.exception()
