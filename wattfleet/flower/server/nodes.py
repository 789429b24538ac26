"""Flower's nodes: which are connected, which device each one belongs to, and which devices must not train."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from wattfleet.common.clock import Clock
from wattfleet.common.console import count_of, plain_text
from wattfleet.flower.server.errors import PlanningError
from wattfleet.flower.server.planning_client import PlanningClient
from wattfleet.flower.server.replies import LOST_ERRORS, describe_error
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, PAIRING_PROBLEM_KEY, RECORD_KEY
from wattfleet_proto.v1 import planning_pb2

# --- Identification ---------------------------------------------------------------------------------------------------
# Requests a node's device id, and whether the node can train on that device.


_REPEAT_INTERVAL_S = 10.0
"""The pause between two requests to a node, after an answer. Each request starts a process on the node."""


_ADD_MOD = "list it as the first mod, ClientApp(mods=[power_mode_mod, ...])"
_FIRST_MOD = f"If the error is one of the app or of another mod, power_mode_mod is absent or comes too late: {_ADD_MOD}"


def identify_request(node_id: int) -> Message:
    """Return a message that requests a node's device id.

    It has the config of a training before the first round, since mods before `power_mode_mod` may read it.
    """
    record = RecordDict({RECORD_KEY: ConfigRecord({IDENTIFY_KEY: True}), "config": ConfigRecord({"server-round": 0})})
    return Message(record, dst_node_id=node_id, message_type="train")


def is_lost(reply: Message) -> bool:
    """Whether a node could not answer, since it was gone, its process was killed, or Flower lost a message."""
    return reply.has_error() and reply.error.code in LOST_ERRORS


def binding_in(node_id: int, reply: Message) -> planning_pb2.NodeBinding | str:
    """Return the binding that a node has answered with, or the reason why its device is unknown."""
    if reply.has_error():
        reason = describe_error(reply.error)
        return reason if is_lost(reply) else f"{reason}. {_FIRST_MOD}"
    record = reply.content.get(RECORD_KEY, {})
    if DEVICE_ID_KEY not in record:
        return f"its ClientApp has no power_mode_mod: {_ADD_MOD}"
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


# --- Nodes ------------------------------------------------------------------------------------------------------------

POLL_S = 1.0

# A node's device id is requested by a message, which takes seconds even if every node answers.
_IDENTIFY_INTERVAL_S = 600.0

# Keeps a request below the coordinator's message limit, however long the ids are.
_BINDINGS_PER_REQUEST = 1000


class Nodes:
    """Waits for nodes to connect, requests the device ids of unknown nodes, and keeps track of excluded devices."""

    def __init__(self, planner: PlanningClient, timeout_s: float, clock: Clock) -> None:
        """Use a coordinator.

        Args:
            planner: the coordinator, which stores the device of each node.
            timeout_s: seconds to wait for nodes to connect, and for their answers.
            clock: measures the waiting.
        """
        self._planner = planner
        self._timeout_s = timeout_s
        self._clock = clock
        self._accepted = 0
        self._asked_s: dict[int, float] = {}
        self._asked_in: dict[int, int] = {}
        # What nodes have reported, or the coordinator about them. A coordinator may not know it: nodes report while it
        # is away, and its store may be replaced by an older backup.
        self._bindings: dict[int, planning_pb2.NodeBinding] = {}
        # What nodes have answered that the coordinator does not know yet: it may go away before it is reported.
        self._unreported: dict[int, planning_pb2.NodeBinding] = {}
        self._unpaired: dict[int, str] = {}
        # Nodes that did not answer when their device ids were requested.
        self._silent: set[int] = set()
        self._to_recheck: set[int] = set()
        self._repeated = RepeatedIdentification(timeout_s, clock)
        # Device id -> why it must not train, or "" if it may, as reported by the coordinator.
        self._exclusions: dict[str, str] = {}
        self._left_out: set[str] = set()
        # Why the devices of nodes are unknown, by node id.
        self._why_unknown: dict[int, str] = {}

    @property
    def why_unknown(self) -> Mapping[int, str]:
        """Why the devices of nodes are unknown, by node id; some may have disconnected since."""
        return self._why_unknown

    @property
    def are_exclusions_known(self) -> bool:
        """Whether the coordinator has reported for any device if it may train."""
        return bool(self._exclusions)

    def connected(self, grid: Grid, least: int) -> list[int]:
        """Wait until `least` nodes are connected, or until the timeout, and return the connected ones.

        After one timeout, later rounds start at once as long as no further node is lost.

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
                "continuing with %d nodes: the strategy wants %d, but no more are connected",
                len(node_ids),
                least,
            )
        return node_ids

    def identified(self, grid: Grid, node_ids: list[int]) -> list[int]:
        """Request the device ids of unknown nodes, and return the nodes that a round can be planned with.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            RefusedError: the coordinator refused the request.
        """
        known = self._planner.call("ResolveNodes", planning_pb2.ResolveNodesRequest(node_ids=node_ids))
        self._note(known.bindings, known.exclusions)
        bindings = {binding.node_id: binding for binding in known.bindings}
        self._keep([self._bindings[node_id] for node_id in known.unknown_node_ids if node_id in self._bindings])
        unknown = [node_id for node_id in known.unknown_node_ids if node_id not in self._bindings]
        silent = [node_id for node_id in unknown if node_id in self._silent]
        self._ask(grid, [node_id for node_id in unknown if node_id not in self._silent])
        rechecked = self._rechecked(grid, bindings, silent)
        self._note_batch(each for each in rechecked if each.node_id not in bindings)
        self._keep(rechecked)
        answered = [
            self._unreported[node_id]
            for node_id in node_ids
            if node_id in self._unreported and self._unreported[node_id] != bindings.get(node_id)
        ]
        for start in range(0, len(answered), _BINDINGS_PER_REQUEST):
            batch = answered[start : start + _BINDINGS_PER_REQUEST]
            bound = self._planner.call("BindNodes", planning_pb2.BindNodesRequest(bindings=batch))
            self._note(batch, bound.exclusions)
        for node_id in node_ids:
            self._unreported.pop(node_id, None)
        bindings.update({binding.node_id: binding for binding in answered})
        return self._without_replaced(list(bindings.values()))

    def recheck_later(self, node_ids: Iterable[int]) -> None:
        """Request these nodes' device ids again before the next plan, since their agents refused a training."""
        self._to_recheck.update(node_ids)

    def _rechecked(
        self, grid: Grid, bindings: Mapping[int, planning_pb2.NodeBinding], silent: Iterable[int]
    ) -> list[planning_pb2.NodeBinding]:
        """Repeat the request to nodes that could not train or did not answer at the last one; return the new answers.

        The first answer is waited for, as is the one after a node's agent refused a training. Later answers are used
        when they arrive, so that no round waits for a node that cannot train.

        Args:
            grid: Flower's grid.
            bindings: the bindings of the connected nodes, by node id.
            silent: the connected nodes without a binding that did not answer.
        """
        unpaired = [node_id for node_id, binding in bindings.items() if binding.pairing_problem]
        new = [node_id for node_id in unpaired if node_id not in self._asked_s]
        new += [node_id for node_id in bindings if node_id in self._to_recheck]
        self._to_recheck.clear()
        for node_id in new:
            self._asked_s.pop(node_id, None)
        answered = self._ask(grid, dict.fromkeys(new), are_bound=True)
        return answered + self._repeated.poll(grid, [*(each for each in unpaired if each not in new), *silent])

    def allowed_without_plan(self, grid: Grid, node_ids: list[int]) -> list[int]:
        """Return the nodes that may train while the coordinator is away; requests the device ids of unknown nodes.

        Left out are drained and excluded devices, devices for which the coordinator has reported nothing, since they
        may be drained, and nodes that are not paired with the device that they name. If the coordinator has never
        answered, every node may train.
        """
        if not self.are_exclusions_known:
            return node_ids
        self._note_pairings(self._ask(grid, [node_id for node_id in node_ids if node_id not in self._bindings]))
        newest = self._without_replaced(
            [
                planning_pb2.NodeBinding(node_id=node_id, device_id=self._bindings[node_id].device_id)
                for node_id in node_ids
                if node_id in self._bindings and node_id not in self._unpaired
            ]
        )
        reasons = {
            device_id: self._exclusions.get(device_id, "the coordinator has not reported whether it may train")
            for device_id in map(self.device_of, newest)
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
        return [node_id for node_id in newest if self.device_of(node_id) not in left_out]

    def without_excluded(self, node_ids: Iterable[int]) -> list[int]:
        """Return the nodes that can train on the device that they name, and whose device is not drained or excluded.

        Drained and excluded devices are those in the coordinator's last report.
        """
        return [
            node_id
            for node_id in node_ids
            if node_id not in self._unpaired and not self._exclusions.get(self.device_of(node_id))
        ]

    def device_of(self, node_id: int) -> str:
        """Return a node's device; empty if it is unknown."""
        return self._bindings[node_id].device_id if node_id in self._bindings else ""

    def _note(
        self, bindings: Iterable[planning_pb2.NodeBinding], exclusions: Iterable[planning_pb2.NodeExclusion]
    ) -> None:
        """Remember the devices of nodes, and which of them must not train now."""
        reasons = {exclusion.node_id: exclusion.reason for exclusion in exclusions}
        bindings = list(bindings)
        self._note_pairings(bindings)
        for binding in bindings:
            self._bindings[binding.node_id] = binding
            self._exclusions[binding.device_id] = reasons.get(binding.node_id, "")

    def _note_pairings(self, bindings: Iterable[planning_pb2.NodeBinding]) -> None:
        """Remember which nodes cannot train on the devices that they name, and log each change."""
        for binding in bindings:
            problem = plain_text(binding.pairing_problem)
            before = self._unpaired.pop(binding.node_id, "")
            if problem:
                self._unpaired[binding.node_id] = problem
            if problem and problem != before:
                log(WARNING, "%s is left out of rounds, node %d: %s", binding.device_id, binding.node_id, problem)
            elif before and not problem:
                log(INFO, "%s can train again, node %d", binding.device_id, binding.node_id)

    def _ask(self, grid: Grid, unknown: Iterable[int], are_bound: bool = False) -> list[planning_pb2.NodeBinding]:
        """Request the device ids of nodes, except those that were requested lately; return the answers.

        Args:
            grid: Flower's grid.
            unknown: the nodes.
            are_bound: whether their devices are known. Without an answer, these stay as they are.
        """
        now_s = self._clock.now_s()
        node_ids = [
            node_id
            for node_id in unknown
            if node_id not in self._asked_s or now_s - self._asked_s[node_id] >= _IDENTIFY_INTERVAL_S
        ]
        if not node_ids:
            return []
        count = count_of(len(node_ids), "node")
        log(INFO, "Requesting device ids from %s; waiting up to %g s for the answers", count, self._timeout_s)
        messages = [identify_request(node_id) for node_id in node_ids]
        replies = list(grid.send_and_receive(messages, timeout=self._timeout_s))
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        reasons = dict.fromkeys(node_ids, f"no reply within {self._timeout_s:g} s")
        silent = set(node_ids)
        bindings = []
        for reply in replies:
            node_id = asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            if not is_lost(reply):
                silent.discard(node_id)
            answer = binding_in(node_id, reply)
            if isinstance(answer, str):
                reasons[node_id] = answer
            else:
                reasons.pop(node_id, None)
                bindings.append(answer)
        if not are_bound:
            self._silent |= silent
        asked_s = self._clock.now_s()
        for node_id in node_ids:
            self._asked_s[node_id] = asked_s
        for node_id in node_ids:
            self._why_unknown.pop(node_id, None)
        for node_id, reason in reasons.items():
            if not are_bound:
                self._why_unknown[node_id] = reason
            if are_bound:
                log(WARNING, "node %d did not report whether it can train: %s", node_id, reason)
                continue
            if node_id in silent:
                log(WARNING, "node %d is left out until it reports its device: %s", node_id, reason)
                continue
            log(
                WARNING,
                "node %d is excluded for the next %.0f min, since its device is unknown: %s",
                node_id,
                _IDENTIFY_INTERVAL_S / 60,
                reason,
            )
        self._note_batch(bindings)
        self._keep(bindings)
        return bindings

    def _keep(self, answered: Iterable[planning_pb2.NodeBinding]) -> None:
        """Remember what nodes have answered, and that the coordinator does not know it."""
        for binding in answered:
            self._bindings[binding.node_id] = self._unreported[binding.node_id] = binding
            self._silent.discard(binding.node_id)
            self._why_unknown.pop(binding.node_id, None)

    def _note_batch(self, bindings: Iterable[planning_pb2.NodeBinding]) -> None:
        """Remember that these nodes have reported their devices together, and later than all others."""
        latest = 1 + max(self._asked_in.values(), default=0)
        self._asked_in.update({binding.node_id: latest for binding in bindings})

    def _without_replaced(self, bindings: list[planning_pb2.NodeBinding]) -> list[int]:
        """Keep the newest node of each device: a restarted SuperNode has a new node id.

        Flower lists the old node for a while. Two nodes that gave the same device id in one batch are both kept, so
        that the coordinator leaves the device out. A node that cannot train does not replace another one.
        """
        newest: dict[str, int] = {}
        for binding in bindings:
            if binding.pairing_problem:
                continue
            asked_in = self._asked_in.get(binding.node_id, 0)
            newest[binding.device_id] = max(asked_in, newest.get(binding.device_id, 0))
        return [
            b.node_id for b in bindings if b.pairing_problem or self._asked_in.get(b.node_id, 0) == newest[b.device_id]
        ]
