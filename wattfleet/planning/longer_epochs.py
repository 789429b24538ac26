"""Reviews a round in flight after a change of duties has made some devices' epochs longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattfleet.planning.allowance import Allowance
from wattfleet.planning.curves import FrontTable, curves_of
from wattfleet.planning.offers import Offer
from wattfleet.planning.plan import assignment_at
from wattfleet.planning.round_plan import Assignment, RoundPlan
from wattfleet.planning.trimming import TrimmedPlan, extra_w, replanned

_TOLERANCE = 0.05
"""A training that exceeds the round's duration by at most this share stays unchanged: a change costs the app time."""

_MOVED = "moved to another mode because its epochs take longer beside its duty"
_SLOWER = "ends later because its epochs take longer beside its duty"


@dataclass(frozen=True)
class InTraining:
    """A device that trains beside a duty.

    Attributes:
        offer: its offer with the current front, for the batch size that it trains with. The limit is its allocated
            watts.
        elapsed_s: seconds since its training began, 0 before that; None if they are unknown.
    """

    offer: Offer
    elapsed_s: float | None


def review_epochs(plan: RoundPlan, devices: Sequence[InTraining], allowance: Allowance) -> TrimmedPlan | None:
    """Bring devices whose epochs have become longer back within the planned end of their round, where that is possible.

    A device whose mode takes longer than the round gets the mode with the least power that does not, within its
    allocated watts. If there is none, it gets the fastest mode. The progress of its training is ignored, as in a trim.
    A device is left out if it cannot meet the policy's deadline, even if it has progressed as planned until now.

    Args:
        plan: the current plan.
        devices: devices of the plan that train beside a duty.
        allowance: current power of the supplies. All other devices count as drawn elsewhere.

    Returns:
        The plan that replaces it; None if it stays unchanged.
    """
    before = {each.device_id: each for each in plan.assignments}
    first = {each.device_id: each for each in plan.original.assignments}
    kept: dict[str, Assignment] = {}
    reasons: dict[str, str] = {}
    duration_s, ended = plan.duration_s, []
    for device in sorted(devices, key=lambda each: each.offer.device_id):
        device_id = device.offer.device_id
        found = _reviewed(device.offer, before[device_id], plan.duration_s)
        if found is None:
            continue
        assignment, time_s = found
        finish_s = _finish_s(device, first.get(device_id, before[device_id]), time_s)
        if plan.deadline_s is not None and finish_s > plan.deadline_s:
            ended.append(device_id)
            reasons[device_id] = (
                f"left out: its duty leaves too little time: {finish_s:.0f} s of training, the deadline is"
                f" {plan.deadline_s:.0f} s"
            )
            continue
        kept[device_id], duration_s = assignment, max(duration_s, time_s)
        reasons[device_id] = _SLOWER if assignment.mode == before[device_id].mode else _MOVED
    if not reasons:
        return None
    offers = [device.offer for device in devices]
    use = allowance.use(offers, extra_w(offers, {key: each for key, each in before.items() if key not in ended}))
    return replanned(plan, kept, ended, reasons, duration_s, allowance, use)


def _reviewed(offer: Offer, assigned: Assignment, limit_s: float) -> tuple[Assignment, float] | None:
    """The assignment of a device that takes longer than its round, and its seconds; None if it stays unchanged.

    A device without a mode within its watts stays unchanged, too: its agent ends a training that does not keep the duty
    or the watts. A device whose time was not known when the round was planned also stays unchanged.
    """
    if assigned.is_length_assumed:
        return None
    now_s, point = _time_in(offer, assigned)
    if now_s <= limit_s * (1 + _TOLERANCE):
        return None
    curve = curves_of([offer], assigned.epochs)
    if not len(curve.time_s):
        return None
    step = int(curve.steps_within(max(limit_s, float(curve.time_s[0])))[0])
    time_s = float(curve.time_s[step])
    if time_s < now_s:
        # The device keeps its watts: it may need them again once its duty leaves more time.
        return replace(assignment_at(offer, curve, step, assigned.epochs), power_limit_w=assigned.power_limit_w), time_s
    front = offer.front
    slower = replace(
        assigned,
        epoch_s=float(front.epoch_s[point]),
        power_w=float(front.power_w[point]),
        warmup_s=float(front.warmup_s[point]),
        epoch_log_sd=float(front.epoch_log_sd[point]),
        power_log_sd=float(front.power_log_sd[point]),
    )
    return slower, now_s


def _time_in(offer: Offer, assigned: Assignment) -> tuple[float, int]:
    """Seconds of the training in its mode, at the planning quantile, and the index of this mode on the front.

    Infinite if the mode is not on the front, because it no longer keeps the duty or another mode is better.
    """
    table = FrontTable.of([offer])
    time_s = assigned.epochs * table.epoch_s + table.warmup_s
    time_s = np.where((offer.front.modes == np.array(assigned.mode)).all(axis=1), time_s, np.inf)
    point = int(np.argmin(time_s))
    return float(time_s[point]), point


def _finish_s(device: InTraining, first: Assignment, time_s: float) -> float:
    """Seconds of training after which a device finishes; 0 if its progress is unknown, so that it meets any deadline.

    Args:
        device: the device.
        first: its first assignment. Its progress until now is assumed to follow this assignment's prediction.
        time_s: seconds of its whole training at the current speed.
    """
    if device.elapsed_s is None:
        return 0.0
    share_left = max(0.0, 1 - device.elapsed_s / first.training_s(first.epoch_s))
    return device.elapsed_s + share_left * time_s if share_left else 0.0
