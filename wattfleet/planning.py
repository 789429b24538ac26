"""Round plans: who trains in which mode, so that a site's watts hold and the slowest is done soonest.

The watts of a round are those of the chosen devices while they train, at a high quantile of what is predicted,
plus those of all others while they idle: they hang behind the same supply.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wattfleet.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.front import Front
from wattfleet.modes import PowerMode


@dataclass(frozen=True)
class Offer:
    """What one device brings to a round.

    Attributes:
        device_id: the device.
        front: its predicted front.
        idle_w: watts that it draws while parked.
    """

    device_id: str
    front: Front
    idle_w: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.idle_w) and self.idle_w >= 0):
            raise InvalidInputError(f"{self.device_id}: idle watts must be finite and not negative, not {self.idle_w}")


@dataclass(frozen=True)
class Assignment:
    """One chosen device's part in a round.

    Attributes:
        device_id: the device.
        mode: the power mode it trains in.
        epoch_s: predicted median seconds per epoch.
        power_w: predicted median watts.
        power_limit_w: watts set aside for it.
    """

    device_id: str
    mode: PowerMode
    epoch_s: float
    power_w: float
    power_limit_w: float


@dataclass(frozen=True)
class Decision:
    """Why a device was or was not chosen, in words."""

    device_id: str
    selected: bool
    reason: str


@dataclass(frozen=True)
class RoundPlan:
    """The plan of one round.

    Attributes:
        assignments: the chosen devices, by id.
        decisions: one for every device that was looked at, by id.
        duration_s: predicted seconds until the slowest chosen device is done.
        planned_w: watts set aside, idling devices included.
        site_budget_w: watts allowed.
    """

    assignments: tuple[Assignment, ...]
    decisions: tuple[Decision, ...]
    duration_s: float
    planned_w: float
    site_budget_w: float


class Policy(Protocol):
    """How many of the devices, and which, a round takes."""

    @property
    def name(self) -> str:
        """As it is written on command lines."""
        ...

    def candidates(self, offers: Sequence[Offer], server_round: int) -> tuple[list[Offer], int]:
        """The devices that may be chosen, and how many of them should be."""
        ...


@dataclass(frozen=True)
class FastestK:
    """The `count` devices that together finish soonest under the watts.

    Attributes:
        count: devices in a round; None takes half the fleet, rounded up.
    """

    count: int | None = None
    name: str = "fastest-k"

    def candidates(self, offers: Sequence[Offer], server_round: int) -> tuple[list[Offer], int]:
        """Every device may be chosen."""
        return list(offers), self.count or (len(offers) + 1) // 2


@dataclass(frozen=True)
class Everyone:
    """As many devices as the watts can carry."""

    name: str = "all"

    def candidates(self, offers: Sequence[Offer], server_round: int) -> tuple[list[Offer], int]:
        """Every device should be chosen."""
        return list(offers), len(offers)


@dataclass(frozen=True)
class RandomK:
    """A uniform draw of `count` devices, as plain federated averaging makes it; the watts still hold.

    Attributes:
        count: devices in a round; None takes half the fleet, rounded up.
        seed: of the draw.
    """

    count: int | None = None
    seed: int = 0
    name: str = "random"

    def candidates(self, offers: Sequence[Offer], server_round: int) -> tuple[list[Offer], int]:
        """Only the drawn devices may be chosen."""
        count = min(len(offers), self.count or (len(offers) + 1) // 2)
        by_id = sorted(offers, key=lambda offer: offer.device_id)
        return random.Random(f"{self.seed}/{server_round}").sample(by_id, count), count


POLICIES = ("fastest-k", "all", "random")


def policy(name: str, count: int | None = None, seed: int = 0) -> Policy:
    """The policy of a name.

    Args:
        name: one of `POLICIES`.
        count: devices in a round, where the policy takes a number; None leaves it to the policy.
        seed: of a random draw.

    Raises:
        InvalidInputError: no such policy, or a count it cannot use.
    """
    if count is not None and (count < 1 or name == "all"):
        raise InvalidInputError(f"policy {name!r} cannot take {count} devices in a round")
    if name == "fastest-k":
        return FastestK(count)
    if name == "all":
        return Everyone()
    if name == "random":
        return RandomK(count, seed)
    raise InvalidInputError(f"unknown policy {name!r}: choose one of {', '.join(POLICIES)}")


def plan_round(
    offers: Sequence[Offer],
    chosen_policy: Policy,
    site_budget_w: float,
    epochs: float,
    server_round: int,
    idle_elsewhere_w: float = 0.0,
) -> RoundPlan:
    """Plan one round: least duration under the site's watts for the number of devices the policy wants.

    If the watts cannot carry that many, as many as they can.

    Args:
        offers: the devices that are ready, each once.
        chosen_policy: who may be chosen, and how many.
        site_budget_w: watts for all devices of the site together, training or idle.
        epochs: local epochs that each chosen device trains.
        server_round: number of the round, from 1.
        idle_elsewhere_w: watts that the site's devices which are not offered idle at.

    Raises:
        InvalidInputError: no offers, a device twice, or a budget or number of epochs that is not above zero.
        InfeasibleBudgetError: the watts cannot carry one device; the text says how many would.
    """
    ids = [offer.device_id for offer in offers]
    if not offers or len(set(ids)) != len(ids):
        raise InvalidInputError("a round needs one or more devices, each once")
    if not (np.isfinite(site_budget_w) and site_budget_w > 0 and np.isfinite(epochs) and epochs > 0):
        raise InvalidInputError(f"a round needs watts and epochs above zero, not {site_budget_w} and {epochs}")
    candidates, wanted = chosen_policy.candidates(offers, server_round)
    wanted = min(wanted, len(candidates))
    idle_w = idle_elsewhere_w + sum(offer.idle_w for offer in offers)
    spare_w = site_budget_w - idle_w
    count = _carried(candidates, wanted, spare_w)
    if count == 0:
        least_w = idle_w + min(_least_extra_w(offer) for offer in candidates)
        raise InfeasibleBudgetError(
            f"{site_budget_w:g} W cannot carry one training device beside {idle_w:.1f} W of idling:"
            f" allow at least {math.ceil(least_w * 10) / 10:.1f} W"
        )
    epoch_limit_s, points = _soonest(candidates, count, spare_w)
    assignments = tuple(
        Assignment(
            device_id=offer.device_id,
            mode=offer.front.mode(point),
            epoch_s=float(offer.front.epoch_s[point]),
            power_w=float(offer.front.power_w[point]),
            power_limit_w=float(offer.front.planned_w[point]),
        )
        for offer in sorted(offers, key=lambda offer: offer.device_id)
        if (point := points.get(offer.device_id)) is not None
    )
    chosen_extra_w = {
        offer.device_id: float(offer.front.planned_w[points[offer.device_id]]) - offer.idle_w
        for offer in offers
        if offer.device_id in points
    }
    eligible = {offer.device_id for offer in candidates}
    return RoundPlan(
        assignments=assignments,
        decisions=tuple(
            _decision(offer, offer.device_id in eligible, epoch_limit_s, epochs, chosen_extra_w, (count, wanted))
            for offer in sorted(offers, key=lambda offer: offer.device_id)
        ),
        duration_s=epochs * max(assignment.epoch_s for assignment in assignments),
        planned_w=idle_w + sum(chosen_extra_w.values()),
        site_budget_w=site_budget_w,
    )


def _least_extra_w(offer: Offer) -> float:
    """Watts that training adds to idling at the front's thriftiest point."""
    return float(offer.front.planned_w[-1]) - offer.idle_w


def _carried(candidates: Sequence[Offer], wanted: int, spare_w: float) -> int:
    """How many devices, up to `wanted`, the spare watts can carry at all."""
    extra_w = np.cumsum(np.sort([_least_extra_w(offer) for offer in candidates])[:wanted])
    # Cumulative sums of extras need not rise: an idling draw may exceed the thriftiest mode's.
    carried = np.flatnonzero(extra_w <= spare_w)
    return int(carried[-1]) + 1 if len(carried) else 0


def _soonest(candidates: Sequence[Offer], count: int, spare_w: float) -> tuple[float, dict[str, int]]:
    """The least epoch time within which `count` devices can finish on the spare watts, and their points.

    For a given time each device needs the thriftiest point that meets it, and the cheapest devices are taken;
    this need falls as the time grows, so the least time is found by bisection over all points' times.
    """

    def cheapest(limit_s: float) -> tuple[float, dict[str, int]]:
        costs = []
        for offer in candidates:
            point = int(np.searchsorted(offer.front.epoch_s, limit_s, side="right")) - 1
            if point >= 0:
                extra_w = float(offer.front.planned_w[point]) - offer.idle_w
                costs.append((extra_w, offer.device_id, point))
        if len(costs) < count:
            return np.inf, {}
        costs.sort()
        return sum(cost for cost, _, _ in costs[:count]), {device: point for _, device, point in costs[:count]}

    limits_s = np.unique(np.concatenate([offer.front.epoch_s for offer in candidates]))
    low, high = 0, len(limits_s) - 1
    while low < high:
        middle = (low + high) // 2
        if cheapest(float(limits_s[middle]))[0] <= spare_w:
            high = middle
        else:
            low = middle + 1
    return float(limits_s[low]), cheapest(float(limits_s[low]))[1]


def _decision(
    offer: Offer,
    eligible: bool,
    epoch_limit_s: float,
    epochs: float,
    chosen_extra_w: dict[str, float],
    counts: tuple[int, int],
) -> Decision:
    """Say why a device was or was not chosen."""
    count, wanted = counts
    limit_s = epochs * epoch_limit_s
    if offer.device_id in chosen_extra_w:
        reason = (
            f"one of the {count} that together finish soonest: done within {limit_s:.1f} s"
            f" for {chosen_extra_w[offer.device_id]:.1f} W above idling"
        )
        if count < wanted:
            reason += f" (the watts carry {count} devices, not {wanted})"
        return Decision(offer.device_id, True, reason)
    if not eligible:
        return Decision(offer.device_id, False, "not drawn")
    point = int(np.searchsorted(offer.front.epoch_s, epoch_limit_s, side="right")) - 1
    if point < 0:
        quickest_s = epochs * float(offer.front.epoch_s[0])
        return Decision(
            offer.device_id,
            False,
            f"too slow: {quickest_s:.1f} s in its fastest mode, the round lasts {limit_s:.1f} s",
        )
    extra_w = float(offer.front.planned_w[point]) - offer.idle_w
    return Decision(
        offer.device_id,
        False,
        f"too hungry: {limit_s:.1f} s would take it {extra_w:.1f} W above idling,"
        f" the chosen ones need {max(chosen_extra_w.values()):.1f} W at most",
    )
