"""Power modes on the command line: four numbers, or the name of a preset."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from edge_agent.devices.device import Device
from edge_agent.devices.jetson.knob_files import within
from edge_agent.devices.sysfs import SysfsDevice
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BOARDS, ModeArray, PowerMode, array_to_modes, modes_to_array

_FORM = "cores,CPU kHz,GPU Hz,memory Hz"


def mode_argument(mode: PowerMode) -> str:
    """Return a mode as a command-line argument, such as `12,2201600,1300500000,3199000000`."""
    return ",".join(map(str, mode))


def presets_of(device: Device) -> Mapping[str, PowerMode]:
    """Return the named modes of a device.

    A Jetson has the modes of NVIDIA's configuration, a simulated board the modes shipped for its kind. A limit that is
    not in the board's table is rounded down to the next frequency in it.
    """
    if isinstance(device, SysfsDevice):
        return device.presets
    known = BOARDS.get(device.board_kind)
    if known is None:
        return {}
    space = known.space
    return {
        name: PowerMode(
            preset.cores,
            within(space.cpu_khz, preset.cpu_khz),
            within(space.gpu_hz, preset.gpu_hz),
            within(space.mem_hz, preset.mem_hz),
        )
        for name, preset in known.presets.items()
    }


def parse_mode(device: Device, text: str) -> PowerMode:
    """Parse a mode given on the command line.

    Args:
        device: the device that must offer the mode.
        text: four numbers such as `12,2201600,1300500000,3199000000`, or the name of a preset.

    Raises:
        InvalidInputError: the text is neither, or the device does not offer the mode. The message names the nearest
            mode.
    """
    presets = presets_of(device)
    if text in presets:
        return presets[text]
    if not re.fullmatch(r"\d+(,\d+){3}", text):
        choices = f", or one of the presets {', '.join(presets)}" if presets else ""
        example = mode_argument(array_to_modes(device.modes[-1:])[0])
        raise InvalidInputError(f"unknown mode {text!r}; use {_FORM}, such as {example}{choices}")
    mode = PowerMode(*map(int, text.split(",")))
    if not (device.modes == modes_to_array([mode])).all(axis=1).any():
        raise InvalidInputError(
            f"{device.board_kind} does not offer the mode {text} ({_FORM}); its nearest mode is"
            f" {mode_argument(nearest(device.modes, mode))}"
        )
    return mode


def nearest(modes: ModeArray, mode: PowerMode) -> PowerMode:
    """Return the one of `[n, 4]` modes that is nearest to a mode in log distance."""
    # Avoid log(0); every real setting is at least 1.
    wanted = np.log(np.maximum(modes_to_array([mode]), 0.5))
    distance = np.abs(np.log(modes) - wanted).sum(axis=1)
    place = int(distance.argmin())
    return array_to_modes(modes[place : place + 1])[0]
