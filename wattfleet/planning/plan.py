"""Plans one round: selects devices and their modes for the least makespan within every supply's budget.

A plan allocates two amounts of power. Selected devices get a high quantile of their predicted power. All other devices
get their idle power, since the same supplies feed them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from wattfleet.errors import InfeasibleBudgetError, InvalidInputError, NoCandidatesError, first_few
from wattfleet.planning.allowance import Allowance
from wattfleet.planning.curves import Curves, FrontTable, Values, curves_of, min_power_w
from wattfleet.planning.epoch_choice import EpochChoice, require_epochs
from wattfleet.planning.headroom import Headroom
from wattfleet.planning.history import History
from wattfleet.planning.makespan import min_makespan
from wattfleet.planning.offers import Offer
from wattfleet.planning.over_selection import enough_replies
from wattfleet.planning.policies.policy import PlanningContext, Policy, SelectionRequest
from wattfleet.planning.policy_failures import requested
from wattfleet.planning.reasons import decisions
from wattfleet.planning.round_plan import Assignment, RoundPlan
from wattfleet.planning.selection import Selection, backing_off


def plan_round(
    offers: Sequence[Offer],
    policy: Policy,
    allowance: Allowance,
    epochs: float | EpochChoice,
    server_round: int,
    history: History | None = None,
    selection: Selection | None = None,
) -> RoundPlan:
    """Plan one round: the least makespan within all supplies' budgets for the devices that the policy requests.

    If the budgets do not allow that many devices, the plan selects as many as possible.

    Args:
        offers: the devices that are ready, each once.
        policy: the client-selection policy.
        allowance: power of the supplies.
        epochs: local epochs that each selected device trains, or those that the policy may choose.
        server_round: number of the round, from 1.
        history: earlier rounds of the run.
        selection: the operator's rules for the selection.

    Raises:
        InvalidInputError: there are no offers, a device is listed twice, a supply is unknown, or the epochs are not
            above 0.
        NoCandidatesError: no device can be selected; the text gives the reason for each.
        InfeasibleBudgetError: the budgets are too low for one device, or no device meets the deadline; the text gives
            the budget or deadline that would be enough.
    """
    offers = sorted(offers, key=lambda offer: offer.device_id)
    history, selection = history or History(), selection or Selection()
    _require_usable(offers)
    choice = epochs if isinstance(epochs, EpochChoice) else EpochChoice.fixed(epochs)
    headroom = allowance.headroom(offers)
    excluded = _excluded(offers, allowance, headroom, selection, history, server_round)

    def context_without(left_out: Collection[str]) -> PlanningContext:
        """The policy's context without the devices that are left out; at least one must remain."""
        is_candidate = np.array([offer.device_id not in left_out for offer in offers], dtype=np.bool_)
        candidates = [offer for offer in offers if offer.device_id not in left_out]
        return PlanningContext(
            server_round,
            candidates,
            FrontTable.of(candidates),
            choice,
            headroom.of(is_candidate),
            history,
            selection.over_selection,
        )

    if len(excluded) == len(offers):
        reasons = first_few([f"{device_id}: {reason}" for device_id, reason in excluded.items()], "; ")
        raise NoCandidatesError(f"no device can be selected: {reasons}")
    context, request, failed = requested(policy, context_without, excluded)
    excluded |= failed
    candidates = list(context.offers)
    own_epochs = np.full(len(candidates), choice.fewest) if request.epochs is None else request.epochs
    curves = context.curves if request.epochs is None else context.fronts.curves(own_epochs)
    allocation = min_makespan(curves, context.headroom, request.count, request.eligible, request.priority)
    if allocation is None:
        raise _infeasible(context, request, allowance, offers)
    selected = np.flatnonzero(allocation.step >= 0)
    extra_w = {candidates[k].device_id: float(curves.extra_w[allocation.step[k]]) for k in selected}
    use = allowance.use(offers, extra_w)
    return RoundPlan(
        assignments=tuple(
            assignment_at(candidates[k], curves, int(allocation.step[k]), float(own_epochs[k])) for k in selected
        ),
        decisions=decisions(context, curves, request, allocation, allowance.supplies.names, excluded),
        duration_s=allocation.limit_s,
        planned_w=allowance.at_sites_w(use),
        site_budget_w=allowance.site_budget_w,
        supplies=use,
        deadline_s=request.deadline_s,
        enough_replies=enough_replies(policy, context, len(selected)),
    )


def _require_usable(offers: Sequence[Offer]) -> None:
    """Check the devices of a round.

    Raises:
        InvalidInputError: there are no devices, or a device is listed twice.
    """
    ids = [offer.device_id for offer in offers]
    if not offers or len(set(ids)) != len(ids):
        raise InvalidInputError("a round needs 1 or more devices, each listed once")


def _excluded(
    offers: Sequence[Offer],
    allowance: Allowance,
    headroom: Headroom,
    selection: Selection,
    history: History,
    server_round: int,
) -> dict[str, str]:
    """Devices that no policy may select, each with the reason."""
    needed_w = min_power_w(offers)
    excluded = {
        each.device_id: reason
        for each in offers
        if (reason := selection.exclusion_reason(each.device_id, each.tags, each.supply, allowance.supplies))
    }
    for offer, watts in zip(offers, needed_w, strict=True):
        if offer.device_id not in excluded and offer.limit_w is not None and watts > offer.limit_w:
            excluded[offer.device_id] = (
                f"over its own limit of {offer.limit_w:g} W: its lowest-power mode needs {watts:.1f} W"
            )
    kept = np.array([offer.device_id not in excluded for offer in offers], dtype=np.bool_)
    others = [offer for offer in offers if offer.device_id not in excluded]
    excluded |= _over_supplies(others, needed_w[kept], headroom.of(kept), allowance.supplies.names)
    others = [offer for offer in others if offer.device_id not in excluded]
    return excluded | backing_off(others, history, server_round)


def _over_supplies(
    offers: Sequence[Offer], needed_w: Values, headroom: Headroom, supplies: Sequence[str]
) -> dict[str, str]:
    """Devices that their supplies cannot power even alone, each with the reason. Empty if this holds for all devices.

    Args:
        offers: the devices.
        needed_w: `[n]` watts of each device in its lowest-power mode.
        headroom: headroom of their supplies.
        supplies: names of the supplies, by index.
    """
    extra_w = needed_w - np.array([offer.idle_w for offer in offers])
    over = np.flatnonzero(extra_w > headroom.single_device_w)
    if len(over) == len(offers):
        return {}  # planning then fails with an error that states the missing watts
    reasons = {}
    for k in map(int, over):
        path = headroom.supply_at[:, k]
        # Of several supplies with equal watts, the outermost: rounding makes the choice independent of the machine.
        scarcest = min(path[path >= 0], key=lambda supply: round(float(headroom.spare_w[supply]), 6))
        reasons[offers[k].device_id] = (
            f"over its supply's budget: its lowest-power mode needs {extra_w[k]:.1f} W above idle,"
            f" {supplies[scarcest]} has {max(float(headroom.spare_w[scarcest]), 0.0):.1f} W"
        )
    return reasons


def assignment_at(offer: Offer, curves: Curves, step: int, epochs: float) -> Assignment:
    """The assignment of a device at a step of its power curve.

    Args:
        offer: the device.
        curves: power curves of a training of `epochs` local epochs.
        step: index of the step.
        epochs: local epochs of the device.
    """
    point = int(curves.point[step])
    return Assignment(
        device_id=offer.device_id,
        mode=offer.front.mode(point),
        epoch_s=float(offer.front.epoch_s[point]),
        power_w=float(offer.front.power_w[point]),
        power_limit_w=offer.idle_w + float(curves.extra_w[step]),
        warmup_s=float(offer.front.warmup_s[point]),
        epoch_log_sd=float(offer.front.epoch_log_sd[point]),
        power_log_sd=float(offer.front.power_log_sd[point]),
        epochs=epochs,
        batch=_batch(offer, point),
        profiled_modes=offer.profiled_modes,
        is_length_assumed=offer.is_length_assumed,
    )


def fastest_assignments(offers: Sequence[Offer], epochs: float) -> list[Assignment | None]:
    """Each device's assignment in its fastest mode within its own limit; None if that limit allows no mode.

    Args:
        offers: the devices.
        epochs: local epochs that each of them trains.

    Raises:
        InvalidInputError: a device is listed twice, or the epochs are not above 0.
    """
    if not offers:
        return []
    _require_usable(offers)
    require_epochs(epochs)
    curves = curves_of(offers, epochs)
    found: list[Assignment | None] = []
    for k, offer in enumerate(offers):
        steps = curves.time_s[curves.start[k] : curves.start[k + 1]]
        # Of several steps that take the least time, the last needs the least power.
        fastest = curves.start[k] + np.searchsorted(steps, steps[0], side="right") - 1 if len(steps) else None
        found.append(None if fastest is None else assignment_at(offer, curves, int(fastest), epochs))
    return found


def _batch(offer: Offer, point: int) -> int | None:
    return offer.batch if offer.front.batch is None else int(offer.front.batch[point])


def _infeasible(
    context: PlanningContext, request: SelectionRequest, allowance: Allowance, offers: Sequence[Offer]
) -> InfeasibleBudgetError:
    """The error that names the supply whose budget is too low, and the watts that one device would need."""
    headroom, min_extra_w = context.headroom, context.curves.min_extra_w
    supply_at = headroom.supply_at
    missing_w = np.where(supply_at >= 0, min_extra_w - headroom.spare_w[supply_at], -np.inf).max(axis=0)
    nearest = int(np.argmin(np.where(request.eligible, missing_w, np.inf)))
    path = supply_at[:, nearest]
    scarcest = max(path[path >= 0], key=lambda supply: float(min_extra_w[nearest] - headroom.spare_w[supply]))
    name = allowance.supplies.names[scarcest]
    idle_w = allowance.idle_w(offers)[name]
    where = "" if len(allowance.supplies.names) == 1 else f"{name}: "
    return InfeasibleBudgetError(
        f"{where}{allowance.budget_w[name]:g} W is not enough to train one device on top of {idle_w:.1f} W of idle"
        f" power: allow at least {math.ceil((idle_w + float(min_extra_w[nearest])) * 10) / 10:.1f} W"
    )
