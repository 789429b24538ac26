"""A round in flight when a supply's watts fall: thriftier modes for its devices, or an end to what it cannot carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattfleet.planning.allowance import Allowance
from wattfleet.planning.curves import curves_of
from wattfleet.planning.offers import Offer
from wattfleet.planning.plan import assigned
from wattfleet.planning.round_plan import Decision, RoundPlan
from wattfleet.planning.soonest import soonest


@dataclass(frozen=True)
class TrimmedPlan:
    """A plan that keeps the watts as they are now.

    Attributes:
        plan: the plan in place of the old one; a device that was ended keeps no assignment in it.
        changed: devices whose mode is another now.
        ended: devices that are to stop training.
    """

    plan: RoundPlan
    changed: tuple[str, ...]
    ended: tuple[str, ...]


def trimmed(plan: RoundPlan, offers: Sequence[Offer], allowance: Allowance, epochs: float) -> TrimmedPlan | None:
    """Plan the devices in flight anew, so that as many as can be go on and are done soonest.

    How far each has come is not asked: planned to be done together, they have about the same share left.

    Args:
        plan: the round as it was planned.
        offers: of the plan's devices.
        allowance: watts of the supplies now; other devices count as drawn elsewhere.
        epochs: local epochs of each device.

    Returns:
        None where the old plan keeps the watts.
    """
    offers = sorted(offers, key=lambda offer: offer.device_id)
    old = {assignment.device_id: assignment for assignment in plan.assignments}
    drawn_w = {offer.device_id: old[offer.device_id].power_limit_w - offer.idle_w for offer in offers}
    if all(use.planned_w <= use.budget_w for use in allowance.use(offers, drawn_w)):
        return None
    curves = curves_of(offers, epochs)
    everyone = np.ones(len(offers), dtype=np.bool_)
    allocation = soonest(curves, allowance.headroom(offers), len(offers), everyone, ~everyone)
    step = np.full(len(offers), -1, dtype=np.intp) if allocation is None else allocation.step
    kept = {offers[k].device_id: assigned(offers[k], curves, int(step[k])) for k in np.flatnonzero(step >= 0)}
    extra_w = {
        offer.device_id: kept[offer.device_id].power_limit_w - offer.idle_w
        for offer in offers
        if offer.device_id in kept
    }
    use = allowance.use(offers, extra_w)
    changed = tuple(device_id for device_id in kept if kept[device_id].mode != old[device_id].mode)
    ended = tuple(offer.device_id for offer in offers if offer.device_id not in kept)
    return TrimmedPlan(
        plan=replace(
            plan,
            assignments=tuple(kept.values()),
            decisions=tuple(_said(decision, changed, ended) for decision in plan.decisions),
            duration_s=plan.duration_s if allocation is None else allocation.limit_s,
            planned_w=allowance.at_sites_w(use),
            site_budget_w=allowance.site_budget_w,
            supplies=use,
        ),
        changed=changed,
        ended=ended,
    )


def _said(decision: Decision, changed: Sequence[str], ended: Sequence[str]) -> Decision:
    if decision.device_id in ended:
        return replace(decision, reason=f"{decision.reason}; ended early, as the watts fell")
    if decision.device_id in changed:
        return replace(decision, reason=f"{decision.reason}; in another mode since the watts fell")
    return decision
