"""What came of a round's messages: a result for each device, and the weight of work that was done in part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from logging import INFO
from typing import Any

from flwr.app import Error, Message, MetricRecord
from flwr.common.logger import log

from wattfleet_proto.assignment import APP_WEIGHS_KEY, CUT_KEY, RECORD_KEY, SHARE_KEY
from wattfleet_proto.v1 import planning_pb2

LOSS_KEYS = ("train_loss", "train-loss", "loss")
"""Where an app reports its mean training loss: the first of these that its reply has."""

_LONGEST_REASON = 300
_SHORTEST_REASON = 16
# What a message within another takes beside itself.
_FRAMED_BYTES = 4
# Flower's own numbers (ErrorCode), which it does not export.
_CODES = {
    1: "the app could not be loaded",
    2: "the app raised",
    3: "the message was lost",
    4: "the reply was lost",
    5: "the node is gone",
    6: "a mod refused",
    7: "the app's bundle is broken",
    8: "the training process was killed",
}
# Of these Flower's own reason says more.
_WITH_REASON = (1, 2, 6, 7)


def failure_of(error: Error) -> str:
    """Why a node sent an error, in words."""
    words = _CODES.get(error.code, f"Flower's error {error.code}")
    if error.code in _CODES and error.code not in _WITH_REASON:
        return words
    # The last line of an exception says what it was; those before say where.
    lines = [line.strip() for line in (error.reason or "").splitlines() if line.strip()]
    return f"{words}: {lines[-1][:_LONGEST_REASON]}" if lines else words


def shorten(results: Sequence[planning_pb2.DeviceResult], most_bytes: int) -> None:
    """Cut the reasons of failures, where results are to be longer than so many bytes in all."""
    excess = sum(result.ByteSize() + _FRAMED_BYTES for result in results) - most_bytes
    failed = [result for result in results if result.failure]
    if excess <= 0 or not failed:
        return
    reasons = [result.failure.encode() for result in failed]
    longest = max(_SHORTEST_REASON, (sum(map(len, reasons)) - excess) // len(failed))
    for result, reason in zip(failed, reasons, strict=True):
        result.failure = reason[:longest].decode(errors="ignore")


class Outcome:
    """The replies to a round's messages, each with the message that it answers."""

    def __init__(self, sent: Sequence[tuple[Any, str]], replies: Iterable[Message], waited_s: float | None) -> None:
        """Match replies to messages.

        Args:
            sent: metadata of every message, and the device that it was for.
            replies: what came back.
            waited_s: how long it was waited for, seconds; None where nobody knows.
        """
        self._sent = sent
        self._no_reply = "no reply in time" if waited_s is None else f"no reply within {waited_s:.0f} s"
        self.replies = list(replies)
        of_message = {metadata.message_id: device_id for metadata, device_id in sent if metadata.message_id}
        of_node = {metadata.dst_node_id: device_id for metadata, device_id in sent}
        # Flower's server answers for a node that is gone, under its own number: the message tells whose reply it is.
        self._reply_of = {
            device_id: reply
            for reply in self.replies
            if (device_id := of_message.get(reply.metadata.reply_to_message_id))
            or (device_id := of_node.get(reply.metadata.src_node_id))
        }

    def weigh(self, weighted_by_key: str) -> list[planning_pb2.DeviceResult]:
        """Take Wattfleet's own record out of the replies, and weigh partial work by how much of it was done.

        Args:
            weighted_by_key: the metric that the strategy weighs by.

        Returns:
            The result of every device that was sent a message.
        """
        return [self._result(device_id, weighted_by_key) for device_id in dict.fromkeys(one for _, one in self._sent)]

    def _result(self, device_id: str, weighted_by_key: str) -> planning_pb2.DeviceResult:
        reply = self._reply_of.get(device_id)
        if reply is None:
            return planning_pb2.DeviceResult(device_id=device_id, failure=self._no_reply)
        if reply.has_error():
            return planning_pb2.DeviceResult(device_id=device_id, failure=failure_of(reply.error))
        record = reply.content.pop(RECORD_KEY, {})
        share = min(1.0, max(0.0, float(record[SHARE_KEY]))) if _is_number(record.get(SHARE_KEY)) else 1.0
        metrics = list(reply.content.metric_records.values())
        if share < 1 and not record.get(APP_WEIGHS_KEY, False):
            for one in metrics:
                if _is_number(one.get(weighted_by_key)):
                    one[weighted_by_key] = float(one[weighted_by_key]) * share
        if record.get(CUT_KEY, False) and SHARE_KEY not in record:
            log(INFO, "%s stopped at its deadline; its loader has no length, so its weight stands", device_id)
        return planning_pb2.DeviceResult(
            device_id=device_id,
            share=share,
            num_examples=_first_number(metrics, (weighted_by_key,), least=0.0),
            loss=_first_number(metrics, LOSS_KEYS),
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _first_number(records: Iterable[MetricRecord], keys: Sequence[str], least: float = -math.inf) -> float | None:
    """The first of some metrics; None where there is none, or no finite number that is at least `least`."""
    for key in keys:
        for metrics in records:
            if _is_number(metrics.get(key)):
                value = float(metrics[key])
                return value if math.isfinite(value) and value >= least else None
    return None
