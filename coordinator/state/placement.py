"""Which supply each device is behind, and the operator's rules for single devices."""

from __future__ import annotations

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
