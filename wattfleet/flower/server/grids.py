"""Grids around Flower's grid: they repeat requests that fail, wait for replies, and restrict what a strategy sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, TypeVar

import grpc
from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from wattfleet.common.clock import Clock
from wattfleet.common.console import plain_text
from wattfleet.core.planning import next_round
from wattfleet.flower.server.errors import MismatchedArraysError, SuperLinkError
from wattfleet.flower.server.measuring import Measurements
from wattfleet.flower.server.replies import (
    Quorum,
    RoundReplies,
    SentRound,
    epoch_scale,
    keep_common_metrics,
    rebased,
    replace_arrays,
    scale_weight,
    staleness_weight,
)
from wattfleet.flower.server.rounds import PlannedRounds

# --- Late replies -----------------------------------------------------------------------------------------------------
# Trainings that still run when their round ends: their nodes stay busy, and a later round uses the updates.


_POLL_S = 1.0


@dataclass(frozen=True)
class _LateTraining:
    """A training that was still running when its round ended.

    Attributes:
        sent: the round that it belongs to.
        metadata: the metadata of its message.
        label: its device id, or its node id in a round without a plan.
        name: its device, as logs name it.
        app_timeout_s: seconds that the app waits for replies; None for no limit.
    """

    sent: SentRound
    metadata: Any
    label: str
    name: str
    app_timeout_s: float | None


class LateReplies:
    """The late trainings of a run. Without a quorum there are none."""

    def __init__(self, quorum: Quorum | None, rounds: PlannedRounds, clock: Clock) -> None:
        """Start without late trainings.

        Args:
            quorum: how many replies end a round; None if rounds wait for all replies.
            rounds: the run's rounds.
            clock: measures how long trainings are waited for.
        """
        self._quorum = quorum
        self._rounds = rounds
        self._clock = clock
        self._is_warned = False
        self.begin_run()

    @property
    def message_ids(self) -> list[str]:
        """The ids of the messages whose replies are late."""
        return list(self._late)

    def is_any_late(self) -> bool:
        """Whether nodes still train for earlier rounds."""
        return bool(self._late)

    def begin_run(self) -> None:
        """Forget the trainings of an earlier run."""
        self._late: dict[str, _LateTraining] = {}
        self._arrived: list[tuple[_LateTraining, Message]] = []
        self._sent: SentRound | None = None
        self._number = 0
        # Node id -> consecutive late failures, and the round in which the last one was noticed.
        self._failures: dict[int, tuple[int, int]] = {}

    def begin_round(self, sent: SentRound | None) -> None:
        """Begin a round, or the time between two rounds.

        Args:
            sent: the round; None between two rounds.
        """
        self._sent = sent
        if sent is not None:
            self._number = sent.number

    def enough_replies(self, devices: int) -> float:
        """Return how many usable replies end the current round; infinite if it waits for all.

        Args:
            devices: how many devices were sent a training.
        """
        if self._quorum is None or self._sent is None:
            return float("inf")
        enough = self._quorum.replies_of(self._sent, devices)
        if enough > devices and not self._is_warned:
            self._is_warned = True
            log(WARNING, "a round waits for all of its %d devices, since the quorum needs %d replies", devices, enough)
        return enough

    def end_round(self, unanswered: Collection[str], app_timeout_s: float | None) -> None:
        """End the wait for the current round's replies, since its quorum is reached.

        Args:
            unanswered: ids of the messages without a reply; these become late.
            app_timeout_s: seconds that the app waits for replies; None for no limit.
        """
        assert self._sent is not None, "end_round is called only within a round"
        for metadata, label in self._sent.sent:
            if metadata.message_id in unanswered:
                name = self._rounds.device_name(self._sent, label)
                training = _LateTraining(self._sent, metadata, label, name, app_timeout_s)
                self._late[metadata.message_id] = training
                self._sent.late.add(label)

    def receive(self, replies: Iterable[Message]) -> None:
        """Keep the replies to late messages for the next aggregation; others are ignored."""
        for reply in replies:
            training = self._late.pop(reply.metadata.reply_to_message_id, None)
            if training is None:
                continue
            if reply.has_error():
                [result] = self._answered(training, reply).results("")
                log(WARNING, "%s failed late, in round %d: %s", training.name, training.sent.number, result.failure)
                self._failed(training)
                continue
            log(INFO, "%s has sent its late update of round %d", training.name, training.sent.number)
            self._failures.pop(training.metadata.dst_node_id, None)
            self._arrived.append((training, reply))

    def busy_nodes(self, grid: Grid) -> set[int]:
        """Poll for late replies, give up those that are overdue, and return the nodes that still train."""
        if self._late:
            self.receive(list(grid.pull_messages(self.message_ids)))
        for sent in {id(training.sent): training.sent for training in self._late.values()}.values():
            self._give_up_overdue([each for each in self._late.values() if each.sent is sent])
        return {training.metadata.dst_node_id for training in self._late.values()}

    def free_nodes(self, grid: Grid, node_ids: list[int]) -> list[int]:
        """Return the nodes that do not train. If all of them do, wait until one has finished."""
        while True:
            busy = self.busy_nodes(grid)
            free = [node_id for node_id in node_ids if node_id not in busy]
            if free or not busy:
                return free
            self._clock.sleep_s(_POLL_S)
            node_ids = list(grid.get_node_ids())

    def without_resting(self, node_ids: list[int], number: int) -> list[int]:
        """Return the nodes that do not rest after several late failures in a row; all nodes if every one rests.

        The coordinator does not learn of late failures, so it cannot let their devices rest.

        Args:
            node_ids: the nodes.
            number: number of the round to plan.
        """
        resting = {node_id for node_id, failures in self._failures.items() if number < next_round(*failures)}
        return [node_id for node_id in node_ids if node_id not in resting] or node_ids

    def with_late_updates(self, replies: list[Message], weighted_by_key: str) -> list[Message]:
        """Add the late updates that have arrived to the replies of the current round.

        A late update is added to the arrays of the current round. Its weight is divided by `sqrt(1 + staleness)`, where
        the staleness is the number of rounds that began after its own (FedBuff: Nguyen et al. 2022, arXiv 2106.06639).

        Args:
            replies: the round's own replies.
            weighted_by_key: the metric that the strategy uses as weight.
        """
        for reply in replies:
            if not reply.has_error():
                self._failures.pop(reply.metadata.src_node_id, None)
        arrived, self._arrived = self._arrived, []
        used = [reply for training, reply in arrived if self._is_rebased(training, reply, weighted_by_key)]
        if not used:
            return replies
        keep_common_metrics([*replies, *used])
        return [*replies, *used]

    def _is_rebased(self, training: _LateTraining, reply: Message, weighted_by_key: str) -> bool:
        """Move a late update to the current arrays and weight it; False if it cannot be used."""
        assert self._sent is not None and self._quorum is not None, "only rounds with a quorum have late updates"
        number, staleness = training.sent.number, self._sent.number - training.sent.number
        if staleness > self._quorum.max_staleness:
            log(WARNING, "%s: its update of round %d is dropped, because it is too old", training.name, number)
            return False
        answered = self._answered(training, reply)
        answered.results(weighted_by_key)
        self._rounds.check_epochs(training.sent, answered)
        try:
            node_id = training.metadata.dst_node_id
            base, current = training.sent.bases.get(node_id), next(iter(self._sent.bases.values()), None)
            if base is None or current is None:
                raise MismatchedArraysError("the messages of its round do not hold exactly one record of arrays")
            scale = 1.0 if answered.ignoring else epoch_scale(training.sent, node_id, self._sent)
            arrays = rebased(reply, base, current, scale)
        except MismatchedArraysError as error:
            log(WARNING, "%s: its update of round %d is dropped: %s", training.name, number, error)
            return False
        self._rounds.add_metrics(training.sent, answered)
        replace_arrays(reply, arrays)
        weight = staleness_weight(staleness)
        scale_weight(reply, weighted_by_key, weight)
        log(
            INFO,
            "the late update of %s is used: it is %d rounds old and counts with %.2f of its weight",
            training.name,
            staleness,
            weight,
        )
        return True

    def _give_up_overdue(self, trainings: list[_LateTraining]) -> None:
        """Give up the late trainings of one round once the round's own timeout has passed."""
        sent = trainings[0].sent
        waited_s = self._clock.now_s() - sent.began_s
        if sent.timeout_s is None or waited_s < sent.timeout_s:
            return
        limit_s = self._rounds.extended_timeout_s(sent, trainings[0].app_timeout_s)
        if limit_s is None or waited_s < limit_s:
            return
        for training in trainings:
            del self._late[training.metadata.message_id]
            log(WARNING, "%s is given up: no reply to round %d within %.0f s", training.name, sent.number, limit_s)
            self._failed(training)

    def _failed(self, training: _LateTraining) -> None:
        """Note a late failure, after which its node may have to rest."""
        node_id = training.metadata.dst_node_id
        failures = self._failures.get(node_id, (0, 0))[0] + 1
        self._failures[node_id] = failures, self._number
        if failures > 1:
            until = next_round(failures, self._number)
            log(WARNING, "%s failed late %d times in a row: it rests until round %d", training.name, failures, until)

    @staticmethod
    def _answered(training: _LateTraining, reply: Message) -> RoundReplies:
        return RoundReplies([(training.metadata, training.label)], [reply], training.sent.timeout_s)


# --- Grids ------------------------------------------------------------------------------------------------------------

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
