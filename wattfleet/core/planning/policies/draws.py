"""Policies that select a given number of devices."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning.policies.policy import (
    PlanningContext,
    SelectionRequest,
    any_devices,
    only_devices,
    require_count,
    require_seed,
)

# --- Fastest k --------------------------------------------------------------------------------------------------------
# The policies `fastest-k` and `all`: the devices with the least makespan.


@dataclass(frozen=True)
class FastestK:
    """Selects the `count` devices with the least makespan within the budgets.

    Attributes:
        count: number of devices in a round; None for half the fleet, rounded up.
    """

    count: int | None = None
    name: str = "fastest-k"
    has_count: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count(self.count)

    def request(self, context: PlanningContext) -> SelectionRequest:
        """Request any `count` devices."""
        return any_devices(context, self.count)


@dataclass(frozen=True)
class AllDevices:
    """Selects as many devices as the budgets allow."""

    name: str = "all"
    has_count: ClassVar[bool] = False

    def request(self, context: PlanningContext) -> SelectionRequest:
        """Request all devices."""
        return any_devices(context, len(context.offers))


# --- Fair -------------------------------------------------------------------------------------------------------------
# The policy `fair`: least makespan, with a minimum participation of every device.


@dataclass(frozen=True)
class Fair:
    """Selects the devices with the least makespan, with a floor for how often each device participates.

    Every round gives priority to the devices furthest below the floor, as many as are needed to keep all devices at
    the floor. The other places go to the devices with the least makespan.

    Attributes:
        count: number of devices in a round; None for half the fleet, rounded up.
        floor: minimum share of the rounds that every device participates in; None for half of an even share.
    """

    count: int | None = None
    floor: float | None = None
    name: str = "fair"
    has_count: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count(self.count)
        if self.floor is not None and not 0 <= self.floor <= 1:
            raise InvalidInputError(f"the participation floor must be a share of 0 to 1, not {self.floor}")

    def request(self, context: PlanningContext) -> SelectionRequest:
        """Request any devices, with priority for those below the floor."""
        request = any_devices(context, self.count)
        n = len(context.offers)
        floor = request.count / n / 2 if self.floor is None else self.floor
        completed = context.history.times_completed
        deficit = np.array([floor * context.server_round - completed.get(o.device_id, 0) for o in context.offers])
        places = min(request.count, math.ceil(floor * n))
        below_floor = [int(k) for k in np.argsort(-deficit, kind="stable")[:places] if deficit[k] > 0]
        request.priority[below_floor] = True
        return SelectionRequest(
            request.count,
            request.eligible,
            request.priority,
            selection_reasons={
                k: f"with priority, since it completed {completed.get(context.offers[k].device_id, 0)} of"
                f" {context.server_round - 1} rounds and the floor is {floor:.0%}"
                for k in below_floor
            },
        )


# --- Random k ---------------------------------------------------------------------------------------------------------
# The policy `random`: a uniform random draw, as in plain federated averaging.


@dataclass(frozen=True)
class RandomK:
    """Draws `count` devices uniformly at random. The budgets still apply.

    Attributes:
        count: number of devices in a round; None for half the fleet, rounded up.
        seed: seed of the draws.
    """

    count: int | None = None
    seed: int = 0
    name: str = "random"
    has_count: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count(self.count)
        require_seed(self.seed)

    def request(self, context: PlanningContext) -> SelectionRequest:
        """Request the drawn devices only."""
        n = len(context.offers)
        count = context.places(self.count, n)
        drawn = np.zeros(n, dtype=np.bool_)
        drawn[random.Random(f"{self.seed}/{context.server_round}").sample(range(n), count)] = True
        return only_devices(drawn, "drawn at random", "not drawn")


# --- Tiers ------------------------------------------------------------------------------------------------------------
# The policy `tiers`: devices of similar speed train together.

_MAX_SHARE = 2.0


@dataclass(frozen=True)
class Tiers:
    """Draws the devices of a round from one tier of similarly fast devices (TiFL, arXiv 2001.09249).

    The tier is drawn in proportion to its devices' mean loss, so tiers that learn less well train more often. No tier
    trains more than `_MAX_SHARE` times its even share (TiFL's credits).

    Attributes:
        count: number of devices in a round; None for half of the tier, rounded up.
        tiers: number of tiers; at most the number of devices is used.
        seed: seed of the draws.
    """

    count: int | None = None
    tiers: int = 5
    seed: int = 0
    name: str = "tiers"
    has_count: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count(self.count)
        require_seed(self.seed)
        if self.tiers < 1:
            raise InvalidInputError(f"the number of tiers must be 1 or more, not {self.tiers}")

    def request(self, context: PlanningContext) -> SelectionRequest:
        """Request some devices of one tier."""
        n = len(context.offers)
        by_speed = np.argsort(context.curves.fastest_s, kind="stable")
        members = [part for part in np.array_split(by_speed, min(self.tiers, n)) if len(part)]
        draw = np.random.default_rng([self.seed, context.server_round])
        tier = int(draw.choice(len(members), p=self._chances(context, members)))
        count = context.places(self.count, len(members[tier]))
        eligible = np.zeros(n, dtype=np.bool_)
        eligible[draw.choice(members[tier], count, replace=False)] = True
        tier_of = {int(k): number for number, devices in enumerate(members, 1) for k in devices}
        exclusion_reasons = {
            k: f"not drawn from its tier {tier + 1}"
            if tier_of[k] == tier + 1
            else f"in tier {tier_of[k]}, but this round draws from tier {tier + 1}"
            for k in map(int, np.flatnonzero(~eligible))
        }
        return only_devices(eligible, f"drawn from tier {tier + 1}", exclusion_reasons)

    def _chances(self, context: PlanningContext, members: list[np.ndarray]) -> np.ndarray:
        tier_of = {context.offers[k].device_id: tier for tier, part in enumerate(members) for k in part}
        turns = Counter[int]()
        for past in context.history.rounds:
            seen = Counter(tier_of[device_id] for device_id in past.device_ids if device_id in tier_of)
            if seen:
                turns[seen.most_common(1)[0][0]] += 1
        most = _MAX_SHARE * (sum(turns.values()) / len(members)) + 1
        losses = [
            [loss for k in part if (loss := context.history.loss_of(context.offers[k].device_id)) is not None]
            for part in members
        ]
        known = all(losses)
        chances = np.array(
            [
                0.0 if turns[tier] >= most else max(float(np.mean(losses[tier])), 1e-9) if known else 1.0
                for tier in range(len(members))
            ]
        )
        return np.asarray(chances / chances.sum())
