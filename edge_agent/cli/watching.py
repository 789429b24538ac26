"""How a device fares, sample by sample, beside what is predicted of the mode in force."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from edge_agent.cli.mode_names import written
from edge_agent.devices.device import Device
from edge_agent.devices.power_now import latest_power_mw
from edge_agent.learning.expectation import Expectation, expectation_of
from edge_agent.profiling.profile_state import FittedDevice
from wattfleet.errors import WattfleetError
from wattfleet.modes import PowerMode, array_to_modes

_METER_LASTS_S = 300.0
"""A meter keeps every sample, and hands all of them out at every look: a new one begins now and then."""


@dataclass(frozen=True)
class Sample:
    """A device at one moment.

    Attributes:
        at_s: seconds since the first sample, on the device's clock.
        mode: the mode in force; None where it cannot be read.
        problem: why it cannot; None where it can.
        power_w: watts; None where a rail cannot be read, which is not zero.
        temperature_c: the hottest junction, degrees Celsius; None where the board does not say.
        throttled: times the board throttled itself since the first sample; None where it does not count them.
        expected: what is predicted, or was measured, of training at this mode; None where nothing is known of it.
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
        """Power now as a share of what training is expected to draw; None where either is not known."""
        if self.power_w is None or self.expected is None:
            return None
        return self.power_w / self.expected.power_w

    def content(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "at_s": self.at_s,
            "mode": self.mode and self.mode._asdict(),
            "argument": self.mode and written(self.mode),
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
    """Look at a device again and again; nothing is changed. Close the iterator when leaving early.

    Args:
        device: the board.
        fitted: what is known of its modes, if anything.
        seconds: how long, device-clock seconds; None never ends.
        wait: called between two samples.
    """
    offered = frozenset(array_to_modes(device.modes)) if fitted else frozenset()
    begin_s, throttled_before = device.clock.now_s(), device.conditions().throttle_events
    meter, metered_from_s = device.start_meter(), 0.0
    try:
        while True:
            at_s = device.clock.now_s() - begin_s
            if at_s - metered_from_s >= _METER_LASTS_S:
                meter.stop()
                meter, metered_from_s = device.start_meter(), at_s
            mode, problem = _mode_in_force(device)
            power_mw, conditions = latest_power_mw(meter, device.clock), device.conditions()
            counted = conditions.throttle_events
            yield Sample(
                at_s,
                mode,
                problem,
                None if math.isnan(power_mw) else power_mw / 1e3,
                conditions.temperature_c,
                None if counted is None or throttled_before is None else counted - throttled_before,
                # Between two modes, and under a governor, none that is offered may be in force.
                expectation_of(fitted, mode) if fitted and mode in offered else None,
            )
            if seconds is not None and at_s >= seconds:
                return
            wait()
    finally:
        meter.stop()


def _mode_in_force(device: Device) -> tuple[PowerMode | None, str | None]:
    try:
        return device.current_mode(), None
    except WattfleetError as error:
        return None, str(error)
