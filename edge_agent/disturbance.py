"""What spoils a measurement: a board that gets too hot, or that slows itself down."""

from __future__ import annotations

from dataclasses import dataclass

from edge_agent.devices.device import Device
from wattfleet.errors import InvalidInputError, WattfleetError

_LOOK_AGAIN_S = 2.0


class DisturbedError(WattfleetError):
    """The board got too hot or throttled itself: what was measured meanwhile is not the mode's."""


class TooHotError(WattfleetError):
    """The board did not cool down in time: give it air, raise the temperature limit, or wait longer."""


@dataclass(frozen=True)
class Limits:
    """What a board may suffer while it is measured.

    Attributes:
        temperature_c: the hottest that a junction may get, degrees Celsius. Boards slow down near 95.
        cool_c: measuring goes on once it is cooler than this, degrees Celsius.
        cooling_patience_s: how long to wait for that, s.
        attempts: how often a disturbed mode is tried in all.

    Raises:
        InvalidInputError: a number is out of range.
    """

    temperature_c: float = 85.0
    cool_c: float = 70.0
    cooling_patience_s: float = 900.0
    attempts: int = 3

    def __post_init__(self) -> None:
        if not self.cool_c < self.temperature_c or not self.cooling_patience_s >= 0 or self.attempts < 1:
            raise InvalidInputError(
                "a profile needs a temperature to cool to below its limit, 0 s of patience and 1 attempt, not"
                f" {self.cool_c:g} and {self.temperature_c:g} degrees, {self.cooling_patience_s:g} and {self.attempts}"
            )


USUAL_LIMITS = Limits()


class Guard:
    """Looks after one measurement, from its beginning on.

    Args:
        device: the board.
        limits: what it may suffer.
    """

    def __init__(self, device: Device, limits: Limits) -> None:
        self._device = device
        self._limits = limits
        self._throttled_before = device.conditions().throttle_events

    def check(self) -> None:
        """Make sure that nothing has disturbed the measurement; what a board does not tell is not held against it.

        Raises:
            DisturbedError: it got too hot, or has throttled itself since the beginning.
        """
        now = self._device.conditions()
        if now.temperature_c is not None and now.temperature_c > self._limits.temperature_c:
            raise DisturbedError(f"{now.temperature_c:.0f} degrees, above the limit of {self._limits.temperature_c:g}")
        before = self._throttled_before
        if now.throttle_events is not None and before is not None and now.throttle_events > before:
            raise DisturbedError(f"the board throttled itself, {now.throttle_events - before} times")


def wait_until_cool(device: Device, limits: Limits) -> None:
    """Let a board rest until it is cool enough to be measured.

    Raises:
        TooHotError: it did not get there within the patience.
    """
    give_up_s = device.clock.now_s() + limits.cooling_patience_s
    while (temperature_c := device.conditions().temperature_c) is not None and temperature_c >= limits.cool_c:
        if device.clock.now_s() >= give_up_s:
            raise TooHotError(
                f"still at {temperature_c:.0f} degrees after {limits.cooling_patience_s:g} s of rest; below"
                f" {limits.cool_c:g} is needed: give the board air, or raise the limits"
            )
        device.clock.sleep_s(_LOOK_AGAIN_S)
