"""Requests a node's device id, and whether the node can train on that device."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from wattfleet_flower.server.replies import LOST_ERRORS, describe_error
from wattfleet_io.clock import Clock
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, PAIRING_PROBLEM_KEY, RECORD_KEY
from wattfleet_proto.v1 import planning_pb2

_REPEAT_INTERVAL_S = 10.0
"""The pause between two requests to a node, after an answer. Each request starts a process on the node."""


def identify_request(node_id: int) -> Message:
    """Return a message that requests a node's device id."""
    record = RecordDict({RECORD_KEY: ConfigRecord({IDENTIFY_KEY: True})})
    return Message(record, dst_node_id=node_id, message_type="train")


def is_lost(reply: Message) -> bool:
    """Whether a node could not answer, since it was gone, its process was killed, or Flower lost a message."""
    return reply.has_error() and reply.error.code in LOST_ERRORS


def binding_in(node_id: int, reply: Message) -> planning_pb2.NodeBinding | str:
    """Return the binding that a node has answered with, or the reason why its device is unknown."""
    if reply.has_error():
        return describe_error(reply.error)
    record = reply.content.get(RECORD_KEY, {})
    if DEVICE_ID_KEY not in record:
        return "its ClientApp has no power_mode_mod"
    problem = str(record[PAIRING_PROBLEM_KEY]) if PAIRING_PROBLEM_KEY in record else None
    return planning_pb2.NodeBinding(node_id=node_id, device_id=str(record[DEVICE_ID_KEY]), pairing_problem=problem)


@dataclass(frozen=True)
class _SentRequest:
    """A request that was sent to a node, when, and whether it was answered."""

    node_id: int
    asked_s: float
    is_answered: bool = False


class RepeatedIdentification:
    """Repeats the request to nodes that cannot train or did not answer. Rounds do not wait for the answers."""

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        """Start without requests.

        Args:
            timeout_s: seconds after which an unanswered request is repeated.
            clock: measures the time between requests.
        """
        self._timeout_s = timeout_s
        self._clock = clock
        self._sent: dict[str, _SentRequest] = {}

    def poll(self, grid: Grid, node_ids: Collection[int]) -> list[planning_pb2.NodeBinding]:
        """Collect the answers that have arrived, and repeat the requests that are due.

        Args:
            grid: Flower's grid.
            node_ids: the connected nodes to ask.

        Returns:
            The bindings that nodes have answered with since the last call.
        """
        answers = self._answers(grid)
        now_s = self._clock.now_s()
        self._sent = {
            message_id: request
            for message_id, request in self._sent.items()
            if request.node_id in node_ids
            and now_s - request.asked_s < (_REPEAT_INTERVAL_S if request.is_answered else self._timeout_s)
        }
        waiting = {request.node_id for request in self._sent.values()}
        due = [node_id for node_id in node_ids if node_id not in waiting]
        if due:
            # A message that the SuperLink rejected has no id.
            message_ids = grid.push_messages([identify_request(node_id) for node_id in due])
            sent = zip(due, message_ids, strict=False)
            self._sent.update({message_id: _SentRequest(node_id, now_s) for node_id, message_id in sent if message_id})
        return answers

    def _answers(self, grid: Grid) -> list[planning_pb2.NodeBinding]:
        open_ids = [message_id for message_id, request in self._sent.items() if not request.is_answered]
        arrived: Iterable[Message] = grid.pull_messages(open_ids) if open_ids else ()
        answers = []
        for reply in arrived:
            message_id = reply.metadata.reply_to_message_id
            request = self._sent.get(message_id)
            if request is None:
                continue
            self._sent[message_id] = _SentRequest(request.node_id, request.asked_s, is_answered=True)
            answer = binding_in(request.node_id, reply)
            if not isinstance(answer, str):  # an error adds nothing to what is known
                answers.append(answer)
        return answers
