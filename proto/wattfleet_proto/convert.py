"""Conversions between messages and the core's types: the one place where the two meet."""

from __future__ import annotations

import numpy as np

from wattfleet.choosing import MAX_FRONT_POINTS, Front
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, modes_to_array
from wattfleet.planning import Assignment, Decision, RoundPlan, SupplyUse
from wattfleet_proto.v1 import planning_pb2, power_pb2

_TOO_HIGH = 10**12
"""1 THz, hundreds of times what any board_named's clock runs at."""


def mode_to_message(mode: PowerMode) -> power_pb2.PowerMode:
    """A power mode as it travels."""
    return power_pb2.PowerMode(cores=mode.cores, cpu_khz=mode.cpu_khz, gpu_hz=mode.gpu_hz, mem_hz=mode.mem_hz)


def mode_from_message(message: power_pb2.PowerMode) -> PowerMode:
    """The power mode that a message holds.

    Raises:
        InvalidInputError: a knob is unset, or above all that a board has.
    """
    mode = PowerMode(message.cores, message.cpu_khz, message.gpu_hz, message.mem_hz)
    if min(mode) <= 0:
        raise InvalidInputError(f"a power mode needs all four knobs, got {tuple(mode)}")
    # Fronts hold knobs as doubles: what is beyond their whole numbers could not be written into a message again.
    if max(mode) >= _TOO_HIGH:
        raise InvalidInputError(f"a power mode's clocks run at less than 1 THz, got {tuple(mode)}")
    return mode


_EVIDENCE = {
    power_pb2.PROVENANCE_SIMULATED: "simulated",
    power_pb2.PROVENANCE_REPLAYED: "replayed",
    power_pb2.PROVENANCE_HARDWARE: "hardware",
}
_EVIDENCE_MESSAGE = {word: message for message, word in _EVIDENCE.items()}


def provenance_to_message(provenance: str) -> power_pb2.Provenance.ValueType:
    """What figures rest on, as it travels."""
    return _EVIDENCE_MESSAGE[provenance]


def provenance_from_message(message: power_pb2.Provenance.ValueType) -> str:
    """What figures rest on.

    Raises:
        InvalidInputError: it is unset.
    """
    if message not in _EVIDENCE:
        raise InvalidInputError("a device has to say what its figures rest on: simulated, replayed or hardware")
    return _EVIDENCE[message]


def front_to_message(front: Front) -> power_pb2.Front:
    """A front as it travels."""
    return power_pb2.Front(
        points=[
            power_pb2.FrontPoint(
                mode=mode_to_message(front.mode(k)),
                epoch_s=front.epoch_s[k],
                power_w=front.power_w[k],
                epoch_log_sd=front.epoch_log_sd[k],
                power_log_sd=front.power_log_sd[k],
                warmup_s=front.warmup_s[k],
            )
            for k in range(len(front))
        ]
    )


def front_from_message(message: power_pb2.Front) -> Front:
    """The front that a message holds.

    Raises:
        InvalidInputError: it is no front (see `Front`).
    """
    if len(message.points) > MAX_FRONT_POINTS:  # before anything is built from them
        raise InvalidInputError(f"a front holds 1 to {MAX_FRONT_POINTS} points, not {len(message.points)}")
    columns = np.array(
        [[p.epoch_s, p.power_w, p.epoch_log_sd, p.power_log_sd, p.warmup_s] for p in message.points], dtype=np.float64
    ).reshape(-1, 5)
    return Front(modes_to_array(mode_from_message(p.mode) for p in message.points), *columns.T)


def plan_to_message(plan_id: str, plan: RoundPlan, nodes: dict[str, int]) -> planning_pb2.PlanRoundResponse:
    """A round plan as it travels.

    Args:
        plan_id: its id.
        plan: the plan.
        nodes: Flower's node id of every chosen device.
    """
    return planning_pb2.PlanRoundResponse(
        plan_id=plan_id,
        assignments=[
            planning_pb2.Assignment(
                node_id=nodes[assignment.device_id],
                device_id=assignment.device_id,
                mode=mode_to_message(assignment.mode),
                epoch_s=assignment.epoch_s,
                power_w=assignment.power_w,
                power_limit_w=assignment.power_limit_w,
                warmup_s=assignment.warmup_s,
            )
            for assignment in plan.assignments
        ],
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
    )


def plan_from_message(message: planning_pb2.PlanRoundResponse) -> RoundPlan:
    """The round plan that a message holds."""
    return RoundPlan(
        assignments=tuple(
            Assignment(a.device_id, mode_from_message(a.mode), a.epoch_s, a.power_w, a.power_limit_w, a.warmup_s)
            for a in message.assignments
        ),
        decisions=tuple(Decision(d.device_id, d.selected, d.reason) for d in message.decisions),
        duration_s=message.duration_s,
        planned_w=message.planned_w,
        site_budget_w=message.site_budget_w,
        deadline_s=message.deadline_s or None,
        supplies=tuple(SupplyUse(use.supply, use.budget_w, use.planned_w) for use in message.supplies),
        first_planned=plan_from_message(message.first_planned) if message.HasField("first_planned") else None,
    )
