"""The policy `random`: a uniform random draw, as in plain federated averaging."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wattfleet.planning.policies.policy import (
    PlanningContext,
    SelectionRequest,
    only_devices,
    require_count,
    require_seed,
)


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
