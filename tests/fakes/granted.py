"""Tracks what one device was granted, independently of the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.state.records import DeviceResult
from wattfleet.planning import Assignment


@dataclass
class Granted:
    """A device's part in the newest round that chose it.

    Attributes:
        told_w: the newest limit; 0 if it has to stop.
        had_w: the highest earlier limit that it may still follow.
    """

    run: str
    plan_id: str
    told_w: float
    had_w: float = 0.0
    was_sent: bool = False
    is_confirmed: bool = False
    has_begun: bool = False
    is_given_up: bool = False
    is_over: bool = False

    def tell(self, watts: float) -> None:
        """Replace the newest limit by another one."""
        if self.was_sent:
            self.had_w = max(self.had_w, self.told_w)
        self.told_w, self.was_sent, self.is_confirmed = watts, False, False

    def give_up(self) -> None:
        """Record that nobody waits for the device any more."""
        if self.is_over or self.is_given_up:
            return
        self.is_given_up = True
        if not self.was_sent and not self.had_w:
            self.is_over = True
        elif not self.has_begun and self.told_w:
            self.tell(0.0)

    @property
    def counted_w(self) -> float:
        """The power that it may draw beyond idling."""
        return 0.0 if self.is_over else max(self.told_w, self.had_w)


def late_results(device_ids: Iterable[str]) -> list[DeviceResult]:
    """Results of devices that a round did not wait for."""
    return [DeviceResult(device_id, late=True) for device_id in device_ids]


def limits_w(assignments: Iterable[Assignment]) -> dict[str, float]:
    """The power limit of each device of a plan, in watts."""
    return {each.device_id: each.power_limit_w for each in assignments}
