"""Plans one round: selects devices and their modes for the least makespan within every supply's budget.

A plan allocates two amounts of power. Selected devices get a high quantile of their predicted power. All other devices
get their idle power, since the same supplies feed them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial

import numpy as np

from wattfleet.core.budgets import Supplies
from wattfleet.core.errors import (
    EnergySpentError,
    InfeasibleBudgetError,
    InvalidInputError,
    NoCandidatesError,
    WattfleetError,
    first_few,
)
from wattfleet.core.planning.curves import (
    Allocation,
    Curves,
    FrontTable,
    Headroom,
    Offer,
    Values,
    curves_of,
    min_makespan,
    min_power_w,
)
from wattfleet.core.planning.energy import EnergyLimit, Fitted, TrainingCosts, fit
from wattfleet.core.planning.epoch_choice import EpochChoice, require_epochs
from wattfleet.core.planning.history import History
from wattfleet.core.planning.policies.policy import PlanningContext, Policy, SelectionRequest, any_devices
from wattfleet.core.planning.round_plan import Allowance, Assignment, Decision, RoundPlan
from wattfleet.core.planning.stores import EnergyStores, StoreRoom

# --- Selection --------------------------------------------------------------------------------------------------------
# Rules that exclude devices from a round before the policy selects: the operator's, and backoff after failures.


_KINDS = ("id", "tag", "site")
_MAX_BACKOFF_ROUNDS = 16
_MAX_OVER_SELECTION = 10.0

DRAINED = "drained by the operator"
"""The reason why a drained device is not selected."""


@dataclass(frozen=True)
class Selection:
    """The operator's rules for the selection.

    Attributes:
        include: patterns such as `id:orin-*`, `tag:lab` or `site:roof`. Only devices that match one are candidates;
            empty for all devices. `site:` matches any supply that feeds the device.
        exclude: patterns of devices that are never selected.
        over_selection: share of devices to select beyond the policy's number, so that some may fail.
        drained: ids of devices that are excluded from new rounds.
        left_out: reasons why devices are left out because of what they reported, by id.

    Raises:
        InvalidInputError: a pattern has another form, or the share is not 0 to 10.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    over_selection: float = 0.0
    drained: frozenset[str] = frozenset()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern in (*self.include, *self.exclude):
            kind, colon, name = pattern.partition(":")
            if kind not in _KINDS or not colon or not name:
                raise InvalidInputError(f"invalid device pattern {pattern!r}: write id:NAME, tag:NAME or site:NAME")
        if not 0 <= self.over_selection <= _MAX_OVER_SELECTION:
            raise InvalidInputError(
                f"the share of over-selection must be 0 to {_MAX_OVER_SELECTION:g}, not {self.over_selection}"
            )

    def exclusion_reason(self, device_id: str, tags: Set[str], supply: str, supplies: Supplies) -> str | None:
        """Why a device must not be selected; None if it may be.

        Args:
            device_id: the device.
            tags: its tags.
            supply: the supply that it is behind; empty if it is unknown.
            supplies: all supplies.
        """
        if device_id in self.drained:
            return DRAINED
        if device_id in self.left_out:
            return f"left out: {self.left_out[device_id]}"
        if not self.include and not self.exclude:
            return None
        names = {"id": {device_id}, "tag": tags, "site": supplies.path(supply) if supply else ()}

        def matches(pattern: str) -> bool:
            kind, _, name = pattern.partition(":")
            return any(fnmatchcase(own, name) for own in names[kind])

        if self.include and not any(map(matches, self.include)):
            return f"not included: matches none of {', '.join(self.include)}"
        for pattern in self.exclude:
            if matches(pattern):
                return f"excluded: matches {pattern}"
        return None


def next_round(failures: int, last: int) -> int:
    """The first round in which a device that kept failing may be selected again.

    After two failures in a row a device skips one round, after three it skips three. From then on each failure doubles
    the backoff, up to `_MAX_BACKOFF_ROUNDS`.

    Args:
        failures: number of failures in a row; 1 or more.
        last: number of the round in which it failed last.
    """
    return last + min(1 << (failures - 1), _MAX_BACKOFF_ROUNDS)


def backing_off(offers: Sequence[Offer], history: History, server_round: int) -> dict[str, str]:
    """Devices that are excluded for some rounds because they kept failing, each with the reason.

    If all devices would back off, none does.
    """
    found: dict[str, str] = {}
    for offer in offers:
        failures, last = history.consecutive_failures.get(offer.device_id, (0, 0))
        if failures and server_round < (until := next_round(failures, last)):
            found[offer.device_id] = f"failed {failures} times in a row: excluded until round {until}"
    return {} if len(found) == len(offers) else found


# --- Over selection ---------------------------------------------------------------------------------------------------
# The number of replies that are enough for a round, if more devices were selected than the policy wants.


def enough_replies(policy: Policy, context: PlanningContext, selected: int) -> int | None:
    """The number of devices that a policy wants without over-selection; None if it wants all selected devices.

    Args:
        policy: the client-selection policy, a pure function of the context.
        context: the policy's context when the devices were selected.
        selected: how many devices were selected.
    """
    if not context.over_selection:
        return None
    plain = replace(context, over_selection=0.0)
    try:
        request = attempt(policy, plain)
    except WattfleetError:  # the policy refuses such a small number
        return None
    wanted = any_devices(plain, None).count if isinstance(request, str) else request.count
    return wanted_if_fewer(selected, wanted)


def wanted_if_fewer(devices: int, wanted: int | None) -> int | None:
    """`wanted` if it is below the number of devices; otherwise None, which means all devices."""
    return None if wanted is None or wanted >= devices else wanted


# --- Policy failures --------------------------------------------------------------------------------------------------
# Gets a policy's request. If the policy fails, the device that causes it is found and left out of the plan.

_MAX_LEFT_OUT = 3
"""Maximum number of devices to leave out; if the policy still fails, the round is planned without the policy."""

_MAX_PROBLEM_CHARACTERS = 200

ContextWithout = Callable[[Collection[str]], PlanningContext]
"""Returns the policy's context without some devices, given by id; at least one device must remain."""


def requested(
    policy: Policy, context_without: ContextWithout, excluded: Collection[str]
) -> tuple[PlanningContext, SelectionRequest, Mapping[str, str]]:
    """Get a policy's request, if necessary without the devices that make it fail.

    If it still fails without them, half of all devices are requested, for the least makespan.

    Args:
        policy: the client-selection policy.
        context_without: the policy's context without some devices.
        excluded: devices that are not candidates.

    Returns:
        The context of the request, the request, and why devices were left out, by id.

    Raises:
        WattfleetError: the policy refuses the round, for example because no device can meet its deadline.
    """
    whole = context = context_without(excluded)
    left_out: dict[str, str] = {}
    while True:
        request = attempt(policy, context)
        if isinstance(request, SelectionRequest):
            return context, request, left_out
        if len(context.offers) == 1 or len(left_out) == _MAX_LEFT_OUT:
            anybody = any_devices(whole, None)
            reason = f"among the devices with the least makespan, since the policy {policy.name} fails ({request})"
            return whole, replace(anybody, selection_reasons=dict.fromkeys(range(len(whole.offers)), reason)), {}
        ids = [offer.device_id for offer in context.offers]
        failing = _failing_device(policy, context_without, {*excluded, *left_out}, ids)
        left_out[failing] = f"left out: the policy {policy.name} fails with its values ({request})"
        context = context_without({*excluded, *left_out})


def attempt(policy: Policy, context: PlanningContext) -> SelectionRequest | str:
    """A policy's request, or a description of its failure."""
    try:
        request = policy.request(context)
    except WattfleetError:
        raise
    except Exception as error:  # a boundary: the defect of a policy must not end the planning of all runs
        return f"{type(error).__name__}: {error}"[:_MAX_PROBLEM_CHARACTERS]
    return request if request.count >= 1 and request.eligible.any() else "it requests no device"


def _failing_device(policy: Policy, context_without: ContextWithout, excluded: set[str], ids: Sequence[str]) -> str:
    """A device that makes the policy fail: the last one of the shortest failing prefix of `ids`, by bisection."""
    works, fails = 0, len(ids)
    while fails - works > 1:
        middle = (works + fails) // 2
        try:
            is_failing = isinstance(attempt(policy, context_without({*excluded, *ids[middle:]})), str)
        except WattfleetError:
            is_failing = False  # the policy refuses such a small number
        works, fails = (works, middle) if is_failing else (middle, fails)
    return ids[fails - 1]


# --- Reasons ----------------------------------------------------------------------------------------------------------
# The reason why each device was or was not selected, as text for operators.


def decisions(
    context: PlanningContext,
    curves: Curves,
    request: SelectionRequest,
    allocation: Allocation,
    supplies: Sequence[str],
    excluded: Mapping[str, str],
) -> tuple[Decision, ...]:
    """One decision for every device, by id.

    Args:
        context: the candidates.
        curves: their power curves with the epochs that the policy requested.
        request: what the policy requested.
        allocation: the selected devices.
        supplies: names of the supplies, by index.
        excluded: why the other devices were no candidates, by id.
    """
    found = [Decision(device_id, False, reason) for device_id, reason in excluded.items()]
    found += _selected(context, curves, request, allocation)
    found += _not_selected(context, curves, request, allocation, supplies)
    return tuple(sorted(found, key=lambda decision: decision.device_id))


def _selected(
    context: PlanningContext, curves: Curves, request: SelectionRequest, allocation: Allocation
) -> Iterator[Decision]:
    selected = np.flatnonzero(allocation.step >= 0)
    devices = "1 device" if len(selected) == 1 else f"{len(selected)} devices"
    shortage = f" (the budget allows {devices}, not {request.count})" if len(selected) < request.count else ""
    fastest = _fastest(request, selected.tolist())
    for k in map(int, selected):
        extra_w = float(curves.extra_w[allocation.step[k]])
        epochs = "" if request.epochs is None else f" with {_epochs(float(request.epochs[k]))}"
        yield Decision(
            context.offers[k].device_id,
            True,
            f"selected: {request.selection_reasons.get(k, fastest)};"
            f" done{epochs} within {allocation.limit_s:.1f} s at {extra_w:.1f} W above idle{shortage}",
        )


def _epochs(number: float) -> str:
    return "1 local epoch" if number == 1 else f"{number:g} local epochs"


def _fastest(request: SelectionRequest, selected: Sequence[int]) -> str:
    """The reason for the devices that were selected for their makespan."""
    count = sum(k not in request.selection_reasons for k in selected)
    reason = (
        "the device with the least makespan" if count == 1 else f"among the {count} devices with the least makespan"
    )
    if priority_count := len(selected) - count:
        reason += f", after {priority_count} with priority"
    return reason


def _not_selected(
    context: PlanningContext,
    curves: Curves,
    request: SelectionRequest,
    allocation: Allocation,
    supplies: Sequence[str],
) -> Iterator[Decision]:
    headroom = context.headroom
    limit_s = allocation.limit_s
    extra_w = curves.extra_at(curves.steps_within(allocation.limit_s))
    fastest_s = curves.fastest_s
    selected = np.flatnonzero(allocation.step >= 0)
    left_w = headroom.spare_w - headroom.drawn_w(extra_w, selected)
    highest_w = float(extra_w[selected[~request.priority[selected]]].max(initial=-np.inf))
    for k in map(int, np.flatnonzero(allocation.step < 0)):
        too_much = f"too much power: finishing within {limit_s:.1f} s needs {extra_w[k]:.1f} W above idle"
        scarce = [supply for supply in headroom.supply_at[::-1, k] if supply >= 0 and extra_w[k] > left_w[supply]]
        if not request.eligible[k]:
            reason = request.exclusion_reasons[k]
        elif not np.isfinite(extra_w[k]):
            reason = f"too slow: {fastest_s[k]:.1f} s in its fastest mode, the round lasts {limit_s:.1f} s"
        elif scarce:
            reason = f"{too_much}, more than {supplies[scarce[0]]} has left"
        elif np.isfinite(highest_w):
            reason = f"{too_much}, the selected devices need at most {highest_w:.1f} W"
        else:
            reason = "not needed: devices with priority fill the round"
        yield Decision(context.offers[k].device_id, False, reason)


# --- Plan -------------------------------------------------------------------------------------------------------------


def plan_round(
    offers: Sequence[Offer],
    policy: Policy,
    allowance: Allowance,
    epochs: float | EpochChoice,
    server_round: int,
    history: History | None = None,
    selection: Selection | None = None,
    energy: EnergyLimit | None = None,
    stores: EnergyStores | None = None,
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
        energy: what is left of the run's energy budget; None for a run without one.
        stores: the batteries, and the energy budgets of supplies; None without any.

    Raises:
        InvalidInputError: there are no offers, a device is listed twice, a supply is unknown, or the epochs are not
            above 0.
        NoCandidatesError: no device can be selected, or none that has the energy can train within the watts and the
            deadline; the text gives the reason.
        InfeasibleBudgetError: the budgets are too low for one device, or no device meets the deadline; the text gives
            the budget or deadline that would be enough.
        EnergySpentError: the energy that is left does not suffice for any device, and no time is foreseen when it will.
    """
    offers = sorted(offers, key=lambda offer: offer.device_id)
    history, selection = history or History(), selection or Selection()
    _require_usable(offers)
    choice = epochs if isinstance(epochs, EpochChoice) else EpochChoice.fixed(epochs)
    headroom = allowance.headroom(offers)
    excluded = _excluded(offers, allowance, headroom, selection, history, server_round)
    if stores is not None and len(excluded) < len(offers):
        excluded |= _without_energy(offers, excluded, allowance, headroom, choice.fewest, stores)

    def context_without(left_out: Collection[str]) -> PlanningContext:
        """The policy's context without the devices that are left out; at least one must remain."""
        is_candidate = np.array([offer.device_id not in left_out for offer in offers], dtype=np.bool_)
        candidates = [offer for offer in offers if offer.device_id not in left_out]
        fronts, own_headroom = FrontTable.of(candidates), headroom.of(is_candidate)
        return PlanningContext(
            server_round, candidates, fronts, choice, own_headroom, history, selection.over_selection, energy
        )

    if len(excluded) == len(offers):
        raise NoCandidatesError(f"no device can be selected: {_some_reasons(excluded)}")
    context, request, failed = requested(policy, context_without, excluded)
    excluded |= failed
    candidates = list(context.offers)
    own_epochs = np.full(len(candidates), choice.fewest) if request.epochs is None else request.epochs
    curves = context.curves if request.epochs is None else context.fronts.curves(own_epochs)
    allocation = allocated(curves, context.headroom, request)
    if allocation is None:
        raise _infeasible(context, request, allowance, offers)
    is_limited = energy is not None or stores is not None
    costs = TrainingCosts.of(candidates, context.fronts, own_epochs) if is_limited else None
    if costs is not None:
        room = None if stores is None else stores.room(candidates, context.headroom, allowance.supplies.names)
        # If no requested device can train, any other may do so alone, unless it would miss the deadline.
        able = request.eligible if request.deadline_s is not None else np.ones_like(request.eligible)
        priority, deadline_s = request.priority, request.deadline_s
        fitted = fit(allocation, curves, costs, context.headroom, energy, priority, able, deadline_s, room)
        reason_of = partial(_dropped_reason, context, costs, allocation, energy, room, allowance)
        allocation, request = fitted.allocation, _without_dropped(request, fitted, reason_of)
    selected = np.flatnonzero(allocation.step >= 0)
    extra_w = {candidates[k].device_id: float(curves.extra_w[allocation.step[k]]) for k in selected}
    use = allowance.use(offers, extra_w)
    return RoundPlan(
        assignments=tuple(
            assignment_at(
                candidates[k],
                curves,
                int(allocation.step[k]),
                float(own_epochs[k]),
                costs if energy is not None or _is_limited(candidates[k], allowance, stores) else None,
            )
            for k in selected
        ),
        decisions=decisions(context, curves, request, allocation, allowance.supplies.names, excluded),
        duration_s=allocation.limit_s,
        planned_w=allowance.at_sites_w(use),
        site_budget_w=allowance.site_budget_w,
        supplies=use,
        deadline_s=request.deadline_s,
        enough_replies=enough_replies(policy, context, len(selected)),
    )


def allocated(curves: Curves, headroom: Headroom, request: SelectionRequest) -> Allocation | None:
    """The devices and modes for a policy's request; None if the supplies cannot power a single device."""
    if request.within_s is not None:
        within = curves.steps_within(request.within_s)
        step = np.where(request.eligible & (within >= curves.start[:-1]), within, -1)
        if (step >= 0).any() and headroom.can_supply(curves.extra_at(within), step >= 0):
            return Allocation(request.within_s, step)
    return min_makespan(curves, headroom, request.count, request.eligible, request.priority)


def _without_dropped(request: SelectionRequest, fitted: Fitted, reason_of: Callable[[int], str]) -> SelectionRequest:
    """A policy's request without the devices that the energy does not suffice for."""
    if not fitted.dropped.any():
        return request
    return replace(
        request,
        count=int((fitted.allocation.step >= 0).sum()),
        eligible=request.eligible & ~fitted.dropped,
        exclusion_reasons={
            **request.exclusion_reasons,
            **{k: reason_of(k) for k in map(int, np.flatnonzero(fitted.dropped))},
        },
    )


def _dropped_reason(
    context: PlanningContext,
    costs: TrainingCosts,
    allocation: Allocation,
    energy: EnergyLimit | None,
    room: StoreRoom | None,
    allowance: Allowance,
    device: int,
) -> str:
    """Why the energy does not suffice for a device that would have trained otherwise."""
    offer = context.offers[device]
    path = allowance.supplies.path(offer.supply)
    if room is not None and (energy is None or room.stores.limits(offer.device_id, path)):
        step = int(allocation.step[device])
        needed_j, within_s = float(costs.set_aside_j[step]), costs.within_s(allocation.step)
        return room.shortage(offer.device_id, path, needed_j, within_s)
    assert energy is not None, "otherwise nothing limits its energy"
    return f"too much energy: this round may use {energy.share_j:.0f} of the {energy.left_j:.0f} J that are left"


def _is_limited(offer: Offer, allowance: Allowance, stores: EnergyStores | None) -> bool:
    """Whether a battery or an energy budget of a supply limits a device."""
    return stores is not None and stores.limits(offer.device_id, allowance.supplies.path(offer.supply))


def _without_energy(
    offers: Sequence[Offer],
    excluded: Mapping[str, str],
    allowance: Allowance,
    headroom: Headroom,
    epochs: float,
    stores: EnergyStores,
) -> dict[str, str]:
    """The devices that their batteries or the energy budgets of their supplies do not suffice for, with the reasons.

    Raises:
        EnergySpentError: they will never suffice for any known device, one that cannot be selected now included.
    """
    costs = TrainingCosts.of(offers, FrontTable.of(offers), epochs)
    room = stores.room(offers, headroom, allowance.supplies.names)
    is_short = np.zeros(len(offers), dtype=np.bool_)
    is_short[costs.owner] = True
    is_short[costs.owner[room.suffices(costs.owner, costs.set_aside_j, costs.longest_s)]] = False
    found: dict[str, str] = {}
    is_hopeless, least_j = bool(is_short.all()), math.inf
    for k in map(int, np.flatnonzero(is_short)):
        steps = np.flatnonzero(costs.owner == k)
        cheapest = steps[np.argmin(costs.set_aside_j[steps])]
        needed_j, within_s = float(costs.set_aside_j[cheapest]), float(costs.longest_s[cheapest])
        device_id, path = offers[k].device_id, allowance.supplies.path(offers[k].supply)
        if device_id not in excluded:
            found[device_id] = room.shortage(device_id, path, needed_j, within_s)
        is_hopeless = is_hopeless and room.is_hopeless(device_id, path, needed_j, within_s)
        least_j = min(least_j, needed_j)
    # Devices that are busy or offline are no offers. They count as thrifty as the thriftiest of these.
    away = stores.paths.keys() - {offer.device_id for offer in offers} if is_hopeless else ()
    if is_hopeless and all(room.is_hopeless(each, stores.paths[each], least_j, 0.0) for each in away):
        raise EnergySpentError(f"no device has the energy for a training: {_some_reasons(found)}")
    return found


def _some_reasons(reasons: Mapping[str, str]) -> str:
    return first_few([f"{device_id}: {reason}" for device_id, reason in reasons.items()], "; ")


def _require_usable(offers: Sequence[Offer]) -> None:
    """Check the devices of a round."""
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


def assignment_at(
    offer: Offer, curves: Curves, step: int, epochs: float, costs: TrainingCosts | None = None
) -> Assignment:
    """The assignment of a device at a step of its power curve.

    Args:
        offer: the device.
        curves: power curves of a training of `epochs` local epochs.
        step: index of the step.
        epochs: local epochs of the device.
        costs: the energy at the steps; None if nothing limits the device's energy.
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
        idle_w=0.0 if costs is None else offer.idle_w,
        longest_s=None if costs is None else float(costs.longest_s[step]),
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
