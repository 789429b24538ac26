"""The soonest done, but everybody's data counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wattfleet.errors import InvalidInputError
from wattfleet.planning.policies.policy import Situation, Wish, everyone_of, require_count


@dataclass(frozen=True)
class Fair:
    """The devices that are done soonest, with a floor under how often each takes part.

    Every round first takes those that are furthest behind the floor, as many as it takes to keep all of them up with
    it; the rest of the round goes to the devices that are done soonest.

    Attributes:
        count: devices in a round; None takes half the fleet, rounded up.
        floor: share of the rounds that every device takes part in; None for half of what an even draw would give it.
    """

    count: int | None = None
    floor: float | None = None
    name: str = "fair"
    counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count(self.count)
        if self.floor is not None and not 0 <= self.floor <= 1:
            raise InvalidInputError(f"a participation floor is a share of the rounds, 0 to 1, not {self.floor}")

    def wish(self, situation: Situation) -> Wish:
        """Any devices, those behind the floor first."""
        wish = everyone_of(situation, self.count)
        n = len(situation.offers)
        floor = wish.count / n / 2 if self.floor is None else self.floor
        done = situation.history.times_done
        behind = np.array([floor * situation.server_round - done.get(o.device_id, 0) for o in situation.offers])
        seats = min(wish.count, math.ceil(floor * n))
        owed = [int(k) for k in np.argsort(-behind, kind="stable")[:seats] if behind[k] > 0]
        wish.first[owed] = True
        return Wish(
            wish.count,
            wish.eligible,
            wish.first,
            because={
                k: f"its turn: {done.get(situation.offers[k].device_id, 0)} of {situation.server_round - 1} rounds,"
                f" the floor is {floor:.0%}"
                for k in owed
            },
        )
