"""Trims rounds in flight when a supply's budget falls: devices get modes with less power, or are stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattfleet.planning.allowance import Allowance
from wattfleet.planning.curves import curves_of
from wattfleet.planning.makespan import min_makespan
from wattfleet.planning.offers import Offer
from wattfleet.planning.over_selection import wanted_if_fewer
from wattfleet.planning.plan import assignment_at
from wattfleet.planning.round_plan import Assignment, Decision, RoundPlan, SupplyUse

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
