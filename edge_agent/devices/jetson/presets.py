"""Converts NVIDIA's preset modes to power modes of a board."""

from __future__ import annotations

from edge_agent.devices.jetson.knob_files import within
from edge_agent.devices.jetson.nvpmodel_conf import NvpmodelMode
from wattfleet.modes import ModeSpace, PowerMode


def is_cpu_clock(parameter: str) -> bool:
    """Return whether a parameter of an nvpmodel configuration is a CPU clock."""
    return parameter.startswith("CPU_") and parameter != "CPU_ONLINE"


def preset_mode(preset: NvpmodelMode, space: ModeSpace) -> PowerMode:
    """Return the power mode of a preset; limits are rounded down to the board's frequencies."""
    settings = preset.settings
    offline = sum(parameter == "CPU_ONLINE" and value == "0" for (parameter, _), value in settings.items())
    limits_khz = [
        int(value)
        for (parameter, argument), value in settings.items()
        if is_cpu_clock(parameter) and argument == "MAX_FREQ"
    ]
    return PowerMode(
        max(space.cores) - offline,
        limited(space.cpu_khz, -1 if -1 in limits_khz else max(limits_khz, default=-1)),
        limited(space.gpu_hz, int(settings.get(("GPU", "MAX_FREQ"), "-1"))),
        limited(space.mem_hz, int(settings.get(("EMC", "MAX_FREQ"), "-1"))),
    )


def limited(table: tuple[int, ...], limit: int) -> int:
    """Return the highest frequency within a limit; -1 means no limit, as does 0 for the memory on JetPack 4 and 5."""
    return within(table, limit) if limit > 0 else table[-1]
