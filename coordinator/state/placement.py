"""The supply that each device is behind, and the operator's rules for individual devices."""

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
        limit_w: the most watts that it may draw; None if it has no limit of its own.
        tags: words that rules use to select devices.
    """

    limit_w: float | None = None
    tags: frozenset[str] = frozenset()


class Placement(Protocol):
    """The supply that each device is behind, and its rules."""

    def supply_of(self, device_id: str) -> str:
        """The supply that a device is behind.

        Raises:
            InvalidInputError: the site file does not place the device.
        """
        ...

    def rules_of(self, device_id: str) -> DeviceRules:
        """The rules for a device."""
        ...


@dataclass(frozen=True)
class OnlySite:
    """A placement with all devices behind the only site, and without rules."""

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
    """A placement in which an invite put some devices behind another supply."""

    def __init__(self, placement: Placement, supplies: Supplies, assigned: Mapping[str, str]) -> None:
        """Place some devices behind other supplies.

        Args:
            placement: the placement of all other devices, and the rules of all devices.
            supplies: the site's supplies; an assignment to a missing supply is ignored.
            assigned: device id -> supply.
        """
        self._placement = placement
        self._supplies = supplies
        self._assigned = dict(assigned)

    def supply_of(self, device_id: str) -> str:
        """The supply assigned to a device, or else that of the site file."""
        supply = self._assigned.get(device_id)
        return supply if supply in self._supplies.names else self._placement.supply_of(device_id)

    def rules_of(self, device_id: str) -> DeviceRules:
        """The site file's rules for a device."""
        return self._placement.rules_of(device_id)

    def assign(self, device_id: str, supply: str) -> None:
        """Place a device behind a supply; an empty name leaves the choice to the site file."""
        if supply:
            self._assigned[device_id] = supply
        else:
            self._assigned.pop(device_id, None)
