"""The policies `fastest-k` and `all`: the devices with the least makespan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wattfleet.planning.policies.policy import PlanningContext, SelectionRequest, any_devices, require_count


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
