"""Applies a device's update to other arrays than those that its training started from, and scales updates."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable
from contextlib import suppress
from logging import WARNING

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.logger import log

from wattfleet_flower.server.buffered_aggregation import not_below_the_lowest, with_dtype
from wattfleet_flower.server.errors import MismatchedArraysError
from wattfleet_flower.server.sent_rounds import SentRound


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
