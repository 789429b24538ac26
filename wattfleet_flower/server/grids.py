"""Grids that restrict what a strategy sees of Flower's grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from wattfleet_io.clock import Clock

_POLL_S = 3.0
"""The interval of Flower's own grid."""

Timeout = Callable[[float | None], float | None]
"""Maps the caller's timeout to the one to use; both in seconds, None for no timeout."""


class _ForwardingGrid(Grid):  # type: ignore[misc]  # Flower is not typed for strict checking
    """A grid that forwards every call to another one."""

    def __init__(self, grid: Grid) -> None:
        """Forward to a grid."""
        self._grid = grid

    def get_node_ids(self) -> Iterable[int]:
        """The nodes of the wrapped grid."""
        return self._grid.get_node_ids()  # type: ignore[no-any-return]

    def get_nodes(self) -> Iterable[Any]:
        """The nodes of the wrapped grid, with Flower's information about each."""
        return self._grid.get_nodes()  # type: ignore[no-any-return]

    @property
    def run(self) -> Any:
        """The wrapped grid's run."""
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


class SelectedNodesGrid(_ForwardingGrid):
    """A grid that lists only the selected nodes, whether or not they are still connected.

    Strategies count and sample the nodes that their grid lists. With a fixed list no node can vanish between the two.
    """

    def __init__(self, grid: Grid, node_ids: Sequence[int]) -> None:
        """List only these nodes of a grid."""
        super().__init__(grid)
        self._node_ids = list(node_ids)

    def get_node_ids(self) -> Iterable[int]:
        """The selected nodes."""
        return list(self._node_ids)

    def get_nodes(self) -> Iterable[Any]:
        """The selected nodes, with Flower's information about each."""
        selected = set(self._node_ids)
        return [node for node in self._grid.get_nodes() if node.node_id in selected]


class TimeLimitedGrid(_ForwardingGrid):
    """A grid that waits for the replies to training messages as long as the round's plan allows."""

    def __init__(self, grid: Grid, timeout: Timeout, extended_timeout: Timeout, clock: Clock) -> None:
        """Limit how long a grid waits.

        Args:
            grid: the grid.
            timeout: gives the timeout for training messages before they are sent.
            extended_timeout: gives the timeout once the first has passed and replies are missing.
            clock: measures the waiting.
        """
        super().__init__(grid)
        self._timeout = timeout
        self._extended_timeout = extended_timeout
        self._clock = clock

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for their replies until the timeout."""
        messages = list(messages)
        if not any(message.metadata.message_type.startswith("train") for message in messages):
            return super().send_and_receive(messages, timeout=timeout)
        began_s = self._clock.now_s()
        limit_s = self._timeout(timeout)
        replies = list(super().send_and_receive(messages, timeout=limit_s))
        missing = {message.metadata.message_id for message in messages}
        missing -= {reply.metadata.reply_to_message_id for reply in replies}
        while missing and limit_s is not None and limit_s != timeout:
            extended_s = self._extended_timeout(timeout)
            if extended_s is None or extended_s <= limit_s:
                break
            limit_s = extended_s
            replies += self._pull(missing, began_s + limit_s)
        return replies

    def _pull(self, missing: set[str], until_s: float) -> list[Message]:
        """Pull replies until all or `until_s` are reached; removes the answered messages from `missing`."""
        replies: list[Message] = []
        while missing and self._clock.now_s() < until_s:
            self._clock.sleep_s(_POLL_S)
            arrived = list(self.pull_messages(list(missing)))
            missing -= {reply.metadata.reply_to_message_id for reply in arrived}
            replies += arrived
        return replies
