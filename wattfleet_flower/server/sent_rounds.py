"""Rounds whose messages were sent to nodes, with a plan from the coordinator or without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord

from wattfleet_proto.v1 import planning_pb2


@dataclass
class PlannedRound:
    """A plan and the messages sent for it.

    Attributes:
        plan: the coordinator's plan.
        number: the round's number, from 1.
        began_s: when the round began, seconds of the clock.
        timeout_s: how long to wait for its replies; None for no limit.
        sent: each message's metadata, and the device it is sent to.
        late: the devices that still trained when the round ended without waiting for them.
        bases: the arrays that each node's training starts from, by node; without those nodes whose messages do not hold
            one record of arrays.
        has_epochs: whether the plan has chosen local epochs, and they were sent to the nodes.
    """

    plan: planning_pb2.PlanRoundResponse
    number: int
    began_s: float
    timeout_s: float | None = None
    sent: list[tuple[Any, str]] = field(default_factory=list)
    late: set[str] = field(default_factory=set)
    bases: dict[int, ArrayRecord] = field(default_factory=dict)
    has_epochs: bool = False

    @property
    def node_ids(self) -> list[int]:
        """The selected nodes."""
        return [assignment.node_id for assignment in self.plan.assignments]

    @property
    def epochs(self) -> dict[int, float]:
        """Local epochs by node id, including nodes that a trim stopped; empty if the plan has not chosen them."""
        plan = self.plan.first_planned if self.plan.HasField("first_planned") else self.plan
        return {each.node_id: each.epochs for each in plan.assignments} if self.has_epochs else {}


@dataclass
class UnplannedRound:
    """The messages of a round that trains without a plan, while the coordinator is away.

    Attributes:
        node_ids: the nodes that may train.
        number: the round's number, from 1.
        began_s: when the round began, seconds of the clock.
        timeout_s: how long to wait for its replies; None for no limit.
        sent: each message's metadata, and the id of its node, since the device may be unknown.
        metrics: metrics that the strategy computed before the round was over.
        late: the ids of the nodes that still trained when the round ended without waiting for them.
        bases: see `PlannedRound`.
    """

    node_ids: list[int]
    number: int
    began_s: float
    timeout_s: float | None = None
    sent: list[tuple[Any, str]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    bases: dict[int, ArrayRecord] = field(default_factory=dict)

    @property
    def epochs(self) -> dict[int, float]:
        """Empty: no plan has chosen local epochs."""
        return {}


SentRound = PlannedRound | UnplannedRound
