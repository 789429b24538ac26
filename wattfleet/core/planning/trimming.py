"""Trims rounds in flight when a supply's budget falls: devices get modes with less power, or are stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattfleet.core.planning.curves import FrontTable, Offer, curves_of, min_makespan
from wattfleet.core.planning.plan import assignment_at, wanted_if_fewer
from wattfleet.core.planning.round_plan import Allowance, Assignment, Decision, RoundPlan, SupplyUse

_MOVED = "moved to another mode because the budget fell"
_STOPPED = "stopped early because the budget fell"


@dataclass(frozen=True)
class InFlight:
    """A round in flight.

    Attributes:
        plan: the current plan, trimmed before or not.
        offers: offers of its devices that can be reassigned, one or more. The other devices keep their assignments:
            they have finished, or their power counts as drawn elsewhere.
    """

    plan: RoundPlan
    offers: Sequence[Offer]


@dataclass(frozen=True)
class TrimmedPlan:
    """A plan that replaces that of a round in flight.

    Attributes:
        plan: the plan that replaces the old one. Stopped devices have no assignment in it.
        changed: ids of devices with a new assignment.
        ended: ids of devices that must stop training.
    """

    plan: RoundPlan
    changed: tuple[str, ...]
    ended: tuple[str, ...]


def trim_rounds(rounds: Sequence[InFlight], allowance: Allowance) -> list[TrimmedPlan | None]:
    """Replan the devices in flight, so that as many as possible continue, with the least makespan.

    The progress of each device is ignored: devices that were planned to finish together have about the same share
    left. A round stays unchanged if no supply of its devices exceeds its budget.

    Args:
        rounds: the rounds in flight. A device can be reassigned in one of them only.
        allowance: current power of the supplies. All other devices count as drawn elsewhere.

    Returns:
        For each round, the trimmed plan; None if it stays unchanged.
    """
    offers = [offer for each in rounds for offer in each.offers]
    exceeded = allowance.exceeded(allowance.use(offers, extra_w(offers, _assignments(rounds))))
    is_affected = [
        any(exceeded.intersection(allowance.supplies.path(offer.supply)) for offer in each.offers) for each in rounds
    ]
    if not any(is_affected):
        return [None] * len(rounds)
    affected = [each for each, is_ in zip(rounds, is_affected, strict=True) if is_]
    others = [each for each, is_ in zip(rounds, is_affected, strict=True) if not is_]
    replanned = _Replanned.of(affected, _with_drawn(others, allowance))
    return [replanned.plan_of(each) if is_ else None for each, is_ in zip(rounds, is_affected, strict=True)]


@dataclass(frozen=True)
class _Replanned:
    """The new assignments of the devices of several rounds.

    Attributes:
        allowance: the power that was planned with.
        assignments: assignments of the continuing devices, by id.
        time_s: seconds of each continuing device's training, at the planning quantile.
        use: allocated power of every supply.
    """

    allowance: Allowance
    assignments: Mapping[str, Assignment]
    time_s: Mapping[str, float]
    use: tuple[SupplyUse, ...]

    @classmethod
    def of(cls, rounds: Sequence[InFlight], allowance: Allowance) -> _Replanned:
        """Replan the devices of some rounds."""
        epochs = {device_id: each.epochs for device_id, each in _assignments(rounds).items()}
        offers = sorted((offer for each in rounds for offer in each.offers), key=lambda offer: offer.device_id)
        curves = curves_of(offers, np.array([epochs[offer.device_id] for offer in offers]))
        all_devices = np.ones(len(offers), dtype=np.bool_)
        allocation = min_makespan(curves, allowance.headroom(offers), len(offers), all_devices, ~all_devices)
        step = np.full(len(offers), -1, dtype=np.intp) if allocation is None else allocation.step
        continuing = {offers[k].device_id: (offers[k], int(step[k])) for k in np.flatnonzero(step >= 0)}
        assignments = {
            device_id: assignment_at(offer, curves, step, epochs[device_id])
            for device_id, (offer, step) in continuing.items()
        }
        return cls(
            allowance=allowance,
            assignments=assignments,
            time_s={device_id: float(curves.time_s[step]) for device_id, (_, step) in continuing.items()},
            use=allowance.use(offers, extra_w(offers, assignments)),
        )

    def plan_of(self, round_: InFlight) -> TrimmedPlan | None:
        """The trimmed plan of a round; None if it stays unchanged."""
        before = {assignment.device_id: assignment for assignment in round_.plan.assignments}
        own = sorted(offer.device_id for offer in round_.offers)
        kept = {device_id: self.assignments[device_id] for device_id in own if device_id in self.assignments}
        changed = tuple(device_id for device_id in kept if kept[device_id] != before[device_id])
        ended = tuple(device_id for device_id in own if device_id not in kept)
        if not changed and not ended:
            return None
        reasons = dict.fromkeys(changed, _MOVED) | dict.fromkeys(ended, _STOPPED)
        duration_s = max((self.time_s[device_id] for device_id in kept), default=round_.plan.duration_s)
        moved = {device_id: kept[device_id] for device_id in changed}
        return replanned(round_.plan, moved, ended, reasons, duration_s, self.allowance, self.use)


def replanned(
    plan: RoundPlan,
    changed: Mapping[str, Assignment],
    ended: Sequence[str],
    reasons: Mapping[str, str],
    duration_s: float,
    allowance: Allowance,
    use: tuple[SupplyUse, ...],
) -> TrimmedPlan:
    """Replace the assignments of some devices in a plan in flight, and remove those of others.

    Args:
        plan: the current plan.
        changed: new assignments, by device id.
        ended: ids of devices that must stop training.
        reasons: text that is appended to the reasons of these devices, by id.
        duration_s: the new makespan.
        allowance: current power of the supplies.
        use: allocated power of every supply.
    """
    assignments = {**{each.device_id: each for each in plan.assignments}, **changed}
    after = {device_id: each for device_id, each in assignments.items() if device_id not in ended}
    return TrimmedPlan(
        plan=replace(
            plan,
            assignments=tuple(after[device_id] for device_id in sorted(after)),
            decisions=tuple(_updated(decision, reasons) for decision in plan.decisions),
            duration_s=duration_s,
            planned_w=allowance.at_sites_w(use),
            site_budget_w=allowance.site_budget_w,
            supplies=use,
            first_planned=replace(plan.original, decisions=()),
            enough_replies=wanted_if_fewer(len(after), plan.enough_replies),
        ),
        changed=tuple(changed),
        ended=tuple(ended),
    )


def _assignments(rounds: Sequence[InFlight]) -> dict[str, Assignment]:
    """The assignments of the devices that can be reassigned, by id."""
    found = {}
    for each in rounds:
        own = {offer.device_id for offer in each.offers}
        found.update({assigned.device_id: assigned for assigned in each.plan.assignments if assigned.device_id in own})
    return found


def extra_w(offers: Sequence[Offer], assignments: Mapping[str, Assignment]) -> dict[str, float]:
    """Watts above idle, by device id; 0 for a device whose idle power has risen above its limit."""
    return {
        offer.device_id: max(0.0, assignments[offer.device_id].power_limit_w - offer.idle_w)
        for offer in offers
        if offer.device_id in assignments
    }


def _with_drawn(rounds: Sequence[InFlight], allowance: Allowance) -> Allowance:
    """An allowance in which the power of unaffected rounds counts as drawn elsewhere."""
    elsewhere_w = dict(allowance.elsewhere_w)
    assignments = _assignments(rounds)
    for offer in (offer for each in rounds for offer in each.offers):
        elsewhere_w[offer.supply] = elsewhere_w.get(offer.supply, 0.0) + assignments[offer.device_id].power_limit_w
    return replace(allowance, elsewhere_w=elsewhere_w)


def _updated(decision: Decision, reasons: Mapping[str, str]) -> Decision:
    added = reasons.get(decision.device_id)
    if added is None or decision.reason.endswith(added):
        return decision
    return replace(decision, reason=f"{decision.reason}; {added}")


# --- Longer epochs ----------------------------------------------------------------------------------------------------
# Reviews a round in flight after a change of duties has made some devices' epochs longer.

_TOLERANCE = 0.05
"""A training that exceeds the round's duration by at most this share stays unchanged: a change costs the app time."""

_MOVED_BESIDE_DUTY = "moved to another mode because its epochs take longer beside its duty"
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
        reasons[device_id] = _SLOWER if assignment.mode == before[device_id].mode else _MOVED_BESIDE_DUTY
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
