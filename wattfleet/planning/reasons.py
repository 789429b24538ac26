"""The reason why each device was or was not selected, as text for operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from wattfleet.planning.curves import Curves
from wattfleet.planning.makespan import Allocation
from wattfleet.planning.policies.policy import PlanningContext, SelectionRequest
from wattfleet.planning.round_plan import Decision


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
