"""Detects disturbed measurements: a board that gets too hot or throttles itself."""

from __future__ import annotations

from dataclasses import dataclass

from edge_agent.devices.device import Device
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_proto.hot_boards import HOT_C

_CHECK_EVERY_S = 2.0
# A sensor may be busy once or twice; after this many failed reads in a row, it counts as lost.
_FAILED_READS = 3


class DisturbedError(WattfleetError):
    """The board got too hot, throttled or stopped reporting, so the measurement may be wrong for its mode."""


class OverloadedError(DisturbedError):
    """The mode overloaded the board: it got too hot or throttled."""


class TooHotError(WattfleetError):
    """The board did not cool down in time; improve its cooling, raise the temperature limit, or wait longer."""


@dataclass(frozen=True)
class Limits:
    """Temperature limits and retries while a board is measured.

    Attributes:
        temperature_c: the highest allowed junction temperature, degrees Celsius. Boards throttle near 95.
        cool_c: measuring continues below this temperature, degrees Celsius.
        cooling_patience_s: how long to wait for the board to cool, s.
        attempts: total number of attempts to measure a disturbed mode.

    Raises:
        InvalidInputError: a number is out of range.
    """

    temperature_c: float = HOT_C
    cool_c: float = 70.0
    cooling_patience_s: float = 900.0
    attempts: int = 3

    def __post_init__(self) -> None:
        if not self.cool_c < self.temperature_c or not self.cooling_patience_s >= 0 or self.attempts < 1:
            raise InvalidInputError(
                "a profile needs a temperature to cool to below its limit, at least 0 s of patience and at least 1 "
                "attempt, not"
                f" {self.cool_c:g} and {self.temperature_c:g} degrees, {self.cooling_patience_s:g} and {self.attempts}"
            )


DEFAULT_LIMITS = Limits()


class Guard:
    """Watches one measurement for disturbances.

    Args:
        device: the board.
        limits: the limits to keep.
    """

    def __init__(self, device: Device, limits: Limits) -> None:
        self._device = device
        self._limits = limits
        self._before = device.conditions()
        self._without_temperature = 0
        self._without_throttling = 0

    @property
    def temperature_known(self) -> bool:
        """Whether the board reported its temperature at the start."""
        return self._before.temperature_c is not None

    def check(self) -> None:
        """Check that nothing has disturbed the measurement; ignore values that the board never reported.

        Raises:
            OverloadedError: the board got too hot, or has throttled since the start. DisturbedError: the board stopped
                reporting a value.
        """
        now = self._device.conditions()
        if now.temperature_c is not None and now.temperature_c > self._limits.temperature_c:
            raise OverloadedError(f"{now.temperature_c:.0f} degrees, above the limit of {self._limits.temperature_c:g}")
        before = self._before.throttle_events
        if now.throttle_events is not None and before is not None and now.throttle_events > before:
            raise OverloadedError(f"the board throttled {now.throttle_events - before} times")
        self._without_temperature = 0 if now.temperature_c is not None else self._without_temperature + 1
        if self.temperature_known and self._without_temperature >= _FAILED_READS:
            raise DisturbedError("the temperature sensor can no longer be read")
        self._without_throttling = 0 if now.throttle_events is not None else self._without_throttling + 1
        if before is not None and self._without_throttling >= _FAILED_READS:
            raise DisturbedError("the throttle counter can no longer be read")


def is_cool(temperature_c: float | None, limits: Limits, known_before: bool) -> bool:
    """Return whether a board may be measured again.

    Args:
        temperature_c: its current temperature; None if it does not report one.
        limits: the limits to keep.
        known_before: whether it reported a temperature before; if so, None does not count as cool.
    """
    return not known_before if temperature_c is None else temperature_c < limits.cool_c


def wait_until_cool(device: Device, limits: Limits, known_before: bool = False) -> None:
    """Wait until a board is cool enough to be measured.

    Args:
        device: the board.
        limits: the limits to keep.
        known_before: whether it reported its temperature before; if so, it must report it again.

    Raises:
        TooHotError: the board did not cool down within the patience, or did not report its temperature.
    """
    give_up_s = device.clock.now_s() + limits.cooling_patience_s
    while not is_cool(temperature_c := device.conditions().temperature_c, limits, known_before):
        if device.clock.now_s() >= give_up_s:
            found = (
                "the temperature cannot be read" if temperature_c is None else f"still at {temperature_c:.0f} degrees"
            )
            raise TooHotError(
                f"{found} after resting {limits.cooling_patience_s:g} s, not below"
                f" {limits.cool_c:g}; improve the board's cooling, or raise the limits"
            )
        known_before = known_before or temperature_c is not None
        device.clock.sleep_s(_CHECK_EVERY_S)
