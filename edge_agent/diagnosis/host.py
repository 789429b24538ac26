"""Checks of a machine without power modes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from edge_agent.devices.host import HostDevice
from edge_agent.devices.meters.power_now import power_now_mw
from edge_agent.diagnosis.finding import Finding, absent, failing, fine, limited
from wattfleet_io.console import count_of


def host_findings(device: HostDevice) -> Iterator[Finding]:
    """Check a machine without power modes; many have no power meter and therefore join no rounds."""
    yield limited(
        "device",
        f"host: not a Jetson, so its only mode is {device.current_mode().label()}, which is never changed",
        "with a power meter, it can be measured and join rounds; on a Jetson, `--device auto` finds the power modes",
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
            "temperature",
            "no thermal zone on the chip can be read",
            "watch the temperature yourself; a profile cannot pause for it",
        )
    else:
        yield fine("temperature", f"{conditions.temperature_c:.0f} degrees C")
    if conditions.throttle_events is None:
        yield limited("throttling", "not counted", "check `dmesg` if a profile seems slow")
    else:
        yield fine("throttling", f"{count_of(conditions.throttle_events, 'time')} since boot")


def _power_advice(device: HostDevice) -> str:
    if device.power_is_refused:
        return "run this as root: `sudo wattfleet agent doctor`"
    if device.has_power_meter:
        return "check `dmesg` and `nvidia-smi` for driver errors"
    return (
        "for an NVIDIA GPU, install its driver and `pip install 'wattfleet[nvml]'`; a simulated board"
        " (--device simulated:<kind>) needs no meter"
    )
