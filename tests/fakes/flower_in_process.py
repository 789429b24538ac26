"""Flower's server without its network: nodes that reply immediately, a planner, and runs of PowerAware over them."""

from __future__ import annotations

import copy
import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from wattfleet.common.clock import VirtualClock
from wattfleet.flower import PowerAware, Quorum
from wattfleet.simulation.flower_task import be_task
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, PAIRING_PROBLEM_KEY, RECORD_KEY
from wattfleet_proto.v1 import planning_pb2, power_pb2

# --- One run grid -----------------------------------------------------------------------------------------------------
# The common part of all fakes of Flower's grid: it belongs to one run, and takes messages as Flower's own does.


class OneRunGrid(Grid):
    """A grid of one run, which cannot be changed.

    Args:
        run_id: id of the run.
        app: name of the app; empty if Flower does not report it.

    Attributes:
        run_config: values of the app's configuration that the run overrides.
    """

    def __init__(self, run_id: int | str, app: str = "") -> None:
        self.run_config: dict[str, str | int | float | bool] = {}
        self._run_id = run_id
        self._app_name = app
        self._numbered = 0

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=self._run_id, fab_id=self._app_name, override_config=self.run_config)

    def set_run(self, run: Any) -> None:
        raise AssertionError("the run is fixed")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise AssertionError("deprecated in Flower")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        sent = self._taken(messages)
        if sent:
            self._send(sent)
        return [message.metadata.message_id for message in sent]

    def _taken(self, messages: Iterable[Message]) -> list[Message]:
        """Take messages as Flower 1.41's grid does: iterate over them twice, for their ids and to send them.

        Raises:
            httpx.HTTPStatusError: the second time, there were none.
        """
        if not messages:
            return []
        for message in messages:
            self._number(message)
        sent = list(messages)
        if not sent:
            raise internal_server_error("push-messages")
        return sent

    @abstractmethod
    def _send(self, messages: list[Message]) -> None:
        """Send messages that have an id."""

    def _number(self, message: Message) -> str:
        """Give a message an id, as Flower's grid does; returns the id."""
        self._numbered += 1
        message_id = f"message-{self._numbered}"
        message.metadata.__dict__["_message_id"] = message_id
        return message_id


def internal_server_error(method: str) -> httpx.HTTPStatusError:
    """The error of Flower 1.41's grid if the SuperLink answers 500, for example to a request without messages."""
    request = httpx.Request("POST", f"http://127.0.0.1:8000/v1/runtime/{method}")
    response = httpx.Response(500, json={"detail": "Internal server error."}, request=request)
    text = f"Server error '500 Internal Server Error' for url '{request.url}'"
    return httpx.HTTPStatusError(text, request=request, response=response)


# --- Flower in process ------------------------------------------------------------------------------------------------
# Flower's server without its network: nodes that reply immediately, a clock set by the test, and a planner.

RUN_ID = 7
APP = "wattfleet/digits"
MODE = power_pb2.PowerMode(cores=4, cpu_khz=1_510_400, gpu_hz=624_750_000, mem_hz=2_133_000_000)
# Flower's server replies with this node id for nodes that are gone.
SUPERLINK = 1


class RecordingClock(VirtualClock):
    """A virtual clock that records every wait, except the pauses between polls for replies."""

    def __init__(self) -> None:
        super().__init__(1000.0)
        self.slept: list[float] = []

    def sleep_s(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)

    def forget_last(self) -> None:
        """Drop the last wait, which was for replies."""
        if self.slept:
            self.slept.pop()

    def advance(self, seconds: float) -> None:
        """Advance the clock without recording a wait."""
        super().sleep_s(seconds)


def trained(message: Message, **metrics: float) -> Message:
    """The reply of an app's training: the arrays, shifted by a value of the node."""
    arrays = message.content["arrays"].to_numpy_ndarrays()
    step = 0.1 * (1 + message.metadata.dst_node_id % 7)
    moved = {str(k): Array(np.asarray(array + step)) for k, array in enumerate(arrays)}
    told = {"num-examples": 10 * (1 + message.metadata.dst_node_id % 7), "train_loss": 1.0 / step, **metrics}
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": MetricRecord(told)}), reply_to=message)


def partly(share: float, **record: Any) -> Callable[[Message], Message]:
    """The reply of a training that stopped at its deadline."""

    def train(message: Message) -> Message:
        reply = trained(message)
        reply.content[RECORD_KEY] = ConfigRecord({"share": share, **record})
        return reply

    return train


def gone(message: Message) -> Message:
    """Flower's reply for a node that is gone: it has the server's node id instead of the node's own."""
    reply = Message(Error(5, "Error: Node Unavailable"), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = SUPERLINK
    return reply


def killed(message: Message) -> Message:
    return Message(Error(8, "ClientApp crashed"), reply_to=message)


def raised(message: Message) -> Message:
    return Message(Error(2, "\nException MemoryError occurred. Message: \nout of memory\n"), reply_to=message)


@dataclass
class Node:
    """One node.

    Attributes:
        device_id: the device that it reports; None if its app has no mod.
        train: its training function.
        takes_s: seconds until it replies; if longer than the timeout, the reply is late.
        busy_until_s: when it will have processed all messages that it has received.
        problem: why it cannot train on the device that it names; None if its mod does not check this.
    """

    device_id: str | None
    train: Callable[[Message], Message] = trained
    takes_s: float = 5.0
    busy_until_s: float = 0.0
    problem: str | None = None


class GridOfNodes(OneRunGrid):
    """Nodes that reply when their time has come; a reply after the timeout can still be pulled."""

    def __init__(self, nodes: Mapping[int, Node], clock: RecordingClock | None = None) -> None:
        super().__init__(RUN_ID, APP)
        be_task(RUN_ID, SUPERLINK)
        self.nodes = dict(nodes)
        self.clock = clock or RecordingClock()
        self.sent: list[Message] = []
        self.waits: list[tuple[float, float]] = []
        self._on_the_way: dict[str, tuple[float, Message]] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def _send(self, messages: list[Message]) -> None:
        """Send messages; a node processes one message after another."""
        for message in messages:
            node = self.nodes.get(message.metadata.dst_node_id) or Node(None, gone, 50.0)
            node.busy_until_s = max(self.clock.now_s(), node.busy_until_s) + node.takes_s
            self._on_the_way[message.metadata.message_id] = node.busy_until_s, self._replied(node, message)
        self.waits.append((self.clock.now_s(), self.clock.now_s()))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that have arrived by now."""
        self.clock.forget_last()
        self.waits[-1] = self.waits[-1][0], self.clock.now_s()
        there = [one for one in message_ids if self._on_the_way.get(one, (float("inf"),))[0] <= self.clock.now_s()]
        return [self._on_the_way.pop(one)[1] for one in there]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies, waited_s = [], 0.0
        for message in self._taken(messages):
            node = self.nodes.get(message.metadata.dst_node_id) or Node(None, gone, 50.0)
            if timeout is not None and node.takes_s > timeout:
                waited_s = max(waited_s, timeout)
                late = self.clock.now_s() + node.takes_s, self._replied(node, message)
                self._on_the_way[message.metadata.message_id] = late
                continue
            waited_s = max(waited_s, node.takes_s)
            replies.append(self._replied(node, message))
        self.clock.advance(waited_s)
        return replies

    @property
    def waited_s(self) -> list[float]:
        """How long each set of messages was waited for, in seconds."""
        return [last_look_s - sent_s for sent_s, last_look_s in self.waits]

    def _number(self, message: Message) -> str:
        message_id = super()._number(message)
        self.sent.append(self._as_sent(message))
        return message_id

    def _as_sent(self, message: Message) -> Message:
        sent = copy.copy(message)
        # As over the network, later changes to the message are not sent.
        records = {k: ConfigRecord(dict(r)) if isinstance(r, ConfigRecord) else r for k, r in message.content.items()}
        sent.__dict__["_content"] = RecordDict(records)
        return sent

    def _replied(self, node: Node, message: Message) -> Message:
        record = message.content.get(RECORD_KEY, {})
        if IDENTIFY_KEY in record and node.train is not gone:
            if node.device_id is None:
                return Message(Error(2, "KeyError: 'arrays'"), reply_to=message)
            identity = ConfigRecord({DEVICE_ID_KEY: node.device_id})
            if node.problem is not None:
                identity[PAIRING_PROBLEM_KEY] = node.problem
            return Message(RecordDict({RECORD_KEY: identity}), reply_to=message)
        if message.metadata.message_type == "evaluate":
            metrics = MetricRecord({"num-examples": 10, "accuracy": 0.5})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)
        return node.train(message)

    def trainings(self) -> list[Message]:
        """The training messages that were sent."""
        return [m for m in self.sent if m.metadata.message_type == "train" and "arrays" in m.content]

    def identifications(self) -> list[int]:
        """The nodes that were asked for their device."""
        return [m.metadata.dst_node_id for m in self.sent if IDENTIFY_KEY in m.content.get(RECORD_KEY, {})]


class StatusError(grpc.RpcError):
    """What a gRPC call raises."""

    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._status, self._details = status, details

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._details


@dataclass
class PlannerStub:
    """A coordinator's planning service that returns given plans.

    Attributes:
        chosen: devices to select, as far as they are connected; None for all.
        nodes: the device of each node.
        problems: why nodes cannot train on their devices.
        excluded: why devices are drained or excluded.
        away: whether it is unreachable.
        full: whether its disk is full: requests that have to be stored are refused.
        taken: runs that another app has started.
        refusals: errors to raise for the next requests for a plan, each once.
        deadline_s: deadline of every plan.
        duration_s: predicted duration of every plan.
        enough_replies: number of replies that end a round, in every plan; 0 for all.
        of_assumed_length: devices that do not know yet how many minibatches their epoch has.
        measured: the number of modes that devices have measured; 12 for the others.
        calls: the requests, in order.
        surveys: devices to grant a survey at the next requests for one, as far as they were requested.
        learn: devices that know the workload after a survey. The others are granted another one at every request that
            names them, as the coordinator does.
        surveyed: devices that were granted a survey.
        beside: devices to let measure beside the next rounds, likewise.
        epochs: the local epochs of the latest request for a plan.
    """

    chosen: Sequence[str] | None = None
    nodes: dict[int, str] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    away: bool = False
    full: bool = False
    taken: Collection[str] = ()
    refusals: list[StatusError] = field(default_factory=list)
    deadline_s: float = 0.0
    duration_s: float = 20.0
    enough_replies: int = 0
    of_assumed_length: Collection[str] = ()
    measured: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    plans: dict[str, planning_pb2.PlanRoundResponse] = field(default_factory=dict)
    surveys: list[Sequence[str]] = field(default_factory=list)
    learn: Collection[str] = ()
    surveyed: set[str] = field(default_factory=set)
    beside: list[Sequence[str]] = field(default_factory=list)
    epochs: float = 0.0

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method not in planning_pb2.DESCRIPTOR.services_by_name["PlanningService"].methods_by_name:
            raise AttributeError(method)

        def call(request: Any, timeout: float, wait_for_ready: bool) -> Any:
            if self.away:
                raise StatusError(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
            if self.full and method != "ResolveNodes":
                raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the database is full")
            run_id = getattr(request, "run_id", "") or getattr(request, "plan_id", "").partition("/")[0]
            if run_id in self.taken:
                raise StatusError(grpc.StatusCode.PERMISSION_DENIED, f"run {run_id!r} was started by another app")
            self.calls.append((method, request))
            self.epochs = getattr(request, "epochs", self.epochs)
            if method == "ResolveNodes":
                bindings = [self._binding(node_id) for node_id in request.node_ids if node_id in self.nodes]
                unknown = [node_id for node_id in request.node_ids if node_id not in self.nodes]
                return planning_pb2.ResolveNodesResponse(
                    bindings=bindings, unknown_node_ids=unknown, exclusions=self._exclusions(bindings)
                )
            if method == "BindNodes":
                for binding in request.bindings:
                    self.nodes[binding.node_id] = binding.device_id
                    self.problems.pop(binding.node_id, None)
                    if binding.HasField("pairing_problem"):
                        self.problems[binding.node_id] = binding.pairing_problem
                return planning_pb2.BindNodesResponse(exclusions=self._exclusions(request.bindings))
            if method == "PlanRound":
                plan = self.plans[f"{request.run_id}/{request.round}"] = self._plan(request)
                return plan
            if method == "PlanMeasuring":
                return self._measuring(request)
            if method == "PredictNodes":
                predictions = [self._predicted(node_id) for node_id in request.node_ids]
                return planning_pb2.PredictNodesResponse(predictions=predictions)
            if method == "GetPlan":
                return self._current_plan(request.plan_id)
            return getattr(planning_pb2, f"{method}Response")()

        return call

    def _exclusions(self, bindings: Iterable[planning_pb2.NodeBinding]) -> list[planning_pb2.NodeExclusion]:
        return [
            planning_pb2.NodeExclusion(node_id=each.node_id, reason=self.excluded[each.device_id])
            for each in bindings
            if each.device_id in self.excluded
        ]

    def _binding(self, node_id: int) -> planning_pb2.NodeBinding:
        problem = self.problems.get(node_id)
        return planning_pb2.NodeBinding(node_id=node_id, device_id=self.nodes[node_id], pairing_problem=problem)

    def _plan(self, request: planning_pb2.PlanRoundRequest) -> planning_pb2.PlanRoundResponse:
        if self.refusals:
            raise self.refusals.pop(0)
        if not request.node_ids and f"{request.run_id}/{request.round}" not in self.plans:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "no device is ready to train")
        paired = [n for n in request.node_ids if not self.problems.get(n)]
        candidates = [n for n in paired if self.nodes[n] not in self.excluded]
        chosen = [n for n in candidates if self.chosen is None or self.nodes[n] in self.chosen]
        return planning_pb2.PlanRoundResponse(
            plan_id=f"{request.run_id}/{request.round}",
            assignments=[self._assignment(node_id) for node_id in chosen],
            decisions=[
                planning_pb2.Decision(device_id=self.nodes[node_id], selected=True, reason="the fastest")
                for node_id in chosen
            ],
            duration_s=self.duration_s,
            deadline_s=self.deadline_s,
            enough_replies=self.enough_replies,
        )

    def _measuring(self, request: planning_pb2.PlanMeasuringRequest) -> planning_pb2.PlanMeasuringResponse:
        waiting = self.surveys if request.HasField("survey_s") else self.beside
        wanted = set(waiting.pop(0)) if waiting else set()
        if request.HasField("survey_s"):
            wanted |= self.surveyed - set(self.learn)
            self.surveyed |= wanted
        chosen = [node_id for node_id in request.node_ids if self.nodes[node_id] in wanted]
        return planning_pb2.PlanMeasuringResponse(
            plan_id=f"{request.run_id}/measuring-{len(self.calls)}" if chosen else "",
            assignments=[self._assignment(node_id) for node_id in chosen],
            waiting=sum(map(len, waiting)),
        )

    def _assignment(self, node_id: int) -> planning_pb2.Assignment:
        return planning_pb2.Assignment(
            node_id=node_id,
            device_id=self.nodes[node_id],
            mode=MODE,
            epoch_s=20.0 + node_id % 7,
            power_w=8.0,
            power_limit_w=10.0 + node_id % 7,
            warmup_s=3.0,
            profiled_modes=self.measured.get(self.nodes[node_id], 12),
            length_assumed=self.nodes[node_id] in self.of_assumed_length,
            epoch_log_sd=0.1,
            power_log_sd=0.2,
            batch=16,
            epochs=self.epochs,
        )

    def _predicted(self, node_id: int) -> planning_pb2.NodePrediction:
        device_id = self.nodes[node_id]
        reason = self.excluded.get(device_id, "")
        return planning_pb2.NodePrediction(
            node_id=node_id,
            device_id=device_id,
            assignment=None if reason else self._assignment(node_id),
            reason=reason,
        )

    def _current_plan(self, plan_id: str) -> planning_pb2.GetPlanResponse:
        if plan_id not in self.plans:
            raise StatusError(grpc.StatusCode.NOT_FOUND, f"unknown plan {plan_id!r}")
        plan = planning_pb2.PlanRoundResponse()
        plan.CopyFrom(self.plans[plan_id])
        plan.duration_s, plan.deadline_s = self.duration_s, self.deadline_s
        return planning_pb2.GetPlanResponse(plan=plan)

    def asked(self, method: str) -> list[Any]:
        """The requests of one method."""
        return [request for name, request in self.calls if name == method]

    def results(self) -> list[dict[str, planning_pb2.DeviceResult]]:
        """The results reported for each round, by device."""
        return [{result.device_id: result for result in request.results} for request in self.asked("FinishRound")]


# --- Power aware runs -------------------------------------------------------------------------------------------------
# A small fleet of fake nodes, and runs of PowerAware over it.

# Flower's node ids use all 64 bits.
A, B, C, D = (2**63 - 1 + k for k in range(4))
KNOWN = {A: "a", B: "b", C: "c", D: "d"}
ARRAYS = ArrayRecord([np.zeros((2, 3)), np.ones(2)])


class WarningLog(list[str]):
    """The warnings that were logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __iter__(self) -> Iterator[str]:
        return (r.getMessage() for r in self._caplog.records if r.levelno >= logging.WARNING)

    def about(self, text: str) -> list[str]:
        return [warning for warning in self if text in warning]


class SeesContents(FedAvg):
    """Records the keys of each reply that it aggregates."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.seen: list[set[str]] = []

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        self.seen.extend(set(reply.content) for reply in replies)
        return super().aggregate_train(server_round, replies)


def fleet(**changes: Any) -> dict[int, Node]:
    nodes = {A: Node("a"), B: Node("b"), C: Node("c"), D: Node("d")}
    for device_id, change in changes.items():
        [node] = [node for node in nodes.values() if node.device_id == device_id]
        vars(node).update(change)
    return nodes


def unsurveyed(strategy: Any, planner: PlannerStub, clock: Any, **options: Any) -> PowerAware:
    """A strategy whose devices measure only within rounds: most tests are not about measuring."""
    return PowerAware(strategy, planner, clock=clock, **{"survey_s": None, "measures_left_out": False, **options})


def run(
    grid: GridOfNodes,
    planner: PlannerStub,
    rounds: int = 1,
    strategy: Any = None,
    timeout: float = 3600,
    **options: Any,
) -> Result:
    wrapped = unsurveyed(strategy or FedAvg(fraction_evaluate=0.0), planner, grid.clock, **options)
    return wrapped.start(grid, ARRAYS, num_rounds=rounds, timeout=timeout)


def first_value(result: Result) -> float:
    return float(result.arrays.to_numpy_ndarrays()[0][0, 0])


# --- Quorum runs ------------------------------------------------------------------------------------------------------
# Runs with a quorum over fake nodes, whose trainings change every weight by a known amount.

ZERO = ArrayRecord({"w": Array(np.zeros(2, np.float32))})


def adds(value: float, **record: Any) -> Callable[[Message], Message]:
    """A training that adds this amount to every weight, on ten samples; `record` is the mod's report."""

    def train(message: Message) -> Message:
        [arrays] = message.content.array_records.values()
        moved = ArrayRecord({key: Array(np.asarray(array.numpy() + value)) for key, array in arrays.items()})
        content = RecordDict({"arrays": moved, "metrics": MetricRecord({"num-examples": 10, "train_loss": value})})
        if record:
            content[RECORD_KEY] = ConfigRecord(record)
        return Message(content, reply_to=message)

    return train


def nodes_of(**takes_s: float) -> dict[int, Node]:
    """Nodes that reply after the given seconds; device `a` adds 1 to the weights, `b` adds 2, and so on."""
    node_ids = {device_id: node_id for node_id, device_id in KNOWN.items()}
    return {node_ids[each]: Node(each, adds(1.0 + "abcd".index(each)), takes_s[each]) for each in takes_s}


@dataclass
class QuorumRun:
    """A run and its results.

    Attributes:
        grid: its nodes.
        planner: its coordinator.
        weights: the weights before the first round and after each round.
        ended_s: when the weights of each round were known, in seconds since the run began.
    """

    grid: GridOfNodes
    planner: PlannerStub = field(default_factory=lambda: PlannerStub(nodes=dict(KNOWN), duration_s=600.0))
    weights: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)

    def start(self, quorum: Quorum | None, rounds: int, strategy: Any = None, **options: Any) -> QuorumRun:
        """Run the rounds."""
        began_s = self.grid.clock.now_s()

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            self.weights.append(float(arrays["w"].numpy()[0]))
            self.ended_s.append(self.grid.clock.now_s() - began_s)
            return MetricRecord({"weight": self.weights[-1]})

        wrapped = PowerAware(
            strategy or FedAvg(fraction_evaluate=0.0), self.planner, quorum=quorum, clock=self.grid.clock, **options
        )
        wrapped.start(self.grid, ZERO, num_rounds=rounds, timeout=3600, evaluate_fn=evaluate)
        return self

    @property
    def planned(self) -> list[str]:
        """The devices that were available to each plan."""
        return ["".join(KNOWN[node_id] for node_id in each.node_ids) for each in self.planner.asked("PlanRound")]

    @property
    def late(self) -> list[str]:
        """The devices that were reported as late, by round."""
        return ["".join(sorted(each for each in told if told[each].late)) for told in self.planner.results()]

    @property
    def failed(self) -> list[str]:
        """The devices that were reported as failed, by round."""
        return ["".join(sorted(each for each in told if told[each].failure)) for told in self.planner.results()]


def quorum_run(quorum: Quorum | None, rounds: int, strategy: Any = None, **takes_s: float) -> QuorumRun:
    """Run some rounds over nodes that take the given seconds."""
    return QuorumRun(GridOfNodes(nodes_of(**takes_s))).start(quorum, rounds, strategy)
