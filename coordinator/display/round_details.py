"""One round in full: each device with its mode, the reason for its selection, and its outcome."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.display.view_values import Values, known, round_values
from wattfleet.planning import Assignment, RoundPlan
from wattfleet_proto.convert import plan_from_message
from wattfleet_proto.v1 import planning_pb2, view_pb2


@dataclass(frozen=True)
class RoundPart:
    """One device's part in a round.

    Attributes:
        first: its assignment as first planned.
        now: the assignment in force; None if a trim has stopped the device.
        node_id: its Flower node.
        reason: why it was selected.
        seen: the observation of its training; None if there is none.
        result: the app's report about it; None until the round is over, and for a device that was sent nothing.
    """

    first: Assignment
    now: Assignment | None
    node_id: int
    reason: str
    seen: view_pb2.DeviceObservation | None
    result: planning_pb2.DeviceResult | None

    @property
    def last(self) -> Assignment:
        """The assignment in force, or the one before the device was stopped."""
        return self.now or self.first

    @property
    def became(self) -> str | None:
        """How a trim changed the assignment: "stopped" or "other mode"; None if it did not."""
        if self.now is None:
            return "stopped"
        return "other mode" if self.now.mode != self.first.mode else None


def round_parts(view: view_pb2.RoundView, plan: RoundPlan) -> list[RoundPart]:
    """The selected devices of a round, as first planned.

    Args:
        view: the round.
        plan: its plan.
    """
    message = view.plan.first_planned if view.plan.HasField("first_planned") else view.plan
    nodes = {each.device_id: each.node_id for each in message.assignments}
    now = {each.device_id: each for each in plan.assignments}
    reasons = {each.device_id: each.reason for each in plan.decisions}
    seen = {each.device_id: each for each in view.observations}
    results = {each.device_id: each for each in view.results}
    return [
        RoundPart(
            first,
            now.get(first.device_id),
            nodes[first.device_id],
            reasons.get(first.device_id, ""),
            seen.get(first.device_id),
            results.get(first.device_id),
        )
        for first in plan.original.assignments
    ]


def round_details(view: view_pb2.RoundView) -> Values:
    """A round's totals with its devices.

    Returns:
        As `round_values`, and `selected`: a dictionary for each device that was to train, with the plan in force, and
        in `first` what was planned before, if it differs; `not_selected`: the id and the reason of each other device;
        `supplies`: watts of each supply.
    """
    plan = plan_from_message(view.plan, view.epochs)
    is_over = view.HasField("wall_s")
    without_plan = view.results if view.unplanned else ()
    return {
        "run_id": view.run_id,
        **round_values(view),
        "selected": [
            *(_selected(part, is_over) for part in round_parts(view, plan)),
            *(
                {"device_id": each.device_id, "reason": "trained without a plan", **_outcome(each, is_over)}
                for each in without_plan
            ),
        ],
        "not_selected": [
            {"device_id": each.device_id, "reason": each.reason} for each in plan.decisions if not each.selected
        ],
        "supplies": [
            {"supply": each.supply, "budget_w": each.budget_w, "planned_w": each.planned_w} for each in plan.supplies
        ],
    }


def slowest_first(selected: Iterable[Values]) -> list[Values]:
    """The selected devices of `round_details`, those that delay the round most first."""
    return sorted(selected, key=lambda each: -max(each["predicted_s"], each["observed_s"] or 0.0))


def _selected(part: RoundPart, is_over: bool) -> Values:
    planned, first = _planned(part.last), _planned(part.first)
    outcome = _outcome(part.result, is_over)
    if part.result is None and part.now is None:
        outcome["outcome"] = "stopped"
    return {
        "device_id": part.first.device_id,
        "node_id": part.node_id,
        "reason": part.reason,
        **planned,
        "became": part.became,
        "first": first if first != planned else None,
        **_observed(part),
        **outcome,
    }


def _planned(part: Assignment) -> Values:
    return {
        "mode": part.mode._asdict(),
        "batch": part.batch,
        "epochs": part.epochs,
        "planned_w": part.power_limit_w,
        "predicted_w": part.power_w,
        "predicted_s": part.training_s(part.epoch_s),
        "length_assumed": part.is_length_assumed,
    }


def _observed(part: RoundPart) -> Values:
    """The observed values of a training; as everywhere, its warm-up counts as predicted."""
    if part.seen is None:
        return {"observed_w": None, "observed_s": None, "training_j": None}
    seconds, watts = part.last.training_s(part.seen.epoch_s), part.seen.power_w
    return {"observed_w": watts, "observed_s": seconds, "training_j": watts * seconds}


def _outcome(result: planning_pb2.DeviceResult | None, is_over: bool) -> Values:
    """How a training ended: `outcome` as one word, and the reason of a failure."""
    if result is None:
        return {"outcome": "not sent" if is_over else "running", "failure": None, "share": None, "loss": None}
    word = "failed" if result.failure else "late" if result.late else "trained" if result.share >= 1 else "in part"
    return {
        "outcome": word,
        "failure": result.failure or None,
        "share": result.share,
        "loss": known(result, "loss"),
    }
