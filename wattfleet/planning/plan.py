"""Round plans: who trains in which mode, so that every supply's watts hold and the slowest is done soonest.

The watts of a round are those of the chosen devices while they train, at a high quantile of what is predicted,
plus those of all others while they idle: they hang behind the same supplies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from wattfleet.errors import InfeasibleBudgetError, InvalidInputError, NoCandidatesError, first_few
from wattfleet.planning.allowance import Allowance
from wattfleet.planning.curves import Curves, Values, curves_of, thriftiest_w
from wattfleet.planning.headroom import Headroom
from wattfleet.planning.history import History
from wattfleet.planning.makespan import min_makespan
from wattfleet.planning.offers import Offer
from wattfleet.planning.policies.policy import Policy, Situation, Wish
from wattfleet.planning.reasons import decisions
from wattfleet.planning.round_plan import Assignment, RoundPlan
from wattfleet.planning.selection import Selection, resting


def plan_round(
    offers: Sequence[Offer],
    chosen_policy: Policy,
    allowance: Allowance,
    epochs: float,
    server_round: int,
    history: History | None = None,
    selection: Selection | None = None,
) -> RoundPlan:
    """Plan one round: least duration under all supplies' watts for the devices that the policy wants.

    If the watts cannot carry that many, as many as they can.

    Args:
        offers: the devices that are ready, each once.
        chosen_policy: who should be chosen, and how many.
        allowance: watts of the supplies.
        epochs: local epochs that each chosen device trains.
        server_round: number of the round, from 1.
        history: earlier rounds of the run.
        selection: the operator's own say.

    Raises:
        InvalidInputError: no offers, a device twice, an unknown supply, or a number of epochs that is not above zero.
        NoCandidatesError: none of the devices may be chosen; the text says why not.
        InfeasibleBudgetError: the watts cannot carry one device, or none is done by a deadline; the text says what
            would do.
    """
    offers = sorted(offers, key=lambda offer: offer.device_id)
    history, selection = history or History(), selection or Selection()
    _require_usable(offers, epochs)
    headroom = allowance.headroom(offers)
    refused = _refused(offers, allowance, headroom, selection, history, server_round)
    open_ = [offer for offer in offers if offer.device_id not in refused]
    if not open_:
        reasons = first_few([f"{device_id}: {why}" for device_id, why in refused.items()], "; ")
        raise NoCandidatesError(f"no device may be chosen: {reasons}")
    kept = np.array([offer.device_id not in refused for offer in offers], dtype=np.bool_)
    situation = Situation(
        server_round, open_, curves_of(open_, epochs), headroom.of(kept), history, selection.over_selection
    )
    wish = chosen_policy.wish(situation)
    allocation = min_makespan(situation.curves, situation.headroom, wish.count, wish.eligible, wish.first)
    if allocation is None:
        raise _infeasible(situation, wish, allowance, offers)
    chosen = np.flatnonzero(allocation.step >= 0)
    extra_w = {open_[k].device_id: float(situation.curves.extra_w[allocation.step[k]]) for k in chosen}
    use = allowance.use(offers, extra_w)
    return RoundPlan(
        assignments=tuple(assigned(open_[k], situation.curves, int(allocation.step[k])) for k in chosen),
        decisions=decisions(situation, wish, allocation, allowance.supplies.names, refused),
        duration_s=allocation.limit_s,
        planned_w=allowance.at_sites_w(use),
        site_budget_w=allowance.site_budget_w,
        supplies=use,
        deadline_s=wish.deadline_s,
    )


def _require_usable(offers: Sequence[Offer], epochs: float) -> None:
    """Make sure that a round can be planned at all.

    Raises:
        InvalidInputError: it cannot.
    """
    ids = [offer.device_id for offer in offers]
    if not offers or len(set(ids)) != len(ids):
        raise InvalidInputError("a round needs one or more devices, each once")
    if not (math.isfinite(epochs) and epochs > 0):
        raise InvalidInputError(f"a round needs epochs above zero, not {epochs}")


def _refused(
    offers: Sequence[Offer],
    allowance: Allowance,
    headroom: Headroom,
    selection: Selection,
    history: History,
    server_round: int,
) -> dict[str, str]:
    """Devices that no policy is to choose from, each with its reason in words."""
    least_w = thriftiest_w(offers)
    refused = {
        offer.device_id: why for offer in offers if (why := selection.refusal(offer, allowance.supplies)) is not None
    }
    for offer, watts in zip(offers, least_w, strict=True):
        if offer.device_id not in refused and offer.limit_w is not None and watts > offer.limit_w:
            refused[offer.device_id] = (
                f"over its own limit of {offer.limit_w:g} W: its thriftiest mode takes {watts:.1f} W"
            )
    kept = np.array([offer.device_id not in refused for offer in offers], dtype=np.bool_)
    others = [offer for offer in offers if offer.device_id not in refused]
    refused |= _beyond_supplies(others, least_w[kept], headroom.of(kept), allowance.supplies.names)
    others = [offer for offer in others if offer.device_id not in refused]
    return refused | resting(others, history, server_round)


def _beyond_supplies(
    offers: Sequence[Offer], least_w: Values, headroom: Headroom, supplies: Sequence[str]
) -> dict[str, str]:
    """Devices that their supplies cannot carry even alone, each with its reason in words; none where all are such.

    Args:
        offers: devices that may be chosen.
        least_w: `[n]` watts of each in its thriftiest mode.
        headroom: of the supplies behind them.
        supplies: names, by index.
    """
    extra_w = least_w - np.array([offer.idle_w for offer in offers])
    beyond = np.flatnonzero(extra_w > headroom.alone_w)
    if len(beyond) == len(offers):
        return {}  # the plan then says what the watts lack
    found = {}
    for k in map(int, beyond):
        path = headroom.above[:, k]
        # Of several with the same watts the outermost, whatever rounding makes of them.
        scarcest = min(path[path >= 0], key=lambda supply: round(float(headroom.spare_w[supply]), 6))
        found[offers[k].device_id] = (
            f"its supply cannot carry it: its thriftiest mode takes {extra_w[k]:.1f} W above idling,"
            f" {supplies[scarcest]} can give it {max(float(headroom.spare_w[scarcest]), 0.0):.1f} W"
        )
    return found


def assigned(offer: Offer, curves: Curves, step: int) -> Assignment:
    """A device's part in a round, at a step of its curve."""
    point = int(curves.point[step])
    return Assignment(
        device_id=offer.device_id,
        mode=offer.front.mode(point),
        epoch_s=float(offer.front.epoch_s[point]),
        power_w=float(offer.front.power_w[point]),
        power_limit_w=offer.idle_w + float(curves.extra_w[step]),
        warmup_s=float(offer.front.warmup_s[point]),
    )


def _infeasible(
    situation: Situation, wish: Wish, allowance: Allowance, offers: Sequence[Offer]
) -> InfeasibleBudgetError:
    """Say which supply carries no device, and how many watts would do for the easiest one."""
    headroom, least_w = situation.headroom, situation.curves.least_w
    lacking_w = np.where(headroom.above >= 0, least_w - headroom.spare_w[headroom.above], -np.inf).max(axis=0)
    easiest = int(np.argmin(np.where(wish.eligible, lacking_w, np.inf)))
    path = headroom.above[:, easiest]
    worst = max(path[path >= 0], key=lambda supply: float(least_w[easiest] - headroom.spare_w[supply]))
    name = allowance.supplies.names[worst]
    idle_w = allowance.idle_w(offers)[name]
    where = "" if len(allowance.supplies.names) == 1 else f"{name}: "
    return InfeasibleBudgetError(
        f"{where}{allowance.budget_w[name]:g} W cannot carry one training device beside {idle_w:.1f} W of idling:"
        f" allow at least {math.ceil((idle_w + float(least_w[easiest])) * 10) / 10:.1f} W"
    )
