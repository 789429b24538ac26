"""What the agent can do on a machine without power modes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from edge_agent.devices.host import HostDevice
from edge_agent.devices.meters.power_now import power_now_mw
from edge_agent.diagnosis.finding import Finding, absent, failing, fine, limited


def host_findings(device: HostDevice) -> Iterator[Finding]:
    """Look at what such a machine tells of itself; many have no power meter, and then join no round."""
    yield limited(
        "device",
        f"host: no Jetson, so it has one mode, {device.current_mode().label()}, and is never set",
        "where it has a power meter, its time and power are measured and planned with; on a Jetson `auto` finds the"
        " power modes",
    )
    if not (device.has_power_meter or device.power_is_refused):
        yield absent("power", device.power_statement, _power_advice(device))
    elif math.isnan(power_now_mw(device)):
        yield failing("power", device.power_statement, _power_advice(device))
    else:
        yield fine("power", device.power_statement)
    conditions = device.conditions()
    if conditions.temperature_c is None:
        yield limited(
            "temperature", "no zone on the chip answers", "watch the heat yourself: a profile cannot stop for it"
        )
    else:
        yield fine("temperature", f"{conditions.temperature_c:.0f} degrees C")
    if conditions.throttle_events is None:
        yield limited("throttling", "not counted", "look at `dmesg` where a profile seems slow")
    else:
        yield fine("throttling", f"{conditions.throttle_events} times since the start")


def _power_advice(device: HostDevice) -> str:
    if device.power_is_refused:
        return "run this as root: `sudo wattfleet agent doctor`"
    if device.has_power_meter:
        return "look into `dmesg` and the output of `nvidia-smi` for errors of the driver"
    return (
        "for an NVIDIA GPU, install its driver and `pip install 'wattfleet[nvml]'`; a simulated board"
        " (--device simulated:<kind>) needs no power"
    )
