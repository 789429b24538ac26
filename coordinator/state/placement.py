"""Where devices hang, and what the operator states of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wattfleet.budgets import Supplies
from wattfleet.errors import InvalidInputError


@dataclass(frozen=True)
class DeviceRules:
    """What the operator states of one device.

    Attributes:
        limit_w: watts that it may draw at most; None for no limit of its own.
        tags: words to tell devices by.
    """

    limit_w: float | None = None
    tags: frozenset[str] = frozenset()


class Placement(Protocol):
    """Where devices hang, and what the operator states of them."""

    def supply_of(self, device_id: str) -> str:
        """The supply that a device hangs behind.

        Raises:
            InvalidInputError: it cannot be told.
        """
        ...

    def rules_of(self, device_id: str) -> DeviceRules:
        """What is stated of a device."""
        ...


@dataclass(frozen=True)
class OnlySite:
    """All devices hang behind the only site, and nothing more is stated of any."""

    supplies: Supplies

    def __post_init__(self) -> None:
        if len(self.supplies.roots) > 1:
            raise InvalidInputError("with several sites, say which devices hang behind each")

    def supply_of(self, device_id: str) -> str:
        """The site's own supply."""
        return self.supplies.roots[0]

    def rules_of(self, device_id: str) -> DeviceRules:
        """No rules."""
        return DeviceRules()
