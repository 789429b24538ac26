"""The policy `fair`: least makespan, with a minimum participation of every device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wattfleet.errors import InvalidInputError
from wattfleet.planning.policies.policy import PlanningContext, SelectionRequest, any_devices, require_count


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
