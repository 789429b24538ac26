"""Why a device was or was not chosen, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from wattfleet.planning.makespan import Allocation
from wattfleet.planning.policies.policy import Situation, Wish
from wattfleet.planning.round_plan import Decision


def decisions(
    situation: Situation,
    wish: Wish,
    allocation: Allocation,
    supplies: Sequence[str],
    refused: Mapping[str, str],
) -> tuple[Decision, ...]:
    """One decision for every device, by id.

    Args:
        situation: the devices that could be chosen.
        wish: whom the policy wanted.
        allocation: who was.
        supplies: names, by index.
        refused: why the other devices could not be chosen.
    """
    found = [Decision(device_id, False, reason) for device_id, reason in refused.items()]
    found += _chosen(situation, wish, allocation)
    found += _not_chosen(situation, wish, allocation, supplies)
    return tuple(sorted(found, key=lambda decision: decision.device_id))


def _chosen(situation: Situation, wish: Wish, allocation: Allocation) -> Iterator[Decision]:
    chosen = np.flatnonzero(allocation.step >= 0)
    limit_s = allocation.limit_s
    devices = "1 device" if len(chosen) == 1 else f"{len(chosen)} devices"
    short = f" (the watts carry {devices}, not {wish.count})" if len(chosen) < wish.count else ""
    others = [k for k in map(int, chosen) if k not in wish.because]
    soonest = "the one that finishes soonest"
    if len(others) > 1:
        soonest = f"one of the {len(others)} that together finish soonest"
    if in_turn := len(chosen) - len(others):
        soonest += f" beside the {in_turn} in turn"
    for k in map(int, chosen):
        extra_w = float(situation.curves.extra_w[allocation.step[k]])
        why = wish.because.get(k, soonest)
        yield Decision(
            situation.offers[k].device_id,
            True,
            f"{why}: done within {limit_s:.1f} s for {extra_w:.1f} W above idling{short}",
        )


def _not_chosen(
    situation: Situation, wish: Wish, allocation: Allocation, supplies: Sequence[str]
) -> Iterator[Decision]:
    curves, headroom = situation.curves, situation.headroom
    limit_s = allocation.limit_s
    extra_w = curves.extra_at(curves.steps_within(allocation.limit_s))
    fastest_s = curves.fastest_s
    chosen = np.flatnonzero(allocation.step >= 0)
    left_w = headroom.spare_w - headroom.drawn_w(extra_w, chosen)
    dearest_w = float(extra_w[chosen[~wish.first[chosen]]].max(initial=-np.inf))
    for k in map(int, np.flatnonzero(allocation.step < 0)):
        needs = f"too hungry: {limit_s:.1f} s would take it {extra_w[k]:.1f} W above idling"
        lacking = [supply for supply in headroom.above[::-1, k] if supply >= 0 and extra_w[k] > left_w[supply]]
        if not wish.eligible[k]:
            reason = wish.aside[k]
        elif not np.isfinite(extra_w[k]):
            reason = f"too slow: {fastest_s[k]:.1f} s in its fastest mode, the round lasts {limit_s:.1f} s"
        elif lacking:
            reason = f"{needs}, which {supplies[lacking[0]]} cannot carry beside the others"
        elif np.isfinite(dearest_w):
            reason = f"{needs}, the chosen ones need {dearest_w:.1f} W at most"
        else:
            reason = "not needed: all that were chosen are in their turn"
        yield Decision(situation.offers[k].device_id, False, reason)
