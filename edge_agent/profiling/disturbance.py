"""What spoils a measurement: a board that gets too hot, or that slows itself down."""

from __future__ import annotations

from dataclasses import dataclass

from edge_agent.devices.device import Device
from wattfleet.errors import InvalidInputError, WattfleetError

_LOOK_AGAIN_S = 2.0
# A sensor that cannot be read once or twice is busy; one that cannot at so many looks in a row is gone.
_LOOKS_WITHOUT = 3


class DisturbedError(WattfleetError):
    """The board got too hot or throttled itself, or stopped telling: what was measured may not be the mode's."""


class OverloadedError(DisturbedError):
    """The mode was too much for the board: it got too hot, or throttled itself."""


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
        self._before = device.conditions()
        self._without_temperature = 0
        self._without_throttling = 0

    @property
    def temperature_known(self) -> bool:
        """Whether the board told its temperature at the beginning."""
        return self._before.temperature_c is not None

    def check(self) -> None:
        """Make sure that nothing has disturbed the measurement; what a board never told is not held against it.

        Raises:
            OverloadedError: it got too hot, or has throttled itself since the beginning.
            DisturbedError: it no longer tells what it did.
        """
        now = self._device.conditions()
        if now.temperature_c is not None and now.temperature_c > self._limits.temperature_c:
            raise OverloadedError(f"{now.temperature_c:.0f} degrees, above the limit of {self._limits.temperature_c:g}")
        before = self._before.throttle_events
        if now.throttle_events is not None and before is not None and now.throttle_events > before:
            raise OverloadedError(f"the board throttled itself, {now.throttle_events - before} times")
        self._without_temperature = 0 if now.temperature_c is not None else self._without_temperature + 1
        if self.temperature_known and self._without_temperature >= _LOOKS_WITHOUT:
            raise DisturbedError("the temperature sensor is gone: it cannot be read any more")
        self._without_throttling = 0 if now.throttle_events is not None else self._without_throttling + 1
        if before is not None and self._without_throttling >= _LOOKS_WITHOUT:
            raise DisturbedError("the throttle counter is gone: it cannot be read any more")


def is_cool(temperature_c: float | None, limits: Limits, known_before: bool) -> bool:
    """Whether a board may be measured again.

    Args:
        temperature_c: its temperature now; None where it does not say.
        limits: what it may suffer.
        known_before: whether it once said: silence is no sign of coolness then.
    """
    return not known_before if temperature_c is None else temperature_c < limits.cool_c


def wait_until_cool(device: Device, limits: Limits, known_before: bool = False) -> None:
    """Let a board rest until it is cool enough to be measured.

    Args:
        device: the board.
        limits: what it may suffer.
        known_before: whether it has told its temperature before; if so, it has to tell it again.

    Raises:
        TooHotError: it did not get there within the patience, or did not say so.
    """
    give_up_s = device.clock.now_s() + limits.cooling_patience_s
    while not is_cool(temperature_c := device.conditions().temperature_c, limits, known_before):
        if device.clock.now_s() >= give_up_s:
            found = "no temperature can be read" if temperature_c is None else f"still at {temperature_c:.0f} degrees"
            raise TooHotError(
                f"{found} after {limits.cooling_patience_s:g} s of rest; below"
                f" {limits.cool_c:g} is needed: give the board air, or raise the limits"
            )
        known_before = known_before or temperature_c is not None
        device.clock.sleep_s(_LOOK_AGAIN_S)
