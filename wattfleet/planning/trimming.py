"""Rounds in flight when a supply's watts fall: thriftier modes for devices, or an end to what cannot be carried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattfleet.planning.allowance import Allowance
from wattfleet.planning.curves import curves_of
from wattfleet.planning.makespan import min_makespan
from wattfleet.planning.offers import Offer
from wattfleet.planning.plan import assigned
from wattfleet.planning.round_plan import Assignment, Decision, RoundPlan, SupplyUse


@dataclass(frozen=True)
class InFlight:
    """A round that is not over.

    Attributes:
        plan: as it was planned, or trimmed before.
        epochs: local epochs of each device.
        offers: of those of its devices that can be told to go on otherwise, one or more. The others keep what they
            have: those that are done, and those that are counted as drawn elsewhere.
    """

    plan: RoundPlan
    epochs: float
    offers: Sequence[Offer]


@dataclass(frozen=True)
class TrimmedPlan:
    """A plan that keeps the watts as they are now.

    Attributes:
        plan: the plan in place of the old one; a device that was ended keeps no assignment in it.
        changed: devices whose assignment is another now.
        ended: devices that are to stop training.
    """

    plan: RoundPlan
    changed: tuple[str, ...]
    ended: tuple[str, ...]


def trim_rounds(rounds: Sequence[InFlight], allowance: Allowance) -> list[TrimmedPlan | None]:
    """Plan the devices in flight anew, so that as many as can be go on and are done soonest.

    How far each has come is not asked: planned to be done together, they have about the same share left. A round of
    which no device hangs behind a supply with too few watts stays as it is.

    Args:
        rounds: in flight; no device can be told to go on otherwise in two of them.
        allowance: watts of the supplies now; all other devices count as drawn elsewhere.

    Returns:
        For each round, what takes the place of its plan; None where it stays.
    """
    offers = [offer for each in rounds for offer in each.offers]
    exceeded = allowance.exceeded(allowance.use(offers, _extra_w(offers, _assignments(rounds))))
    is_concerned = [
        any(exceeded.intersection(allowance.supplies.path(offer.supply)) for offer in each.offers) for each in rounds
    ]
    if not any(is_concerned):
        return [None] * len(rounds)
    concerned = [each for each, is_ in zip(rounds, is_concerned, strict=True) if is_]
    others = [each for each, is_ in zip(rounds, is_concerned, strict=True) if not is_]
    replanned = _Replanned.of(concerned, _with_drawn(others, allowance))
    return [replanned.plan_of(each) if is_ else None for each, is_ in zip(rounds, is_concerned, strict=True)]


@dataclass(frozen=True)
class _Replanned:
    """What devices of several rounds do from now on.

    Attributes:
        allowance: that it was planned with.
        assignments: of those that go on, by id.
        time_s: seconds that each of them takes for its training, at the quantile that is planned with.
        use: of every supply.
    """

    allowance: Allowance
    assignments: Mapping[str, Assignment]
    time_s: Mapping[str, float]
    use: tuple[SupplyUse, ...]

    @classmethod
    def of(cls, rounds: Sequence[InFlight], allowance: Allowance) -> _Replanned:
        """Plan the devices of rounds anew."""
        epochs = {offer.device_id: each.epochs for each in rounds for offer in each.offers}
        offers = sorted((offer for each in rounds for offer in each.offers), key=lambda offer: offer.device_id)
        curves = curves_of(offers, np.array([epochs[offer.device_id] for offer in offers]))
        everyone = np.ones(len(offers), dtype=np.bool_)
        allocation = min_makespan(curves, allowance.headroom(offers), len(offers), everyone, ~everyone)
        step = np.full(len(offers), -1, dtype=np.intp) if allocation is None else allocation.step
        on = {offers[k].device_id: (offers[k], int(step[k])) for k in np.flatnonzero(step >= 0)}
        assignments = {device_id: assigned(offer, curves, step) for device_id, (offer, step) in on.items()}
        return cls(
            allowance=allowance,
            assignments=assignments,
            time_s={device_id: float(curves.time_s[step]) for device_id, (_, step) in on.items()},
            use=allowance.use(offers, _extra_w(offers, assignments)),
        )

    def plan_of(self, round_: InFlight) -> TrimmedPlan | None:
        """What takes the place of a round's plan; None where it stays."""
        before = {assignment.device_id: assignment for assignment in round_.plan.assignments}
        own = sorted(offer.device_id for offer in round_.offers)
        kept = {device_id: self.assignments[device_id] for device_id in own if device_id in self.assignments}
        changed = tuple(device_id for device_id in kept if kept[device_id] != before[device_id])
        ended = tuple(device_id for device_id in own if device_id not in kept)
        if not changed and not ended:
            return None
        after = {device_id: part for device_id, part in (before | kept).items() if device_id not in ended}
        return TrimmedPlan(
            plan=replace(
                round_.plan,
                assignments=tuple(after[device_id] for device_id in sorted(after)),
                decisions=tuple(_said(decision, changed, ended) for decision in round_.plan.decisions),
                duration_s=max((self.time_s[device_id] for device_id in kept), default=round_.plan.duration_s),
                planned_w=self.allowance.at_sites_w(self.use),
                site_budget_w=self.allowance.site_budget_w,
                supplies=self.use,
                first_planned=replace(round_.plan.at_first, decisions=()),
            ),
            changed=changed,
            ended=ended,
        )


def _assignments(rounds: Sequence[InFlight]) -> dict[str, Assignment]:
    """Of those devices of rounds that can be told to go on otherwise, by id."""
    found = {}
    for each in rounds:
        own = {offer.device_id for offer in each.offers}
        found.update({part.device_id: part for part in each.plan.assignments if part.device_id in own})
    return found


def _extra_w(offers: Sequence[Offer], assignments: Mapping[str, Assignment]) -> dict[str, float]:
    """Watts above idling, by device."""
    return {
        offer.device_id: assignments[offer.device_id].power_limit_w - offer.idle_w
        for offer in offers
        if offer.device_id in assignments
    }


def _with_drawn(rounds: Sequence[InFlight], allowance: Allowance) -> Allowance:
    """The same with the watts of rounds that stay as they are drawn elsewhere."""
    elsewhere_w = dict(allowance.elsewhere_w)
    assignments = _assignments(rounds)
    for offer in (offer for each in rounds for offer in each.offers):
        elsewhere_w[offer.supply] = elsewhere_w.get(offer.supply, 0.0) + assignments[offer.device_id].power_limit_w
    return replace(allowance, elsewhere_w=elsewhere_w)


def _said(decision: Decision, changed: Sequence[str], ended: Sequence[str]) -> Decision:
    if decision.device_id in ended:
        return replace(decision, reason=f"{decision.reason}; ended early, as the watts fell")
    if decision.device_id in changed:
        return replace(decision, reason=f"{decision.reason}; in another mode since the watts fell")
    return decision
