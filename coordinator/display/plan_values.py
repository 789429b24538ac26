"""A previewed plan as plain values by name: the totals, and each device's part with the reason of its decision."""

from __future__ import annotations

from coordinator.display.run_words import RunNames
from coordinator.display.view_values import Values
from wattfleet.planning import Assignment, Decision
from wattfleet_proto.convert import plan_from_message
from wattfleet_proto.v1 import operator_pb2


def assumption(plan: Values, runs: RunNames) -> str | None:
    """Which rounds in flight a previewed plan assumes to have ended; None for none."""
    rounds = [runs.round_of(each) for each in plan["assumed_ended"]]
    if not rounds:
        return None
    are = "which are in flight, have" if len(rounds) > 1 else "which is in flight, has"
    return f"assuming that {' and '.join(rounds)}, {are} ended"


def preview_values(answer: operator_pb2.PreviewPlanResponse) -> Values:
    """A previewed round's values: its totals, and each device with its mode and the reason of its decision."""
    found = plan_from_message(answer.plan, answer.epochs)
    parts = {assignment.device_id: assignment for assignment in found.assignments}
    return {
        "run_id": answer.run_id or None,
        "round": answer.round,
        "epochs": answer.epochs,
        "only_devices_with_a_node": not answer.all_devices,
        "duration_s": found.duration_s,
        "deadline_s": found.deadline_s,
        "planned_w": found.planned_w,
        "site_budget_w": found.site_budget_w,
        "supplies": [
            {"supply": use.supply, "budget_w": use.budget_w, "planned_w": use.planned_w} for use in found.supplies
        ],
        "devices": [_decision_values(decision, parts.get(decision.device_id)) for decision in found.decisions],
        "not_looked_at": [{"device_id": each.device_id, "reason": each.reason} for each in answer.not_looked_at],
        "assumed_ended": list(answer.assumed_ended),
    }


def _decision_values(decision: Decision, part: Assignment | None) -> Values:
    return {
        "device_id": decision.device_id,
        "selected": decision.selected,
        "reason": decision.reason,
        "mode": part.mode._asdict() if part else None,
        "batch": part.batch if part else None,
        "epochs": part.epochs if part else None,
        "warmup_s": part.warmup_s if part else None,
        "epoch_s": part.epoch_s if part else None,
        "length_assumed": part.is_length_assumed if part else None,
        "power_w": part.power_w if part else None,
        "power_limit_w": part.power_limit_w if part else None,
    }
