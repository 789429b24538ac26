"""Power at this moment, by a meter that runs just long enough."""

from __future__ import annotations

import math

from edge_agent.devices.device import Device
from edge_agent.devices.polled_meter import INTERVAL_S

# Counters of energy tell a power only from their second reading on.
_PATIENCE_S = 3 * INTERVAL_S


def power_now_mw(device: Device) -> float:
    """Board power now, mW; NaN where it cannot be read."""
    meter = device.start_meter()
    try:
        if math.isnan(meter.read().power_mw[-1]):
            device.clock.sleep_s(_PATIENCE_S)
    finally:
        trace = meter.stop()
    return float(trace.power_mw[-1])
