"""Turns the replies to a round's messages into a result for each device, and reduces the weight of partial work."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from logging import INFO
from typing import Any

from flwr.app import Error, Message, MetricRecord
from flwr.common.logger import log

from wattfleet_io.console import plain_text
from wattfleet_proto.assignment import (
    APP_WEIGHS_KEY,
    CUT_KEY,
    OBSERVED_EPOCH_S_KEY,
    OBSERVED_POWER_W_KEY,
    RECORD_KEY,
    SHARE_KEY,
    TOOK_EPOCHS_KEY,
    UNPROFILED_KEY,
)
from wattfleet_proto.v1 import planning_pb2

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
        ignoring: the nodes whose app did not use the plan's number of local epochs, or whose mod is too old to report
            it. Set by `results`; meaningful only if the plan has chosen the epochs.
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
