"""Measures the current power with a meter that runs just long enough."""

from __future__ import annotations

import math

from edge_agent.devices.device import Device, PowerMeter
from edge_agent.devices.meters.polled_meter import INTERVAL_S
from wattfleet_io.clock import Clock

# jtop publishes its first sample after half a second; energy counters need two readings.
_PATIENCE_S = 1.5
_LOOK_AGAIN_S = INTERVAL_S / 2
# Every meter samples more often than this, s; an older sample means that the meter has failed.
_CURRENT_S = 2.0


def latest_power_mw(meter: PowerMeter, clock: Clock) -> float:
    """Return the latest sample of a running meter, mW; NaN if power cannot be read, or the sample is old.

    Waits briefly if the meter has only just started.

    Args:
        meter: samples the power.
        clock: the device's clock.
    """
    give_up_s = clock.now_s() + _PATIENCE_S
    trace = meter.read()
    while len(trace.at_s) < 2 and (not len(trace.at_s) or math.isnan(trace.power_mw[-1])):
        if clock.now_s() >= give_up_s:
            return math.nan
        clock.sleep_s(_LOOK_AGAIN_S)
        trace = meter.read()
    return float(trace.power_mw[-1]) if clock.now_s() - trace.at_s[-1] <= _CURRENT_S else math.nan


def power_now_mw(device: Device) -> float:
    """Return the current board power, mW; NaN if it cannot be read."""
    meter = device.start_meter()
    try:
        return latest_power_mw(meter, device.clock)
    finally:
        meter.stop()
