"""The devices that together finish soonest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wattfleet.planning.policies.policy import Situation, Wish, everyone_of, require_count


@dataclass(frozen=True)
class FastestK:
    """The `count` devices that together finish soonest under the watts.

    Attributes:
        count: devices in a round; None takes half the fleet, rounded up.
    """

    count: int | None = None
    name: str = "fastest-k"
    counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_count(self.count)

    def wish(self, situation: Situation) -> Wish:
        """Any devices."""
        return everyone_of(situation, self.count)


@dataclass(frozen=True)
class Everyone:
    """As many devices as the watts can carry."""

    name: str = "all"
    counts: ClassVar[bool] = False

    def wish(self, situation: Situation) -> Wish:
        """All devices."""
        return everyone_of(situation, len(situation.offers))
