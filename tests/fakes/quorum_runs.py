"""Runs with a quorum over fake nodes, whose trainings change every weight by a known amount."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import GridOfNodes, Node, PlannerStub
from tests.fakes.power_aware_runs import KNOWN
from wattfleet_flower import PowerAware, Quorum
from wattfleet_proto.assignment import RECORD_KEY

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
