"""Flower's grid, as a strategy is shown it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from wattfleet_flower.server.clock import Clock

_POLL_S = 3.0
"""As often as Flower's own grid."""

Limit = Callable[[float | None], float | None]
"""Given the caller's timeout, the one to use; both in seconds, None for none."""


class _PassedOnGrid(Grid):  # type: ignore[misc]  # Flower is not typed for strict checking
    """A grid that is another one in everything."""

    def __init__(self, grid: Grid) -> None:
        """Pass on to a grid."""
        self._grid = grid

    def get_node_ids(self) -> Iterable[int]:
        """The nodes of the wrapped grid."""
        return self._grid.get_node_ids()  # type: ignore[no-any-return]

    def get_nodes(self) -> Iterable[Any]:
        """The nodes of the wrapped grid, with what Flower tells of each."""
        return self._grid.get_nodes()  # type: ignore[no-any-return]

    @property
    def run(self) -> Any:
        """The run, as the wrapped grid has it."""
        return self._grid.run

    def set_run(self, run: Any) -> None:
        """Set the wrapped grid's run."""
        self._grid.set_run(run)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Create a message with the wrapped grid."""
        return self._grid.create_message(*args, **kwargs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push through the wrapped grid."""
        return self._grid.push_messages(messages)  # type: ignore[no-any-return]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull through the wrapped grid."""
        return self._grid.pull_messages(message_ids)  # type: ignore[no-any-return]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send through the wrapped grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)  # type: ignore[no-any-return]


class ShownNodesGrid(_PassedOnGrid):
    """A grid that shows some of its nodes, and the same ones for as long as it is used.

    Every strategy samples through what its grid shows, and waits for as many nodes as it wants: here none can vanish
    between the count and the draw.
    """

    def __init__(self, grid: Grid, node_ids: Sequence[int]) -> None:
        """Show these nodes of a grid."""
        super().__init__(grid)
        self._node_ids = list(node_ids)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are shown."""
        return list(self._node_ids)

    def get_nodes(self) -> Iterable[Any]:
        """The nodes that are shown, with what Flower tells of each."""
        shown = set(self._node_ids)
        return [node for node in self._grid.get_nodes() if node.node_id in shown]


class TimedGrid(_PassedOnGrid):
    """A grid that waits for a training's replies for as long as the round's plan allows."""

    def __init__(self, grid: Grid, limit: Limit, renewed_limit: Limit, clock: Clock) -> None:
        """Bound the waiting of a grid.

        Args:
            grid: the grid.
            limit: the timeout of training messages that are to be sent.
            renewed_limit: the same once it is over and replies lack; where it is longer now, they are waited for.
            clock: to wait by.
        """
        super().__init__(grid)
        self._limit = limit
        self._renewed_limit = renewed_limit
        self._clock = clock

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send, and wait for as long as is allowed."""
        messages = list(messages)
        if not any(message.metadata.message_type.startswith("train") for message in messages):
            return super().send_and_receive(messages, timeout=timeout)
        began_s = self._clock.now_s()
        limit_s = self._limit(timeout)
        replies = list(super().send_and_receive(messages, timeout=limit_s))
        missing = {message.metadata.message_id for message in messages}
        missing -= {reply.metadata.reply_to_message_id for reply in replies}
        while missing and limit_s is not None and limit_s != timeout:
            renewed_s = self._renewed_limit(timeout)
            if renewed_s is None or renewed_s <= limit_s:
                break
            limit_s = renewed_s
            replies += self._pulled(missing, began_s + limit_s)
        return replies

    def _pulled(self, missing: set[str], until_s: float) -> list[Message]:
        """Replies to messages that come until then; the messages are taken out of those missing."""
        replies: list[Message] = []
        while missing and self._clock.now_s() < until_s:
            self._clock.sleep_s(_POLL_S)
            there = list(self.pull_messages(list(missing)))
            missing -= {reply.metadata.reply_to_message_id for reply in there}
            replies += there
        return replies
