"""Power modes as people write them: four numbers, or the name of a preset."""

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


def written(mode: PowerMode) -> str:
    """A mode as the command line takes it, such as `12,2201600,1300500000,3199000000`."""
    return ",".join(map(str, mode))


def counted(modes: int) -> str:
    """A number of modes in words."""
    return f"{modes} mode{'' if modes == 1 else 's'}"


def presets_of(device: Device) -> Mapping[str, PowerMode]:
    """The modes of a device that have names.

    On a Jetson those of NVIDIA's configuration; a simulated board has those that its kind is shipped with. A
    limit that is not in the board's table stands for the next lower frequency.
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


def mode_named(device: Device, text: str) -> PowerMode:
    """The mode that a command line names.

    Args:
        device: whose mode it is to be.
        text: four numbers such as `12,2201600,1300500000,3199000000`, or the name of a preset.

    Raises:
        InvalidInputError: it is neither, or the device does not offer it; the nearest mode is named.
    """
    presets = presets_of(device)
    if text in presets:
        return presets[text]
    if not re.fullmatch(r"\d+(,\d+){3}", text):
        named = f", or one of the presets {', '.join(presets)}" if presets else ""
        raise InvalidInputError(
            f"{text!r} is no mode: give {_FORM}, such as {written(array_to_modes(device.modes[-1:])[0])}{named}"
        )
    mode = PowerMode(*map(int, text.split(",")))
    if not (device.modes == modes_to_array([mode])).all(axis=1).any():
        raise InvalidInputError(
            f"{device.board_kind} does not offer {text} ({_FORM}): the nearest mode that it offers is"
            f" {written(nearest(device.modes, mode))}"
        )
    return mode


def nearest(modes: ModeArray, mode: PowerMode) -> PowerMode:
    """The one of `[n, 4]` modes whose knobs differ least from a mode's, by their ratios."""
    # A knob of 0 is no ratio; any other value is further off.
    wanted = np.log(np.maximum(modes_to_array([mode]), 0.5))
    distance = np.abs(np.log(modes) - wanted).sum(axis=1)
    place = int(distance.argmin())
    return array_to_modes(modes[place : place + 1])[0]
