"""One round in full, as plain values: who trained, in which mode and why, and how it ended for each device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator.display.view_values import Values, known, round_values

if TYPE_CHECKING:
    from wattfleet_proto.v1 import planning_pb2, view_pb2


def round_details(view: view_pb2.RoundView) -> Values:
    """A round's totals with its devices.

    Returns:
        As `round_values`, and `selected`: a dictionary for each device that was to train; `not_selected`: the id and
        the reason of each other device; `supplies`: watts of each supply.
    """
    first = view.plan.first_planned if view.plan.HasField("first_planned") else view.plan
    now = {each.device_id: each for each in view.plan.assignments}
    reasons = {each.device_id: each.reason for each in view.plan.decisions}
    seen = {each.device_id: each for each in view.observations}
    results = {each.device_id: each for each in view.results}
    is_over = view.HasField("wall_s")
    return {
        "run_id": view.run_id,
        **round_values(view),
        "selected": [
            {
                "device_id": part.device_id,
                "reason": reasons.get(part.device_id, ""),
                **_planned(part),
                "became": _became(part, now.get(part.device_id)),
                **_observed(part, seen.get(part.device_id)),
                **_outcome(results.get(part.device_id), is_over, part.device_id in now),
            }
            for part in first.assignments
        ]
        + [
            {"device_id": each.device_id, "reason": "trained without a plan", **_outcome(each, is_over, True)}
            for each in view.results
            if view.unplanned
        ],
        "not_selected": [
            {"device_id": each.device_id, "reason": each.reason} for each in view.plan.decisions if not each.selected
        ],
        "supplies": [
            {"supply": each.supply, "budget_w": each.budget_w, "planned_w": each.planned_w}
            for each in view.plan.supplies
        ],
    }


def _planned(part: planning_pb2.Assignment) -> Values:
    mode = part.mode
    return {
        "node_id": part.node_id,
        "mode": {"cores": mode.cores, "cpu_khz": mode.cpu_khz, "gpu_hz": mode.gpu_hz, "mem_hz": mode.mem_hz},
        "batch": part.batch or None,
        "epochs": part.epochs or None,
        "planned_w": part.power_limit_w,
        "predicted_w": part.power_w,
        "predicted_s": part.warmup_s + (part.epochs or 1.0) * part.epoch_s,
    }


def _became(first: planning_pb2.Assignment, now: planning_pb2.Assignment | None) -> str | None:
    """What a trim made of an assignment; None if nothing."""
    if now is None:
        return "stopped"
    return "other mode" if now.mode != first.mode else None


def _observed(part: planning_pb2.Assignment, seen: view_pb2.DeviceObservation | None) -> Values:
    """What was observed of a training; as everywhere, its warm-up counts as predicted."""
    if seen is None:
        return {"observed_w": None, "observed_s": None, "training_j": None}
    seconds = part.warmup_s + (part.epochs or 1.0) * seen.epoch_s
    return {"observed_w": seen.power_w, "observed_s": seconds, "training_j": seen.power_w * seconds}


def _outcome(result: planning_pb2.DeviceResult | None, is_over: bool, is_assigned: bool) -> dict[str, Any]:
    """How a training ended: `outcome` in a word, and why it failed."""
    if result is None:
        word = "stopped" if not is_assigned else "not sent" if is_over else "running"
        return {"outcome": word, "failure": None, "share": None, "loss": None}
    word = "failed" if result.failure else "late" if result.late else "trained" if result.share >= 1 else "in part"
    return {
        "outcome": word,
        "failure": result.failure or None,
        "share": result.share,
        "loss": known(result, "loss"),
    }
