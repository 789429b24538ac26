"""Which supply each device is behind, and the operator's rules for single devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from wattfleet.budgets import Supplies
from wattfleet.errors import InvalidInputError


@dataclass(frozen=True)
class DeviceRules:
    """The operator's rules for one device.

    Attributes:
        limit_w: watts that it may draw at most; None for no own limit.
        tags: words by which rules select devices.
    """

    limit_w: float | None = None
    tags: frozenset[str] = frozenset()


class Placement(Protocol):
    """Which supply each device is behind, and its rules."""

    def supply_of(self, device_id: str) -> str:
        """The supply that a device is behind.

        Raises:
            InvalidInputError: the site file does not tell.
        """
        ...

    def rules_of(self, device_id: str) -> DeviceRules:
        """The rules for a device."""
        ...


@dataclass(frozen=True)
class OnlySite:
    """All devices are behind the only site, and none has rules."""

    supplies: Supplies

    def __post_init__(self) -> None:
        if len(self.supplies.roots) > 1:
            raise InvalidInputError("with several sites, a site file has to place every device behind one of them")

    def supply_of(self, device_id: str) -> str:
        """The only site's supply."""
        return self.supplies.roots[0]

    def rules_of(self, device_id: str) -> DeviceRules:
        """No rules."""
        return DeviceRules()


class AssignedPlacement:
    """A placement in which single devices were put behind a supply by their invite."""

    def __init__(self, placement: Placement, supplies: Supplies, assigned: Mapping[str, str]) -> None:
        """Put some devices behind other supplies.

        Args:
            placement: that of all other devices, and the rules of all.
            supplies: the site's supplies; an assignment to one that is gone does not count.
            assigned: supply by device id.
        """
        self._placement = placement
        self._supplies = supplies
        self._assigned = dict(assigned)

    def supply_of(self, device_id: str) -> str:
        """The supply that a device was put behind, or else that of the site file."""
        supply = self._assigned.get(device_id)
        return supply if supply in self._supplies.names else self._placement.supply_of(device_id)

    def rules_of(self, device_id: str) -> DeviceRules:
        """The site file's rules for a device."""
        return self._placement.rules_of(device_id)

    def assign(self, device_id: str, supply: str) -> None:
        """Put a device behind a supply; empty to leave it to the site file."""
        self._assigned[device_id] = supply

    def copy(self) -> AssignedPlacement:
        """An independent copy."""
        return AssignedPlacement(self._placement, self._supplies, self._assigned)
