"""Trainings that still run when their round ends: their nodes stay busy, and a later round uses the updates."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from wattfleet.planning import next_round
from wattfleet_flower.server.buffered_aggregation import staleness_weight
from wattfleet_flower.server.errors import MismatchedArraysError
from wattfleet_flower.server.quorum import Quorum
from wattfleet_flower.server.rebased_updates import epoch_scale, rebased, replace_arrays
from wattfleet_flower.server.replies import RoundReplies, keep_common_metrics, scale_weight
from wattfleet_flower.server.rounds import PlannedRounds
from wattfleet_flower.server.sent_rounds import SentRound
from wattfleet_io.clock import Clock

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
