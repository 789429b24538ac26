"""Rounds that are sent to nodes: with the coordinator's plan, or without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    """

    plan: planning_pb2.PlanRoundResponse
    number: int
    began_s: float
    timeout_s: float | None = None
    sent: list[tuple[Any, str]] = field(default_factory=list)

    @property
    def node_ids(self) -> list[int]:
        """The selected nodes."""
        return [assignment.node_id for assignment in self.plan.assignments]


@dataclass
class UnplannedRound:
    """The messages of a round that trains without a plan, while the coordinator is away.

    Attributes:
        node_ids: the nodes that may train.
        number: the round's number, from 1.
        began_s: when the round began, seconds of the clock.
        timeout_s: how long to wait for its replies; None for no limit.
        sent: each message's metadata, and the id of its node, since the device may be unknown.
        metrics: what the strategy evaluated before the round was over.
    """

    node_ids: list[int]
    number: int
    began_s: float
    timeout_s: float | None = None
    sent: list[tuple[Any, str]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


SentRound = PlannedRound | UnplannedRound
