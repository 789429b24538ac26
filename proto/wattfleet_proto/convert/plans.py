"""Round plans as messages."""

from __future__ import annotations

import numpy as np

from wattfleet.core.choosing import MAX_FRONT_POINTS, Front
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import modes_to_array
from wattfleet.core.planning import Assignment, Decision, EpochChoice, EpochOption, RoundPlan, SupplyUse
from wattfleet_proto.convert.workloads import mode_from_message, mode_to_message
from wattfleet_proto.v1 import planning_pb2, power_pb2

# --- Epoch choices ----------------------------------------------------------------------------------------------------
# The local epochs that a plan may choose, as messages.


def epoch_choice_to_message(choice: EpochChoice) -> planning_pb2.EpochChoice:
    """Convert a choice of local epochs into its message."""
    return planning_pb2.EpochChoice(
        options=[
            planning_pb2.EpochOption(
                epochs=int(option.epochs), progress=option.progress, half_devices=option.half_devices or 0.0
            )
            for option in choice.options
        ],
        per_device=choice.is_per_device,
    )


def epochs_of_request(request: planning_pb2.PlanRoundRequest) -> float | EpochChoice:
    """The local epochs of the requested round, or those that its plan may choose.

    Raises:
        InvalidInputError: the choice is not valid.
    """
    if not request.HasField("epoch_choice"):
        return request.epochs
    return EpochChoice(
        [EpochOption(each.epochs, each.progress, each.half_devices or None) for each in request.epoch_choice.options],
        request.epoch_choice.per_device,
    )


# --- Fronts -----------------------------------------------------------------------------------------------------------
# Fronts as messages.


def front_to_message(front: Front) -> power_pb2.Front:
    """Convert a front into its message."""
    return power_pb2.Front(
        points=[
            power_pb2.FrontPoint(
                mode=mode_to_message(front.mode(k)),
                epoch_s=front.epoch_s[k],
                power_w=front.power_w[k],
                epoch_log_sd=front.epoch_log_sd[k],
                power_log_sd=front.power_log_sd[k],
                warmup_s=front.warmup_s[k],
                batch=0 if front.batch is None else int(front.batch[k]),
            )
            for k in range(len(front))
        ]
    )


def front_from_message(message: power_pb2.Front) -> Front:
    """Read a front from its message.

    Raises:
        InvalidInputError: it is not a valid front (see `Front`).
    """
    if len(message.points) > MAX_FRONT_POINTS:  # checked before the arrays are built
        raise InvalidInputError(f"a front holds 1 to {MAX_FRONT_POINTS} points, not {len(message.points)}")
    columns = np.array(
        [[p.epoch_s, p.power_w, p.epoch_log_sd, p.power_log_sd, p.warmup_s] for p in message.points], dtype=np.float64
    ).reshape(-1, 5)
    batch = np.array([point.batch for point in message.points], dtype=np.int64)
    modes = modes_to_array(mode_from_message(p.mode) for p in message.points)
    epoch_s, power_w, epoch_log_sd, power_log_sd, warmup_s = columns.T
    return Front(modes, epoch_s, power_w, epoch_log_sd, power_log_sd, warmup_s, batch if batch.any() else None)


# --- Plans ------------------------------------------------------------------------------------------------------------


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
        idle_w=assignment.idle_w,
        longest_s=assignment.longest_s,
    )


def assignment_from_message(message: planning_pb2.Assignment) -> Assignment:
    """Read a device's assignment from its message."""
    return Assignment(
        device_id=message.device_id,
        mode=mode_from_message(message.mode),
        epoch_s=message.epoch_s,
        power_w=message.power_w,
        power_limit_w=message.power_limit_w,
        warmup_s=message.warmup_s,
        epoch_log_sd=message.epoch_log_sd,
        power_log_sd=message.power_log_sd,
        epochs=message.epochs,
        batch=message.batch or None,
        profiled_modes=message.profiled_modes,
        is_length_assumed=message.length_assumed,
        idle_w=message.idle_w,
        longest_s=message.longest_s if message.HasField("longest_s") else None,
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


def plan_from_message(message: planning_pb2.PlanRoundResponse) -> RoundPlan:
    """Read a round plan from its message."""
    return RoundPlan(
        assignments=tuple(map(assignment_from_message, message.assignments)),
        decisions=tuple(Decision(d.device_id, d.selected, d.reason) for d in message.decisions),
        duration_s=message.duration_s,
        planned_w=message.planned_w,
        site_budget_w=message.site_budget_w,
        deadline_s=message.deadline_s or None,
        supplies=tuple(SupplyUse(use.supply, use.budget_w, use.planned_w) for use in message.supplies),
        first_planned=plan_from_message(message.first_planned) if message.HasField("first_planned") else None,
        enough_replies=message.enough_replies or None,
    )
