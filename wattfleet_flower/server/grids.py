"""Grids around Flower's grid: they repeat requests that fail, wait for replies, and restrict what a strategy sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from logging import INFO, WARNING
from typing import Any, TypeVar

import grpc
from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from wattfleet_flower.server.errors import SuperLinkError
from wattfleet_flower.server.late_replies import LateReplies
from wattfleet_flower.server.measuring import Measurements
from wattfleet_io.clock import Clock
from wattfleet_io.console import plain_text

_REPEATED_FOR_S = 60.0
"""Seconds for which a request is repeated that the SuperLink answers with an error."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_TOO_MANY_REQUESTS, _SERVER_ERRORS = 429, 500
_TEMPORARY_STATUSES = (
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)

_SHORTEST_POLL_S = 0.1
"""The shortest pause between two polls for replies. Flower's own grid polls every 3 s."""

_LONGEST_POLL_S = 1.0
"""The longest pause between two polls, unless a poll itself takes longer."""

_WAITED_SHARE = 0.1
"""The pause between two polls as a share of the time waited so far, within these limits."""

Timeout = Callable[[float | None], float | None]
"""Maps the caller's timeout to the timeout to use. Both are in seconds; None is no timeout."""


class _ForwardingGrid(Grid):  # type: ignore[misc]  # Flower is not typed for strict checking
    """A grid that forwards every call to another one."""

    def __init__(self, grid: Grid) -> None:
        """Wrap a grid."""
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


Answer = TypeVar("Answer")


class SteadyGrid(_ForwardingGrid):
    """A grid that repeats a request if it fails for a reason that may pass, so that one failure does not end a run.

    Flower's own grid waits for a SuperLink that does not answer, but raises on the first error that it answers with.
    A message that is pushed twice is stored once, since its id depends on its content.
    """

    def __init__(self, grid: Grid, clock: Clock) -> None:
        """Wrap Flower's grid.

        Args:
            grid: Flower's grid.
            clock: measures for how long requests are repeated.
        """
        super().__init__(grid)
        self._clock = clock

    def get_node_ids(self) -> Iterable[int]:
        """The nodes of the wrapped grid."""
        return self._repeated("list the nodes", lambda: list(self._grid.get_node_ids()))

    def get_nodes(self) -> Iterable[Any]:
        """The nodes of the wrapped grid, with Flower's information about each."""
        return self._repeated("list the nodes", lambda: list(self._grid.get_nodes()))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push through the wrapped grid, which may iterate over the messages more than once."""
        sent = list(messages)
        return self._repeated("take messages", lambda: list(self._grid.push_messages(sent)) if sent else [])

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull through the wrapped grid."""
        wanted = list(message_ids)
        return self._repeated("return replies", lambda: list(self._grid.pull_messages(wanted)))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages, and wait for their replies until the timeout."""
        return WaitingGrid(self, _unchanged, _unchanged, self._clock).send_and_receive(messages, timeout=timeout)

    def _repeated(self, task: str, request: Callable[[], Answer]) -> Answer:
        """Send a request, and repeat it as long as its error may pass.

        Args:
            task: what the SuperLink is asked to do.
            request: sends the request.

        Raises:
            SuperLinkError: it has failed for too long.
        """
        began_s, pause_s = self._clock.now_s(), _FIRST_PAUSE_S
        is_logged = False
        while True:
            try:
                answer = request()
            except Exception as error:
                if not _may_pass(error):
                    raise
                reason = plain_text(str(error).splitlines()[0] if str(error) else type(error).__name__)
                if self._clock.now_s() + pause_s - began_s > _REPEATED_FOR_S:
                    raise SuperLinkError(
                        f"Flower's SuperLink could not {task} for {_REPEATED_FOR_S:g} s, the last time because of"
                        f" {reason!r}: see its log, and start the run again"
                    ) from error
                if not is_logged:
                    log(WARNING, "Flower's SuperLink could not %s: %s; trying again", task, reason)
                    is_logged = True
                self._clock.sleep_s(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                continue
            if is_logged:
                log(INFO, "Flower's SuperLink answers again")
            return answer


def steady(grid: Grid, clock: Clock) -> Grid:
    """Return a grid that repeats requests; a grid of this module does so already."""
    return grid if isinstance(grid, _ForwardingGrid) else SteadyGrid(grid, clock)


def _may_pass(error: Exception) -> bool:
    """Whether a request to the SuperLink may succeed if it is repeated."""
    # Flower's own errors mean that the run is over. httpx is not imported, since Flower 1.30 does not use it.
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status == _TOO_MANY_REQUESTS or status >= _SERVER_ERRORS
    if isinstance(error, grpc.RpcError):
        return error.code() in _TEMPORARY_STATUSES
    return any(each.__name__ == "TransportError" for each in type(error).__mro__)


def _unchanged(timeout_s: float | None) -> float | None:
    return timeout_s


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


class FreeNodesGrid(_ForwardingGrid):
    """A grid that lists only free nodes: those that no longer train for an earlier round."""

    def __init__(
        self,
        grid: Grid,
        late: LateReplies,
        planned_round: int | None = None,
        measurements: Measurements | None = None,
        only: Collection[int] | None = None,
    ) -> None:
        """List the free nodes of a grid.

        Args:
            grid: the grid.
            late: the run's late replies.
            planned_round: number of the round to plan; nodes that rest in it are left out. None lists them, too.
            measurements: the run's nodes that train in order to measure; these are not free.
            only: restricts the list to these nodes; None for all.
        """
        super().__init__(grid)
        self._measurements = measurements
        self._only = only
        self._late = late
        self._planned_round = planned_round

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are free now."""
        busy = self._late.busy_nodes(self._grid)
        if self._measurements is not None:
            self._measurements.poll(self._grid)
            busy |= self._measurements.busy_nodes
        listed = [each for each in self._grid.get_node_ids() if self._only is None or each in self._only]
        free = [node_id for node_id in listed if node_id not in busy]
        return free if self._planned_round is None else self._late.without_resting(free, self._planned_round)

    def get_nodes(self) -> Iterable[Any]:
        """The nodes that are free now, with Flower's information about each."""
        free = set(self.get_node_ids())
        return [node for node in self._grid.get_nodes() if node.node_id in free]


class WaitingGrid(_ForwardingGrid):
    """A grid that polls for replies often, and waits for training replies as long as the round's plan allows.

    As in Flower's `send_and_receive`, replies that arrive too late are left out, and without a timeout it waits for
    all. With a quorum, the wait ends as soon as there are enough replies. Meanwhile it also polls for late replies of
    earlier rounds.
    """

    def __init__(
        self,
        grid: Grid,
        timeout: Timeout,
        extended_timeout: Timeout,
        clock: Clock,
        late: LateReplies | None = None,
        measurements: Measurements | None = None,
    ) -> None:
        """Wait for a grid's replies.

        Args:
            grid: the grid.
            timeout: gives the timeout for training messages before they are sent.
            extended_timeout: gives the timeout once the first has passed and replies are missing.
            clock: measures the waiting.
            late: the run's late replies, and its quorum; None to wait for all replies.
            measurements: the run's nodes that measure beside its rounds, which no round waits for.
        """
        super().__init__(grid)
        self._measurements = measurements
        self._timeout = timeout
        self._extended_timeout = extended_timeout
        self._clock = clock
        self._late = late

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages, and wait for their replies until the timeout or until there are enough."""
        messages = list(messages)
        is_training = any(message.metadata.message_type.startswith("train") for message in messages)
        limit_s = self._timeout(timeout) if is_training else timeout
        # A message that the SuperLink rejected has no id, and gets no reply.
        missing = [message_id for message_id in self.push_messages(messages) if message_id]
        began_s = self._clock.now_s()
        enough = self._late.enough_replies(len(messages)) if self._late is not None and is_training else math.inf
        replies = self._pull(missing, began_s, limit_s, enough)
        while is_training and missing and _usable(replies) < enough and limit_s is not None and limit_s != timeout:
            extended_s = self._extended_timeout(timeout)
            if extended_s is None or extended_s <= limit_s:
                break
            limit_s = extended_s
            replies += self._pull(missing, began_s, limit_s, enough - _usable(replies))
        if self._late is not None and missing and _usable(replies) >= enough:
            self._late.end_round(missing, timeout)
        return replies

    def _pull(self, missing: list[str], began_s: float, limit_s: float | None, enough: float) -> list[Message]:
        """Pull replies until there are all or enough of them, or the limit has passed.

        Args:
            missing: the unanswered messages; the answered ones are removed.
            began_s: when they were sent.
            limit_s: seconds after which the wait ends; None for no limit.
            enough: number of usable replies that end the wait.
        """
        until_s = math.inf if limit_s is None else began_s + limit_s
        replies: list[Message] = []
        pulling_s = 0.0
        while missing and _usable(replies) < enough and (left_s := until_s - self._clock.now_s()) > 0:
            # A slow pull, because of many replies or a busy SuperLink, is repeated less often.
            waited_s = self._clock.now_s() - began_s
            pause_s = min(max(_SHORTEST_POLL_S, _WAITED_SHARE * waited_s), _LONGEST_POLL_S)
            self._clock.sleep_s(min(max(pause_s, pulling_s), left_s))
            pull_began_s = self._clock.now_s()
            late_ids = [] if self._late is None else self._late.message_ids
            measuring_ids = [] if self._measurements is None else self._measurements.message_ids
            arrived = list(self.pull_messages([*missing, *late_ids, *measuring_ids]))
            pulling_s = self._clock.now_s() - pull_began_s
            if self._measurements is not None:
                self._measurements.receive(arrived)
            if self._late is not None:
                self._late.receive(arrived)
            asked = set(missing)
            own = [reply for reply in arrived if reply.metadata.reply_to_message_id in asked]
            answered = {reply.metadata.reply_to_message_id for reply in own}
            missing[:] = [message_id for message_id in missing if message_id not in answered]
            replies += own
        return replies


def _usable(replies: Iterable[Message]) -> int:
    """How many replies have no error."""
    return sum(not reply.has_error() for reply in replies)
