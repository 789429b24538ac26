"""What devices bring to a round."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wattfleet.choosing import Front
from wattfleet.errors import InvalidInputError

SITE = "site"
"""The supply of a fleet that has only one."""


@dataclass(frozen=True)
class Offer:
    """What one device brings to a round.

    Attributes:
        device_id: the device.
        front: its predicted front.
        idle_w: watts that it draws while parked.
        supply: the supply that it hangs behind.
        limit_w: watts that it may draw itself; None where nothing but its supplies bounds it.
        tags: words by which it can be chosen.
    """

    device_id: str
    front: Front
    idle_w: float
    supply: str = SITE
    limit_w: float | None = None
    tags: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.idle_w) and self.idle_w >= 0):
            raise InvalidInputError(f"{self.device_id}: idle watts must be finite and not negative, not {self.idle_w}")
        if self.limit_w is not None and not (math.isfinite(self.limit_w) and self.limit_w > 0):
            raise InvalidInputError(f"{self.device_id}: a device's limit must be above zero watts, not {self.limit_w}")
