"""Power modes as messages."""

from __future__ import annotations

from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode
from wattfleet_proto.v1 import power_pb2

_MAX_KNOB = 10**12
"""1 THz, hundreds of times any board's clock rate."""


def mode_to_message(mode: PowerMode) -> power_pb2.PowerMode:
    """Convert a power mode into its message."""
    return power_pb2.PowerMode(cores=mode.cores, cpu_khz=mode.cpu_khz, gpu_hz=mode.gpu_hz, mem_hz=mode.mem_hz)


def mode_from_message(message: power_pb2.PowerMode) -> PowerMode:
    """Read a power mode from its message.

    Raises:
        InvalidInputError: a knob is unset or implausibly high.
    """
    mode = PowerMode(message.cores, message.cpu_khz, message.gpu_hz, message.mem_hz)
    if min(mode) <= 0:
        raise InvalidInputError(f"a power mode needs all four knobs, got {tuple(mode)}")
    # Fronts store knobs as doubles: a larger number could not be written back into a message exactly.
    if max(mode) >= _MAX_KNOB:
        raise InvalidInputError(f"a power mode's clocks run at less than 1 THz, got {tuple(mode)}")
    return mode
