"""A uniform draw, as plain federated averaging makes it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wattfleet.planning.policies.policy import Situation, Wish, only, require_count, require_seed


@dataclass(frozen=True)
class RandomK:
    """A uniform draw of `count` devices; the watts still hold.

    Attributes:
        count: devices in a round; None takes half the fleet, rounded up.
        seed: of the draw.
    """

    count: int | None = None
    seed: int = 0
    name: str = "random"
    counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count(self.count)
        require_seed(self.seed)

    def wish(self, situation: Situation) -> Wish:
        """Only the drawn devices."""
        n = len(situation.offers)
        count = situation.seats(self.count, n)
        drawn = np.zeros(n, dtype=np.bool_)
        drawn[random.Random(f"{self.seed}/{situation.server_round}").sample(range(n), count)] = True
        return only(drawn, "drawn", "not drawn")
