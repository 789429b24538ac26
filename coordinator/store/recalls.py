"""What is being taken from the store, by whom it was asked for first."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

What = tuple[str, str]
"""A kind of thing, and its id."""


class Recalls:
    """What is being taken from the store: once for all who ask for it, and to its end although they go away.

    A large run's history takes longer to read than Flower's server waits for an answer.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self._tasks: dict[What, asyncio.Task[None]] = {}
        self._asking: Counter[What] = Counter()

    def __contains__(self, what: object) -> bool:
        """Whether something is being recalled, or has been for somebody who has not looked at it yet."""
        return what in self._tasks or what in self._asking

    async def once(self, what: What, recall: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Recall something, or wait for who does so already.

        Args:
            what: it is.
            recall: takes it from the store into the fleet.
        """
        task = self._tasks.get(what)
        if task is None:
            task = self._tasks[what] = asyncio.create_task(self._recalled(what, recall))
            task.add_done_callback(_is_told)
        self._asking[what] += 1
        try:
            await asyncio.shield(task)
        finally:
            self._asking[what] -= 1
            self._asking += Counter()  # without those that nobody asks for

    async def _recalled(self, what: What, recall: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await recall()
        finally:
            del self._tasks[what]


def _is_told(task: asyncio.Task[None]) -> None:
    """Those who asked have its error; where all have gone, nobody has to."""
    if not task.cancelled():
        task.exception()
