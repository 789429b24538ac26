"""Flower's nodes: which are connected, and which devices they are."""

from __future__ import annotations

from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from wattfleet_flower.server.clock import Clock
from wattfleet_flower.server.errors import PlanningError
from wattfleet_flower.server.outcome import failure_of
from wattfleet_flower.server.planner import Planner
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, RECORD_KEY
from wattfleet_proto.v1 import planning_pb2

POLL_S = 1.0

# A node that did not say who it is costs a round of messages to ask, which takes seconds even where all answer.
_ASKED_AGAIN_AFTER_S = 600.0

# So many are a message that a coordinator takes, however long the ids.
_BOUND_AT_ONCE = 1000


class Nodes:
    """Waits for nodes, and asks those that no device is known for who they are."""

    def __init__(self, planner: Planner, patience_s: float, clock: Clock) -> None:
        """Use one coordinator.

        Args:
            planner: knows and keeps which node is which device.
            patience_s: seconds to wait for nodes, and for their answers.
            clock: to wait by.
        """
        self._planner = planner
        self._patience_s = patience_s
        self._clock = clock
        self._accepted = 0
        self._asked_s: dict[int, float] = {}
        self._newest: dict[int, int] = {}

    def connected(self, grid: Grid, least: int) -> list[int]:
        """The nodes that are there, once there are `least`, or after a while as many as there are.

        The patience is spent once: while no further node is lost, later rounds go on at once.

        Raises:
            PlanningError: there is none.
        """
        began_s = self._clock.now_s()
        said = False
        while len(node_ids := list(grid.get_node_ids())) < least:
            if node_ids and self._accepted and len(node_ids) >= self._accepted:
                return node_ids
            if self._clock.now_s() - began_s >= self._patience_s:
                break
            if not said:
                log(INFO, "Waiting for nodes to connect: %d of %d", len(node_ids), least)
                said = True
            self._clock.sleep_s(POLL_S)
        if not node_ids:
            raise PlanningError(
                f"no node has connected within {self._patience_s:g} s: are the SuperNodes running?"
                " PowerAware(patience_s=...) waits longer"
            )
        self._accepted = len(node_ids) if len(node_ids) < least else 0
        if self._accepted:
            log(WARNING, "going on with %d nodes: the strategy asks for %d, which are not there", len(node_ids), least)
        return node_ids

    def identified(self, grid: Grid, node_ids: list[int]) -> list[int]:
        """The nodes that a round can be planned with, once those have been asked that no device is known for.

        Raises:
            CoordinatorAwayError: the coordinator does not answer.
            RefusedError: it refused.
        """
        known = self._planner.ask("ResolveNodes", planning_pb2.ResolveNodesRequest(node_ids=node_ids))
        now_s = self._clock.now_s()
        unknown = [
            node_id
            for node_id in known.unknown_node_ids
            if node_id not in self._asked_s or now_s - self._asked_s[node_id] >= _ASKED_AGAIN_AFTER_S
        ]
        bindings = self._ask(grid, unknown) if unknown else []
        for begin in range(0, len(bindings), _BOUND_AT_ONCE):
            some = bindings[begin : begin + _BOUND_AT_ONCE]
            self._planner.ask("BindNodes", planning_pb2.BindNodesRequest(bindings=some))
        return self._without_former([*known.bindings, *bindings])

    def _ask(self, grid: Grid, node_ids: list[int]) -> list[planning_pb2.NodeBinding]:
        messages = [
            Message(
                RecordDict({RECORD_KEY: ConfigRecord({IDENTIFY_KEY: True})}), dst_node_id=node_id, message_type="train"
            )
            for node_id in node_ids
        ]
        replies = list(grid.send_and_receive(messages, timeout=self._patience_s))
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        reasons = dict.fromkeys(node_ids, f"no reply within {self._patience_s:g} s")
        bindings = []
        for reply in replies:
            node_id = asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            if reply.has_error():
                reasons[node_id] = failure_of(reply.error)
            elif DEVICE_ID_KEY not in reply.content.get(RECORD_KEY, {}):
                reasons[node_id] = "its ClientApp has no power_mode_mod"
            else:
                reasons.pop(node_id, None)
                device_id = str(reply.content[RECORD_KEY][DEVICE_ID_KEY])
                bindings.append(planning_pb2.NodeBinding(node_id=node_id, device_id=device_id))
        asked_s = self._clock.now_s()
        for node_id in node_ids:
            self._asked_s[node_id] = asked_s
        for node_id, reason in reasons.items():
            log(
                WARNING,
                "node %d is left out for the next %.0f min, it did not say which device it is: %s",
                node_id,
                _ASKED_AGAIN_AFTER_S / 60,
                reason,
            )
        batch = 1 + max(self._newest.values(), default=0)
        self._newest.update({binding.node_id: batch for binding in bindings})
        return bindings

    def _without_former(self, bindings: list[planning_pb2.NodeBinding]) -> list[int]:
        """Of several nodes that are one device, the newest: a SuperNode that restarts has a new number.

        Flower lists the former one for a while yet. Two that said so at the same time remain two, for the coordinator
        to refuse.
        """
        newest: dict[str, int] = {}
        for binding in bindings:
            said = self._newest.get(binding.node_id, 0)
            newest[binding.device_id] = max(said, newest.get(binding.device_id, 0))
        return [b.node_id for b in bindings if self._newest.get(b.node_id, 0) == newest[b.device_id]]
