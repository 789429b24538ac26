"""Live samples of a device's power, temperature and mode, with the prediction for that mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from edge_agent.devices.device import Device
from edge_agent.devices.meters.power_now import latest_power_mw
from edge_agent.devices.mode_names import mode_argument
from edge_agent.learning.expectation import Expectation, expectation_of
from edge_agent.profiling.stored_profile import FittedDevice
from wattfleet.errors import WattfleetError
from wattfleet.modes import PowerMode, array_to_modes

_REPLACE_METER_AFTER_S = 300.0
"""Replace the meter this often: it keeps all its samples and returns them at every read."""


@dataclass(frozen=True)
class Sample:
    """The state of a device at one moment.

    Attributes:
        at_s: seconds since the first sample, on the device's clock.
        mode: the current mode; None if it cannot be read.
        problem: why the mode cannot be read; None if it can.
        power_w: watts; None if a rail cannot be read (missing is not zero).
        temperature_c: the hottest junction, degrees Celsius; None if the board does not report it.
        throttled: throttle events since the first sample; None if the board does not count them.
        expected: measured or predicted training time and power in this mode; None if unknown.
    """

    at_s: float
    mode: PowerMode | None
    problem: str | None
    power_w: float | None
    temperature_c: float | None
    throttled: int | None
    expected: Expectation | None

    @property
    def power_ratio(self) -> float | None:
        """Current power as a share of the expected training power; None if either is unknown."""
        if self.power_w is None or self.expected is None:
            return None
        return self.power_w / self.expected.power_w

    def content(self) -> dict[str, Any]:
        """Return the sample as JSON-compatible values."""
        return {
            "at_s": self.at_s,
            "mode": self.mode and self.mode._asdict(),
            "argument": self.mode and mode_argument(self.mode),
            "label": self.mode and self.mode.label(),
            "problem": self.problem,
            "power_w": self.power_w,
            "temperature_c": self.temperature_c,
            "throttled": self.throttled,
            "expected": self.expected and self.expected.content(),
            "power_ratio": self.power_ratio,
        }


def samples(
    device: Device, fitted: FittedDevice | None, seconds: float | None, wait: Callable[[], None]
) -> Generator[Sample, None, None]:
    """Sample a device repeatedly, without changing it. Close the iterator when leaving early.

    Args:
        device: the board.
        fitted: the fitted device, if there is one.
        seconds: how long to sample, device-clock seconds; None for ever.
        wait: called between two samples.
    """
    offered = frozenset(array_to_modes(device.modes)) if fitted else frozenset()
    begin_s, throttled_before = device.clock.now_s(), device.conditions().throttle_events
    meter, metered_from_s = device.start_meter(), 0.0
    try:
        while True:
            at_s = device.clock.now_s() - begin_s
            if at_s - metered_from_s >= _REPLACE_METER_AFTER_S:
                meter.stop()
                meter, metered_from_s = device.start_meter(), at_s
            mode, problem = _current_mode(device)
            power_mw, conditions = latest_power_mw(meter, device.clock), device.conditions()
            throttle_events = conditions.throttle_events
            yield Sample(
                at_s,
                mode,
                problem,
                None if math.isnan(power_mw) else power_mw / 1e3,
                conditions.temperature_c,
                None if throttle_events is None or throttled_before is None else throttle_events - throttled_before,
                # The current settings may not match any offered mode: between two modes, or under a governor.
                expectation_of(fitted, mode) if fitted and mode in offered else None,
            )
            if seconds is not None and at_s >= seconds:
                return
            wait()
    finally:
        meter.stop()


def _current_mode(device: Device) -> tuple[PowerMode | None, str | None]:
    try:
        return device.current_mode(), None
    except WattfleetError as error:
        return None, str(error)
