"""Asking nodes which device they are and whether they can train there, without waiting where rounds need not wait."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from wattfleet_flower.server.replies import describe_error
from wattfleet_io.clock import Clock
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, PAIRING_PROBLEM_KEY, RECORD_KEY
from wattfleet_proto.v1 import planning_pb2

_ASK_AGAIN_S = 10.0
"""Between two questions to a node that cannot train, since each starts a process on the node."""


def question_to(node_id: int) -> Message:
    """Ask a node for its device."""
    record = RecordDict({RECORD_KEY: ConfigRecord({IDENTIFY_KEY: True})})
    return Message(record, dst_node_id=node_id, message_type="train")


def answer_of(node_id: int, reply: Message) -> planning_pb2.NodeBinding | str:
    """What a node has answered: its binding, or why its device is unknown."""
    if reply.has_error():
        return describe_error(reply.error)
    record = reply.content.get(RECORD_KEY, {})
    if DEVICE_ID_KEY not in record:
        return "its ClientApp has no power_mode_mod"
    problem = str(record[PAIRING_PROBLEM_KEY]) if PAIRING_PROBLEM_KEY in record else None
    return planning_pb2.NodeBinding(node_id=node_id, device_id=str(record[DEVICE_ID_KEY]), pairing_problem=problem)


@dataclass(frozen=True)
class _Question:
    """A question that was sent: to whom and when, and whether it was answered."""

    node_id: int
    asked_s: float
    is_answered: bool = False


class RepeatedQuestions:
    """Asks nodes that cannot train again, so that mending one needs no restart. No round waits for an answer."""

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        """Ask nobody yet.

        Args:
            timeout_s: seconds after which a question that was not answered is asked again.
            clock: measures the time between questions.
        """
        self._timeout_s = timeout_s
        self._clock = clock
        self._asked: dict[str, _Question] = {}

    def ask(self, grid: Grid, node_ids: Collection[int]) -> list[planning_pb2.NodeBinding]:
        """Take the answers that have arrived, and ask again where it is time to.

        Args:
            grid: Flower's grid.
            node_ids: the connected nodes that cannot train.

        Returns:
            What nodes have answered since the last call.
        """
        answers = self._answers(grid)
        now_s = self._clock.now_s()
        self._asked = {
            message_id: question
            for message_id, question in self._asked.items()
            if question.node_id in node_ids
            and now_s - question.asked_s < (_ASK_AGAIN_S if question.is_answered else self._timeout_s)
        }
        waiting = {question.node_id for question in self._asked.values()}
        due = [node_id for node_id in node_ids if node_id not in waiting]
        # Flower gives no id to a message that the SuperLink rejected.
        sent = zip(due, grid.push_messages(map(question_to, due)) if due else (), strict=False)
        self._asked.update({message_id: _Question(node_id, now_s) for node_id, message_id in sent if message_id})
        return answers

    def _answers(self, grid: Grid) -> list[planning_pb2.NodeBinding]:
        open_ids = [message_id for message_id, question in self._asked.items() if not question.is_answered]
        arrived: Iterable[Message] = grid.pull_messages(open_ids) if open_ids else ()
        answers = []
        for reply in arrived:
            message_id = reply.metadata.reply_to_message_id
            question = self._asked[message_id]
            self._asked[message_id] = _Question(question.node_id, question.asked_s, is_answered=True)
            answer = answer_of(question.node_id, reply)
            if not isinstance(answer, str):  # an error says nothing new
                answers.append(answer)
        return answers
