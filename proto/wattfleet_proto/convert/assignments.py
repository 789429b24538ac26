"""Assignments as messages: out of a round's plan, and onto the agent's local socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wattfleet_proto.assignment import RoundAssignment
from wattfleet_proto.v1 import local_pb2

if TYPE_CHECKING:  # a ClientApp reads no plans
    from wattfleet_proto.v1 import planning_pb2


def assignments_from_plan(plan: planning_pb2.PlanRoundResponse) -> dict[int, RoundAssignment]:
    """Read each chosen node's assignment from a plan's message.

    Args:
        plan: the plan of a round.

    Returns:
        The assignments by Flower's node id.

    Raises:
        InvalidInputError: the deadline is invalid.
    """
    return {
        each.node_id: RoundAssignment(
            plan_id=plan.plan_id,
            device_id=each.device_id,
            epochs=each.epochs,
            deadline_s=None if each.length_assumed else plan.deadline_s or None,
        )
        for each in plan.assignments
    }


def assignment_to_start(assignment: RoundAssignment) -> local_pb2.StartTraining:
    """Convert an assignment into the message that starts its training; the ClientApp itself keeps the deadline."""
    return local_pb2.StartTraining(
        plan_id=assignment.plan_id,
        device_id=assignment.device_id,
        epochs=assignment.epochs,
    )


def assignment_from_start(message: local_pb2.StartTraining) -> RoundAssignment:
    """Read an assignment from the message that starts its training."""
    return RoundAssignment(
        plan_id=message.plan_id,
        device_id=message.device_id,
        epochs=message.epochs,
    )
