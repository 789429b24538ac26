"""Turns the replies to a round's messages into a result for each device, and reduces the weight of partial work."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from numpy.typing import NDArray

from wattfleet.common.console import plain_text
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import least_whole
from wattfleet.flower.server.errors import MismatchedArraysError
from wattfleet.flower.server.predictions import prediction_records
from wattfleet_proto.assignment import (
    APP_WEIGHS_KEY,
    CUT_KEY,
    OBSERVED_EPOCH_S_KEY,
    OBSERVED_POWER_W_KEY,
    PREDICTION_KEY,
    RECORD_KEY,
    SHARE_KEY,
    TOOK_EPOCHS_KEY,
    UNPROFILED_KEY,
    WORK_KEY,
    AssignedWork,
)
from wattfleet_proto.convert import assignments_from_plan
from wattfleet_proto.v1 import planning_pb2

# --- Quorum -----------------------------------------------------------------------------------------------------------
# How many replies end a training round.


@dataclass(frozen=True)
class Quorum:
    """How many replies end a round, and for how many rounds the updates of the other devices may still be used.

    Without `share` and `replies`, a round ends once as many devices have replied as its plan needs without
    over-selection.

    Attributes:
        share: share of the round's devices whose replies end it, above 0 to 1.
        replies: number of replies that end a round, 1 or more. A round of fewer devices waits for all of them.
        max_staleness: rounds after which a late update is dropped; 0 drops every late update.

    Raises:
        InvalidInputError: both `share` and `replies` are given, or a value is out of range.
    """

    share: float | None = None
    replies: int | None = None
    max_staleness: int = 5

    def __post_init__(self) -> None:
        if self.share is not None and self.replies is not None:
            raise InvalidInputError(
                "a quorum is a share of the round's devices or a number of replies: state only one of"
                f" share={self.share:g} and replies={self.replies}"
            )
        if self.share is not None and not 0 < self.share <= 1:
            raise InvalidInputError(f"the share of a quorum must be above 0 and at most 1, not {self.share:g}")
        if self.replies is not None and self.replies < 1:
            raise InvalidInputError(f"the replies of a quorum must be 1 or more, not {self.replies}")
        if self.max_staleness < 0:
            raise InvalidInputError(f"max_staleness must be 0 or more, not {self.max_staleness}")

    def replies_of(self, sent: SentRound, devices: int) -> int:
        """Return the number of replies that end a round. It may exceed the number of devices.

        Args:
            sent: the round.
            devices: how many devices were sent a training.
        """
        if self.replies is not None:
            return self.replies
        if self.share is not None:
            return max(1, least_whole(self.share * devices))
        wanted = sent.plan.enough_replies if isinstance(sent, PlannedRound) else 0
        return min(wanted, devices) or devices


# --- Sent rounds ------------------------------------------------------------------------------------------------------
# Rounds whose messages were sent to nodes, with a plan from the coordinator or without one.


@dataclass
class PlannedRound:
    """A plan and the messages sent for it.

    Attributes:
        plan: the coordinator's plan.
        number: the round's number, from 1.
        began_s: when the round began, seconds of the clock.
        timeout_s: how long to wait for its replies; None for no limit.
        sent: each message's metadata, and the device it is sent to.
        late: the devices that still trained when the round ended without waiting for them.
        bases: the arrays that each node's training starts from, by node; without those nodes whose messages do not hold
            one record of arrays.
        has_epochs: whether the plan has chosen local epochs, and they were sent to the nodes.
    """

    plan: planning_pb2.PlanRoundResponse
    number: int
    began_s: float
    timeout_s: float | None = None
    sent: list[tuple[Any, str]] = field(default_factory=list)
    late: set[str] = field(default_factory=set)
    bases: dict[int, ArrayRecord] = field(default_factory=dict)
    has_epochs: bool = False

    @property
    def node_ids(self) -> list[int]:
        """The selected nodes."""
        return [assignment.node_id for assignment in self.plan.assignments]

    @property
    def epochs(self) -> dict[int, float]:
        """Local epochs by node id, including nodes that a trim stopped; empty if the plan has not chosen them."""
        plan = self.plan.first_planned if self.plan.HasField("first_planned") else self.plan
        return {each.node_id: each.epochs for each in plan.assignments} if self.has_epochs else {}


@dataclass
class RoundWithoutPlan:
    """The messages of a round that trains without a plan, while the coordinator is away.

    Attributes:
        node_ids: the nodes that may train.
        number: the round's number, from 1.
        began_s: when the round began, seconds of the clock.
        timeout_s: how long to wait for its replies; None for no limit.
        sent: each message's metadata, and the id of its node, since the device may be unknown.
        metrics: metrics that the strategy computed before the round was over.
        late: the ids of the nodes that still trained when the round ended without waiting for them.
        bases: see `PlannedRound`.
    """

    node_ids: list[int]
    number: int
    began_s: float
    timeout_s: float | None = None
    sent: list[tuple[Any, str]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    bases: dict[int, ArrayRecord] = field(default_factory=dict)

    @property
    def epochs(self) -> dict[int, float]:
        """Empty: no plan has chosen local epochs."""
        return {}


SentRound = PlannedRound | RoundWithoutPlan


# --- Buffered aggregation ---------------------------------------------------------------------------------------------
# The arithmetic of buffered asynchronous aggregation (Nguyen et al. 2022, arXiv 2106.06639).

Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Update:
    """The result of one training.

    Attributes:
        base: the arrays that it started from.
        trained: the arrays after training.
        staleness: server steps between its start and its arrival.
    """

    base: Arrays
    trained: Arrays
    staleness: int

    @property
    def weight(self) -> float:
        """The update's weight in a server step."""
        return staleness_weight(self.staleness)


def staleness_weight(staleness: int) -> float:
    """The paper's weight of an update, `1 / sqrt(1 + staleness)`.

    Args:
        staleness: server steps between its start and its arrival.
    """
    return 1.0 / math.sqrt(1.0 + staleness)


def with_dtype(values: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[np.generic]:
    """Convert values to the dtype of their array; integers are rounded."""
    # NumPy returns a scalar for arrays without dimensions, such as the counters of batch norm.
    return np.asarray(np.rint(values) if np.issubdtype(dtype, np.integer) else values).astype(dtype)


def not_below_the_lowest(values: NDArray[np.float64], arrays: Sequence[NDArray[np.generic]]) -> NDArray[np.float64]:
    """Values at or above the lowest of the arrays that they come from, if none of these has a negative value.

    A sum of differences could otherwise make a variance of batch norm negative.
    """
    lowest = np.min([array.astype(np.float64) for array in arrays], axis=0)
    return np.maximum(values, lowest) if (lowest >= 0).all() else values


def step(current: Arrays, updates: Sequence[Update], learning_rate: float) -> Arrays:
    """Compute the server's step: `current + learning_rate * mean(weight * (trained - base))`.

    Each array keeps its dtype; integers, such as the counters of batch norm, are rounded. Where no array has a negative
    value, each value stays at or above the lowest of its arrays.

    Args:
        current: the arrays before the step.
        updates: the buffered updates, at least one.
        learning_rate: the server's learning rate.

    Returns:
        The arrays after the step.
    """
    after: Arrays = {}
    for key, array in current.items():
        moved: NDArray[np.float64] = np.asarray(
            sum(
                update.weight * (update.trained[key].astype(np.float64) - update.base[key].astype(np.float64))
                for update in updates
            )
        )
        value = array.astype(np.float64) + learning_rate * moved / len(updates)
        sources = [array, *(each[key] for update in updates for each in (update.base, update.trained))]
        after[key] = with_dtype(not_below_the_lowest(value, sources), array.dtype)
    return after


# --- Rebased updates --------------------------------------------------------------------------------------------------
# Applies a device's update to other arrays than those that its training started from, and scales updates.


def only_arrays(content: RecordDict) -> ArrayRecord:
    """Return the arrays of a message or a reply.

    Raises:
        MismatchedArraysError: it has no record of arrays, or several.
    """
    records = list(content.array_records.values())
    if len(records) != 1:
        raise MismatchedArraysError(f"a message must hold one record of arrays, not {len(records)}")
    return records[0]


def bases_of(messages: Iterable[Message]) -> dict[int, ArrayRecord]:
    """Return the arrays of messages by node id, without messages that do not hold exactly one record of arrays."""
    found = {}
    for message in messages:
        with suppress(MismatchedArraysError):
            found[message.metadata.dst_node_id] = only_arrays(message.content)
    return found


def rebased(reply: Message, base: ArrayRecord, current: ArrayRecord, scale: float = 1.0) -> ArrayRecord:
    """The arrays `current + scale * (trained - base)`, where `trained` are those of a reply.

    Each array keeps the dtype of the trained one; integers, such as the counters of batch norm, are rounded. If none of
    the three arrays has a negative value, as with the variances of batch norm, each value stays at or above the lowest
    of the three.

    Args:
        reply: the reply to a training.
        base: the arrays that the training started from.
        current: the arrays that its update is added to.
        scale: factor of the update.

    Raises:
        MismatchedArraysError: the reply, the base and the current arrays differ in keys or shapes.
    """
    trained = only_arrays(reply.content)
    shapes = {key: tuple(array.shape) for key, array in trained.items()}
    for name, others in (("those that its training started from", base), ("the current ones", current)):
        if shapes != {key: tuple(array.shape) for key, array in others.items()}:
            raise MismatchedArraysError(f"the arrays of a reply and {name} differ in keys or shapes")
    moved = {}
    for key, array in trained.items():
        after = array.numpy()
        before, now = base[key].numpy(), current[key].numpy()
        value = now.astype(np.float64) + scale * (after.astype(np.float64) - before.astype(np.float64))
        moved[key] = Array(with_dtype(not_below_the_lowest(value, (after, before, now)), after.dtype))
    return ArrayRecord(moved)


def replace_arrays(reply: Message, arrays: ArrayRecord) -> None:
    """Replace the arrays of a reply that holds one record of them."""
    [key] = reply.content.array_records
    reply.content[key] = arrays


def epoch_scale(own: SentRound, node_id: int, current: SentRound) -> float:
    """Return the factor that scales a node's update to the current round's mean number of local epochs.

    Averaging updates per local step keeps devices that train more steps from pulling the average to their own optimum
    (FedNova: Wang et al., arXiv 2007.07481, section 4). Here epochs are used instead of steps. If all devices train the
    same number of epochs, all factors are 1 and the strategy's average is unchanged. FedNova's effective number of
    steps is free to choose; here it is the mean of the selected nodes' epochs.

    Args:
        own: the round that the node trained in.
        node_id: the node.
        current: the round whose aggregation uses the update.
    """
    trained, wanted = own.epochs.get(node_id), current.epochs.values()
    return statistics.fmean(wanted) / trained if trained and wanted else 1.0


def normalise_updates(sent: SentRound, replies: Iterable[Message], unscaled: Collection[int]) -> None:
    """Scale the update of each node whose number of local epochs differs from the round's mean.

    Args:
        sent: the round.
        replies: its replies.
        unscaled: ids of nodes whose updates stay as they are.
    """
    for reply in replies:
        node_id = reply.metadata.src_node_id
        if reply.has_error() or node_id in unscaled or (scale := epoch_scale(sent, node_id, sent)) == 1:
            continue
        try:
            if node_id not in sent.bases:
                raise MismatchedArraysError("its message does not hold exactly one record of arrays")
            replace_arrays(reply, rebased(reply, sent.bases[node_id], sent.bases[node_id], scale))
        except MismatchedArraysError as error:
            log(WARNING, "the update of node %d is not scaled to its epochs: %s", node_id, error)


# --- Round messages ---------------------------------------------------------------------------------------------------
# The messages of a planned round: each node's assignment, prediction and work.


def assigned_messages(
    sent: PlannedRound, messages: Iterable[Message], work: Mapping[int, AssignedWork]
) -> list[Message]:
    """Add each node's assignment to its message, and record what is sent. Messages to nodes without one are dropped.

    Args:
        sent: the round.
        messages: its messages, as the strategy wrote them.
        work: the batch size and epochs that the plan has chosen for each node.
    """
    assignments = assignments_from_plan(sent.plan)
    predictions = prediction_records(sent.plan)
    kept = []
    for message in messages:
        node_id = message.metadata.dst_node_id
        assignment = assignments.get(node_id)
        if assignment is None:
            log(WARNING, "the message to node %d is dropped: the plan did not select it", node_id)
            continue
        content = RecordDict(dict(message.content))  # strategies use the same record in all messages
        content[RECORD_KEY] = ConfigRecord(assignment.to_record())
        content[PREDICTION_KEY] = ConfigRecord(predictions[node_id])
        if chosen := work[node_id].to_record():
            content[WORK_KEY] = ConfigRecord(chosen)
        message.content = content
        # Flower sets the message id in the metadata when it sends the message.
        sent.sent.append((message.metadata, assignment.device_id))
        kept.append(message)
    sent.bases = bases_of(kept)
    sent.has_epochs = any(each.epochs is not None for each in work.values())
    return kept


# --- Replies ----------------------------------------------------------------------------------------------------------

LOSS_KEYS = ("train_loss", "train-loss", "loss")
"""Metrics in which an app may report its mean training loss; the first one present counts."""

METRIC_PREFIX = "wattfleet-"
"""Prefix of the metrics that are added to replies."""

_MAX_REASON_LENGTH = 300
_MIN_REASON_BYTES = 16
# Bytes that a nested message needs in addition to its content.
_FRAME_BYTES = 4
# Flower's own numbers (ErrorCode), which it does not export.
_ERROR_TEXTS = {
    1: "the app could not be loaded",
    2: "the app raised",
    3: "the message was lost",
    4: "the reply was lost",
    5: "the node is gone",
    6: "a mod refused",
    7: "the app's bundle is broken",
    8: "the training process was killed",
}
LOST_ERRORS = (3, 4, 5, 8)
"""Flower's errors for a node that could not answer, but may answer the next message."""

# Errors of `power_mode_mod` that occur if its SuperNode is paired with a wrong agent, or with none.
_REFUSED_BY_AGENT = re.compile(r"the agent at .* answered (UNAVAILABLE|PERMISSION_DENIED|INVALID_ARGUMENT)")
# Codes for which Flower's reason has details.
_WITH_REASON = (1, 2, 6, 7)


def describe_error(error: Error) -> str:
    """Describe why a node sent an error."""
    words = _ERROR_TEXTS.get(error.code, f"Flower's error {error.code}")
    if error.code in _ERROR_TEXTS and error.code not in _WITH_REASON:
        return words
    # The last line of a traceback is the exception.
    lines = [line.strip() for line in (error.reason or "").splitlines() if line.strip()]
    return f"{words}: {plain_text(lines[-1])[:_MAX_REASON_LENGTH]}" if lines else words


def truncate_failures(results: Sequence[planning_pb2.DeviceResult], max_bytes: int) -> None:
    """Truncate the reasons of failures so that all results together fit into the given number of bytes."""
    excess = sum(result.ByteSize() + _FRAME_BYTES for result in results) - max_bytes
    failed = [result for result in results if result.failure]
    if excess <= 0 or not failed:
        return
    reasons = [result.failure.encode() for result in failed]
    longest = max(_MIN_REASON_BYTES, (sum(map(len, reasons)) - excess) // len(failed))
    for result, reason in zip(failed, reasons, strict=True):
        result.failure = reason[:longest].decode(errors="ignore")


class RoundReplies:
    """The replies to a round's messages, matched to the devices they came from.

    Attributes:
        replies: the replies.
        ignoring: the nodes whose app did not use the plan's number of local epochs. Set by `results`; meaningful
            only if the plan has chosen the epochs.
        unprofiled: for each device whose app has reported no minibatches to its agent, why. Set by `results`.
    """

    def __init__(
        self,
        sent: Sequence[tuple[Any, str]],
        replies: Iterable[Message],
        timeout_s: float | None,
        late: Collection[str] = (),
    ) -> None:
        """Match replies to devices.

        Args:
            sent: each message's metadata, and the device it was sent to.
            replies: the replies that arrived.
            timeout_s: seconds that were waited for replies; None if unknown.
            late: devices whose replies were not waited for.
        """
        self._sent = sent
        self._late = late
        self._no_reply = "no reply in time" if timeout_s is None else f"no reply within {timeout_s:.0f} s"
        self.replies = list(replies)
        self.ignoring: set[int] = set()
        self.unprofiled: dict[str, str] = {}
        self._observed: dict[str, dict[str, float]] = {}
        of_message = {metadata.message_id: device_id for metadata, device_id in sent if metadata.message_id}
        of_node = {metadata.dst_node_id: device_id for metadata, device_id in sent}
        # For a lost node, Flower's server replies under its own id. So the message identifies the device.
        self._reply_of = {
            device_id: reply
            for reply in self.replies
            if (device_id := of_message.get(reply.metadata.reply_to_message_id))
            or (device_id := of_node.get(reply.metadata.src_node_id))
        }

    def results(self, weighted_by_key: str) -> list[planning_pb2.DeviceResult]:
        """Scale the weight of partial work, and remove Wattfleet's record from the replies.

        Args:
            weighted_by_key: the metric that the strategy uses as weight.

        Returns:
            The result of each device that was sent a message.
        """
        return [
            self._result(device_id, weighted_by_key)
            for device_id in dict.fromkeys(device_id for _, device_id in self._sent)
        ]

    def refused_by_agents(self) -> list[int]:
        """The nodes whose agent could not be reached, or belongs to another device."""
        return [
            metadata.dst_node_id
            for metadata, device_id in self._sent
            if (reply := self._reply_of.get(device_id)) is not None
            and reply.has_error()
            and _REFUSED_BY_AGENT.search(reply.error.reason or "")
        ]

    def add_metrics(self, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Add metrics and the agents' observations to the replies; call `results` first.

        Strategies aggregate metrics only if all replies have the same ones. So only those are added that are known for
        all replies.

        Args:
            metrics: metrics by device id.
        """
        answered = [device_id for device_id, reply in self._reply_of.items() if not reply.has_error()]
        records = [list(self._reply_of[device_id].content.metric_records.values()) for device_id in answered]
        if not answered or any(len(each) != 1 for each in records):
            return
        known = [{**metrics.get(device_id, {}), **self._observed.get(device_id, {})} for device_id in answered]
        keys = sorted(set.intersection(*(set(each) for each in known)))
        for [record], values in zip(records, known, strict=True):
            for key in keys:
                record[f"{METRIC_PREFIX}{key}"] = values[key]

    def _result(self, device_id: str, weighted_by_key: str) -> planning_pb2.DeviceResult:
        reply = self._reply_of.get(device_id)
        if reply is None and device_id in self._late:
            return planning_pb2.DeviceResult(device_id=device_id, late=True)
        if reply is None:
            return planning_pb2.DeviceResult(device_id=device_id, failure=self._no_reply)
        if reply.has_error():
            return planning_pb2.DeviceResult(device_id=device_id, failure=describe_error(reply.error))
        record = reply.content.pop(RECORD_KEY, {})
        self._observed[device_id] = _observed(record)
        if record.get(TOOK_EPOCHS_KEY) is not True:
            self.ignoring.add(reply.metadata.src_node_id)
        if isinstance(why := record.get(UNPROFILED_KEY), str):
            self.unprofiled[device_id] = plain_text(why)[:_MAX_REASON_LENGTH]
        share = min(1.0, max(0.0, float(record[SHARE_KEY]))) if _is_number(record.get(SHARE_KEY)) else 1.0
        metrics = list(reply.content.metric_records.values())
        if share < 1 and not record.get(APP_WEIGHS_KEY, False):
            scale_weight(reply, weighted_by_key, share)
        if record.get(CUT_KEY, False) and SHARE_KEY not in record:
            log(
                INFO,
                "%s stopped at its deadline; its weight is not scaled, because its loader has no length",
                device_id,
            )
        return planning_pb2.DeviceResult(
            device_id=device_id,
            share=share,
            num_examples=_first_number(metrics, (weighted_by_key,), least=0.0),
            loss=_first_number(metrics, LOSS_KEYS),
        )


def scale_weight(reply: Message, weighted_by_key: str, factor: float) -> None:
    """Scale the weight of a reply in the aggregation.

    Args:
        reply: a reply without an error.
        weighted_by_key: the metric that the strategy uses as weight.
        factor: 0 to 1.
    """
    for metrics in reply.content.metric_records.values():
        if _is_number(metrics.get(weighted_by_key)):
            metrics[weighted_by_key] = float(metrics[weighted_by_key]) * factor


def keep_common_metrics(replies: Iterable[Message]) -> None:
    """Remove Wattfleet's metrics that some replies without an error do not have."""
    records = [record for reply in replies if not reply.has_error() for record in reply.content.metric_records.values()]
    common = set.intersection(*map(set, records)) if records else set()
    for record in records:
        for key in [key for key in record if key.startswith(METRIC_PREFIX) and key not in common]:
            del record[key]


def _observed(record: Mapping[str, Any]) -> dict[str, float]:
    """Return an agent's observations of a training as metrics; empty if they are not plausible."""
    epoch_s, power_w = record.get(OBSERVED_EPOCH_S_KEY), record.get(OBSERVED_POWER_W_KEY)
    if not (isinstance(epoch_s, float) and isinstance(power_w, float)):
        return {}
    if not (0 < epoch_s < math.inf and 0 < power_w < math.inf):
        return {}
    return {
        OBSERVED_EPOCH_S_KEY: epoch_s,
        OBSERVED_POWER_W_KEY: power_w,
        "observed-epoch-kj": epoch_s * power_w / 1e3,
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _first_number(records: Iterable[MetricRecord], keys: Sequence[str], least: float = -math.inf) -> float | None:
    """Return the first metric that is present; None if there is none, or if it is not finite or is below `least`."""
    for key in keys:
        for metrics in records:
            if _is_number(metrics.get(key)):
                value = float(metrics[key])
                return value if math.isfinite(value) and value >= least else None
    return None
