"""Shares out watts that no round needs: which devices measure power modes, in which mode, with how many watts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from wattfleet.core.planning.curves import Curves, Headroom, Indices, Offer, Values, curves_of
from wattfleet.core.planning.plan import assignment_at
from wattfleet.core.planning.round_plan import Allowance, Assignment

_USEFUL_SHARE = 0.5
"""Share of a device's modes that its watts should allow. With only the lowest ones, a predictor learns little."""


_ROUNDING_MW = 0.1


def plan_measuring(offers: Sequence[Offer], allowance: Allowance, epochs: float) -> list[Assignment]:
    """Choose the devices that measure now, and share out the watts that are left.

    Devices that have measured the fewest modes come first, and among them those that need the fewest watts. Each gets
    watts for half of its modes, as long as its supplies have them. What remains then goes to the same devices in the
    same order, up to the watts of their hungriest modes. If not even the first device can have half of its modes, the
    devices get their lowest-power modes.

    Args:
        offers: the devices that should measure, each once.
        allowance: power of the supplies, and what everything else draws there.
        epochs: local epochs of the training that is measured.

    Returns:
        The assignments of the chosen devices, by id. `mode` is the fastest one within the watts.

    Raises:
        InvalidInputError: a supply is unknown.
    """
    offers = sorted(offers, key=lambda offer: offer.device_id)
    if not offers:
        return []
    curves, headroom = curves_of(offers, epochs), allowance.headroom(offers)
    modes = np.array([offer.profiled_modes for offer in offers])
    useful_w = np.array([_useful_w(curves, k) for k in range(len(offers))])
    for wanted_w in (useful_w, curves.min_extra_w):
        order = np.lexsort((wanted_w, modes))
        given_w = _given(wanted_w, order, curves, headroom)
        if (given_w >= 0).any():
            break
    return [_assignment(offer, curves, k, given_w[k], epochs) for k, offer in enumerate(offers) if given_w[k] >= 0]


def _useful_w(curves: Curves, device: int) -> float:
    """Watts above idle that allow a device `_USEFUL_SHARE` of its steps; infinite if it has none."""
    watts = curves.extra_w[curves.start[device] : curves.start[device + 1]]
    return float(watts[int(len(watts) * (1 - _USEFUL_SHARE))]) if len(watts) else np.inf


def _given(wanted_w: Values, order: Indices, curves: Curves, headroom: Headroom) -> Values:
    """`[n]` watts above idle that each device gets; -1 for devices that measure nothing now."""
    given_w = np.full(len(order), -1.0)
    left_w = headroom.spare_w.copy()

    def room_w(device: int) -> float:
        path = headroom.supply_at[:, device]
        return float(left_w[path[path >= 0]].min())

    def give(device: int, watts: float) -> None:
        path = headroom.supply_at[:, device]
        left_w[path[path >= 0]] -= watts

    for k in map(int, order):
        if wanted_w[k] <= room_w(k):
            given_w[k] = wanted_w[k]
            give(k, wanted_w[k])
    for k in map(int, order):
        if given_w[k] >= 0:
            # In whole milliwatts, so that no sum exceeds a budget by rounding.
            room = math.floor(room_w(k) * 1e3 - _ROUNDING_MW) / 1e3
            more_w = min(float(curves.extra_w[curves.start[k]]) - given_w[k], room)
            if more_w > 0:
                given_w[k] += more_w
                give(k, more_w)
    return given_w


def _assignment(offer: Offer, curves: Curves, device: int, given_w: float, epochs: float) -> Assignment:
    """The assignment of a device in its fastest mode within some watts above idle."""
    first, last = int(curves.start[device]), int(curves.start[device + 1])
    step = first + int(np.flatnonzero(curves.extra_w[first:last] <= given_w + 1e-9)[0])
    planned = assignment_at(offer, curves, step, epochs)
    # The device may measure every mode within these watts, not only the one that it trains in.
    return planned.with_limit(float(offer.idle_w + given_w))
