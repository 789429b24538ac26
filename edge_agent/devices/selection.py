"""Which device a command line names."""

from __future__ import annotations

from pathlib import Path

from edge_agent.devices.replay import ReplayDevice
from edge_agent.devices.simulated import SimulatedDevice
from edge_agent.devices.soft_board import SoftBoard
from wattfleet.boards import BOARDS
from wattfleet.errors import InvalidInputError


def open_device(spec: str, seed: int) -> SoftBoard:
    """The device that `spec` names.

    Args:
        spec: `simulated:<board kind>`, such as `simulated:agx-orin`, or `replay:<CSV file>`.
        seed: of a soft device.

    Raises:
        InvalidInputError: no such kind of device, no such board, or a CSV file that cannot be used.
    """
    kind, _, which = spec.partition(":")
    if kind == "simulated" and which in BOARDS:
        return SimulatedDevice(which, seed)
    if kind == "replay" and which:
        return ReplayDevice(Path(which), seed)
    choices = ", ".join([*(f"simulated:{name}" for name in BOARDS), "replay:<file>.csv"])
    raise InvalidInputError(f"unknown device {spec!r}: choose one of {choices}")
