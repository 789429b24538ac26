"""Round plans as messages."""

from __future__ import annotations

from wattfleet.planning import Assignment, Decision, RoundPlan, SupplyUse
from wattfleet_proto.convert.modes import mode_from_message, mode_to_message
from wattfleet_proto.v1 import planning_pb2


def assignment_to_message(assignment: Assignment, node_id: int) -> planning_pb2.Assignment:
    """Convert a device's assignment into its message.

    Args:
        assignment: the assignment.
        node_id: Flower's id of the device's node.
    """
    return planning_pb2.Assignment(
        node_id=node_id,
        device_id=assignment.device_id,
        mode=mode_to_message(assignment.mode),
        epoch_s=assignment.epoch_s,
        power_w=assignment.power_w,
        power_limit_w=assignment.power_limit_w,
        warmup_s=assignment.warmup_s,
        epoch_log_sd=assignment.epoch_log_sd,
        power_log_sd=assignment.power_log_sd,
        batch=assignment.batch or 0,
        profiled_modes=assignment.profiled_modes,
        length_assumed=assignment.is_length_assumed,
        epochs=assignment.epochs,
    )


def assignment_from_message(message: planning_pb2.Assignment, epochs: float) -> Assignment:
    """Read a device's assignment from its message.

    Args:
        message: the assignment.
        epochs: local epochs of the round, which an assignment before protocol 2.4 does not state.
    """
    return Assignment(
        device_id=message.device_id,
        mode=mode_from_message(message.mode),
        epoch_s=message.epoch_s,
        power_w=message.power_w,
        power_limit_w=message.power_limit_w,
        warmup_s=message.warmup_s,
        epoch_log_sd=message.epoch_log_sd,
        power_log_sd=message.power_log_sd,
        epochs=message.epochs or epochs,
        batch=message.batch or None,
        profiled_modes=message.profiled_modes,
        is_length_assumed=message.length_assumed,
    )


def plan_to_message(plan_id: str, plan: RoundPlan, nodes: dict[str, int]) -> planning_pb2.PlanRoundResponse:
    """Convert a round plan into its message.

    Args:
        plan_id: its identifier.
        plan: the plan.
        nodes: Flower's node id of each chosen device.
    """
    return planning_pb2.PlanRoundResponse(
        plan_id=plan_id,
        assignments=[assignment_to_message(assignment, nodes[assignment.device_id]) for assignment in plan.assignments],
        decisions=[
            planning_pb2.Decision(device_id=d.device_id, selected=d.selected, reason=d.reason) for d in plan.decisions
        ],
        duration_s=plan.duration_s,
        planned_w=plan.planned_w,
        site_budget_w=plan.site_budget_w,
        deadline_s=plan.deadline_s or 0.0,
        supplies=[
            planning_pb2.SupplyUse(supply=use.supply, budget_w=use.budget_w, planned_w=use.planned_w)
            for use in plan.supplies
        ],
        first_planned=None if plan.first_planned is None else plan_to_message("", plan.first_planned, nodes),
        enough_replies=plan.enough_replies or 0,
    )


def plan_from_message(message: planning_pb2.PlanRoundResponse, epochs: float) -> RoundPlan:
    """Read a round plan from its message.

    Args:
        message: the plan.
        epochs: local epochs of the round, which plans before protocol 2.4 do not state.
    """
    return RoundPlan(
        assignments=tuple(assignment_from_message(each, epochs) for each in message.assignments),
        decisions=tuple(Decision(d.device_id, d.selected, d.reason) for d in message.decisions),
        duration_s=message.duration_s,
        planned_w=message.planned_w,
        site_budget_w=message.site_budget_w,
        deadline_s=message.deadline_s or None,
        supplies=tuple(SupplyUse(use.supply, use.budget_w, use.planned_w) for use in message.supplies),
        first_planned=plan_from_message(message.first_planned, epochs) if message.HasField("first_planned") else None,
        enough_replies=message.enough_replies or None,
    )
