"""Offers: the devices that are ready for a round, with their fronts and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wattfleet.choosing import MAX_POWER_W, Front
from wattfleet.errors import ImplausibleError, InvalidInputError

SITE = "site"
"""Name of the supply in a fleet that has only one."""


@dataclass(frozen=True)
class Offer:
    """One device that is ready for a round.

    Attributes:
        device_id: the device.
        front: its predicted front.
        idle_w: watts that it draws while idle.
        supply: the supply that feeds it.
        limit_w: the device's own power limit, W; None if only its supplies limit it.
        tags: tags that the operator can select it by.
        batch: samples in a batch that the front holds for; None if they are unknown.
        profiled_modes: number of modes that the device has measured with the workload; 0 if the front is a prior.
        is_length_assumed: whether the number of minibatches in the device's epoch is unknown, and the front uses an
            assumed number.
    """

    device_id: str
    front: Front
    idle_w: float
    supply: str = SITE
    limit_w: float | None = None
    tags: frozenset[str] = frozenset()
    batch: int | None = None
    profiled_modes: int = 0
    is_length_assumed: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.idle_w) and self.idle_w >= 0):
            raise InvalidInputError(f"{self.device_id}: idle watts must be finite and 0 or more, not {self.idle_w}")
        if self.idle_w > MAX_POWER_W:
            raise ImplausibleError(
                f"{self.device_id}: idle watts must not be more than {MAX_POWER_W:,.0f} W, not {self.idle_w:g} W"
            )
        if self.limit_w is not None and not (math.isfinite(self.limit_w) and self.limit_w > 0):
            raise InvalidInputError(f"{self.device_id}: a device's limit must be above 0 W, not {self.limit_w}")
