"""The messages of a planned round: each node's assignment, prediction and work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import WARNING

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log

from wattfleet_flower.server.predictions import prediction_records
from wattfleet_flower.server.rebased_updates import bases_of
from wattfleet_flower.server.sent_rounds import PlannedRound
from wattfleet_proto.assignment import PREDICTION_KEY, RECORD_KEY, WORK_KEY, AssignedWork
from wattfleet_proto.convert import assignments_from_plan


def assigned_messages(
    sent: PlannedRound, messages: Iterable[Message], work: Mapping[int, AssignedWork], usual_epochs: float
) -> list[Message]:
    """Add each node's assignment to its message, and record what is sent. Messages to nodes without one are dropped.

    Args:
        sent: the round.
        messages: its messages, as the strategy wrote them.
        work: the batch size and epochs that the plan has chosen for each node.
        usual_epochs: local epochs where the plan states none.
    """
    assignments = assignments_from_plan(sent.plan, usual_epochs)
    predictions = prediction_records(sent.plan, usual_epochs)
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
