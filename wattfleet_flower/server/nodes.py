"""Flower's nodes: which are connected, which device each one is, and which of these must not train."""

from __future__ import annotations

from collections.abc import Iterable
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from wattfleet_flower.server.errors import PlanningError
from wattfleet_flower.server.planning_client import PlanningClient
from wattfleet_flower.server.replies import describe_error
from wattfleet_io.clock import Clock
from wattfleet_io.console import plain_text
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, RECORD_KEY
from wattfleet_proto.v1 import planning_pb2

POLL_S = 1.0

# Asking a node for its device id takes a message, which takes seconds even where every node answers.
_IDENTIFY_INTERVAL_S = 600.0

# A request with so many bindings stays below the coordinator's message limit, however long the ids.
_BINDINGS_PER_REQUEST = 1000


class Nodes:
    """Waits for nodes to connect, asks unknown nodes for their device id, and knows the operator's exclusions."""

    def __init__(self, planner: PlanningClient, timeout_s: float, clock: Clock) -> None:
        """Use a coordinator.

        Args:
            planner: the coordinator, which stores which node is which device.
            timeout_s: seconds to wait for nodes to connect, and for their answers.
            clock: measures the waiting.
        """
        self._planner = planner
        self._timeout_s = timeout_s
        self._clock = clock
        self._accepted = 0
        self._asked_s: dict[int, float] = {}
        self._asked_in: dict[int, int] = {}
        self._devices: dict[int, str] = {}
        # Nodes that told their device while the coordinator was away.
        self._unbound: dict[int, str] = {}
        # The devices that the coordinator was asked about: why it must not train, or "" if it may.
        self._exclusions: dict[str, str] = {}
        self._left_out: set[str] = set()

    @property
    def are_exclusions_known(self) -> bool:
        """Whether the coordinator has told of any device whether it may train."""
        return bool(self._exclusions)

    def connected(self, grid: Grid, least: int) -> list[int]:
        """Wait until `least` nodes are connected, or until the timeout, and return the connected ones.

        After one timeout, later rounds start at once while no further node is lost.

        Raises:
            PlanningError: no node is connected.
        """
        began_s = self._clock.now_s()
        is_logged = False
        while len(node_ids := list(grid.get_node_ids())) < least:
            if node_ids and self._accepted and len(node_ids) >= self._accepted:
                return node_ids
            if self._clock.now_s() - began_s >= self._timeout_s:
                break
            if not is_logged:
                log(INFO, "Waiting for nodes to connect: %d of %d", len(node_ids), least)
                is_logged = True
            self._clock.sleep_s(POLL_S)
        if not node_ids:
            raise PlanningError(
                f"no node has connected within {self._timeout_s:g} s: start the SuperNodes,"
                " or wait longer with PowerAware(patience_s=...)"
            )
        self._accepted = len(node_ids) if len(node_ids) < least else 0
        if self._accepted:
            log(
                WARNING,
                "continuing with %d nodes: the strategy asks for %d, but no more are connected",
                len(node_ids),
                least,
            )
        return node_ids

    def identified(self, grid: Grid, node_ids: list[int]) -> list[int]:
        """Ask unknown nodes for their device id, and return the nodes that a round can be planned with.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            RefusedError: the coordinator refused the request.
        """
        known = self._planner.call("ResolveNodes", planning_pb2.ResolveNodesRequest(node_ids=node_ids))
        self._note(known.bindings, known.exclusions)
        told = [node_id for node_id in known.unknown_node_ids if node_id in self._unbound]
        bindings = [planning_pb2.NodeBinding(node_id=node_id, device_id=self._unbound[node_id]) for node_id in told]
        bindings += self._ask(grid, [node_id for node_id in known.unknown_node_ids if node_id not in self._unbound])
        for start in range(0, len(bindings), _BINDINGS_PER_REQUEST):
            batch = bindings[start : start + _BINDINGS_PER_REQUEST]
            bound = self._planner.call("BindNodes", planning_pb2.BindNodesRequest(bindings=batch))
            self._note(batch, bound.exclusions)
        return self._without_replaced([*known.bindings, *bindings])

    def allowed_without_plan(self, grid: Grid, node_ids: list[int]) -> list[int]:
        """Return the nodes that may train while the coordinator is away; unknown nodes are asked for their device id.

        A drained or excluded device does not train. Nor does one that the coordinator was never asked about, since it
        may be drained. If the coordinator has not answered at all, every node may train.
        """
        if not self.are_exclusions_known:
            return node_ids
        told = self._ask(grid, [node_id for node_id in node_ids if node_id not in self._devices])
        self._unbound.update({binding.node_id: binding.device_id for binding in told})
        self._devices.update({binding.node_id: binding.device_id for binding in told})
        newest = self._without_replaced(
            [
                planning_pb2.NodeBinding(node_id=node_id, device_id=self._devices[node_id])
                for node_id in node_ids
                if node_id in self._devices
            ]
        )
        reasons = {
            device_id: self._exclusions.get(device_id, "the coordinator was never asked whether it may train")
            for device_id in map(self._devices.__getitem__, newest)
        }
        left_out = {device_id for device_id, reason in reasons.items() if reason}
        for device_id in sorted(left_out - self._left_out):
            log(
                WARNING,
                "%s does not train while the coordinator is away: %s",
                device_id,
                plain_text(reasons[device_id]),
            )
        self._left_out = left_out
        return [node_id for node_id in newest if self._devices[node_id] not in left_out]

    def without_excluded(self, node_ids: Iterable[int]) -> list[int]:
        """Return the nodes without those whose device is drained or excluded, as far as the coordinator has told."""
        return [node_id for node_id in node_ids if not self._exclusions.get(self._devices.get(node_id, ""))]

    def device_of(self, node_id: int) -> str:
        """Return a node's device; empty if it is unknown."""
        return self._devices.get(node_id, "")

    def _note(
        self, bindings: Iterable[planning_pb2.NodeBinding], exclusions: Iterable[planning_pb2.NodeExclusion]
    ) -> None:
        """Remember which devices nodes belong to, and which of these must not train now."""
        reasons = {exclusion.node_id: exclusion.reason for exclusion in exclusions}
        for binding in bindings:
            self._unbound.pop(binding.node_id, None)
            self._devices[binding.node_id] = binding.device_id
            self._exclusions[binding.device_id] = reasons.get(binding.node_id, "")

    def _ask(self, grid: Grid, unknown: Iterable[int]) -> list[planning_pb2.NodeBinding]:
        """Ask nodes for their device id, except those that were asked lately."""
        now_s = self._clock.now_s()
        node_ids = [
            node_id
            for node_id in unknown
            if node_id not in self._asked_s or now_s - self._asked_s[node_id] >= _IDENTIFY_INTERVAL_S
        ]
        if not node_ids:
            return []
        messages = [
            Message(
                RecordDict({RECORD_KEY: ConfigRecord({IDENTIFY_KEY: True})}), dst_node_id=node_id, message_type="train"
            )
            for node_id in node_ids
        ]
        replies = list(grid.send_and_receive(messages, timeout=self._timeout_s))
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        reasons = dict.fromkeys(node_ids, f"no reply within {self._timeout_s:g} s")
        bindings = []
        for reply in replies:
            node_id = asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            if reply.has_error():
                reasons[node_id] = describe_error(reply.error)
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
                "node %d is excluded for the next %.0f min, since its device is unknown: %s",
                node_id,
                _IDENTIFY_INTERVAL_S / 60,
                reason,
            )
        latest = 1 + max(self._asked_in.values(), default=0)
        self._asked_in.update({binding.node_id: latest for binding in bindings})
        return bindings

    def _without_replaced(self, bindings: list[planning_pb2.NodeBinding]) -> list[int]:
        """Keep the newest node of each device: a restarted SuperNode has a new node id.

        Flower lists the old node for a while. Two nodes that gave the same device id in one batch are both kept, so
        that the coordinator refuses them.
        """
        newest: dict[str, int] = {}
        for binding in bindings:
            asked_in = self._asked_in.get(binding.node_id, 0)
            newest[binding.device_id] = max(asked_in, newest.get(binding.device_id, 0))
        return [b.node_id for b in bindings if self._asked_in.get(b.node_id, 0) == newest[b.device_id]]
