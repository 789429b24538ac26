"""What a device reports of itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from wattfleet.core.choosing import Front
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode

# --- Device state -----------------------------------------------------------------------------------------------------
# The states of a device and of its grant, as the agent, the coordinator and its store know them.


class DeviceState(str, Enum):
    """What a device is doing. The coordinator alone sets `OFFLINE`; an agent cannot report it."""

    ENROLLED = "enrolled"
    PROFILING = "profiling"
    READY = "ready"
    TRAINING = "training"
    DEGRADED = "degraded"
    OFFLINE = "offline"


class GrantPhase(str, Enum):
    """How far a device is with the training that its grant allows."""

    WAITING = "waiting"
    """The training may begin."""
    TRAINING = "training"
    OVER = "over"
    """The training has ended, or may not begin any more."""


# --- Board sample -----------------------------------------------------------------------------------------------------
# What a board's sensors said at one moment, as agents report it with their leases.


@dataclass(frozen=True, slots=True)
class BoardSample:
    """One small sample of a board. None is what the board does not report.

    Attributes:
        power_w: its power, W.
        temperature_c: of the hottest part of the chip, degrees Celsius.
        mode: the online cores and clocks in force.
        throttle_events: times that it has throttled itself since it booted.
        fan_share: speed of its fan, 0 to 1.
        gpu_use_share: use of its GPU in the last moments, 0 to 1.
        energy_j: joules that it has drawn since its agent started.
    """

    power_w: float | None = None
    temperature_c: float | None = None
    mode: PowerMode | None = None
    throttle_events: int | None = None
    fan_share: float | None = None
    gpu_use_share: float | None = None
    energy_j: float | None = None


# --- Preset point -----------------------------------------------------------------------------------------------------
# A named mode of a board with its prediction, as agents report it with a front.

MAX_PRESETS = 16
_MAX_NAME = 64


@dataclass(frozen=True)
class PresetPoint:
    """One of a board's presets, such as MAXN.

    Attributes:
        name: of the preset.
        front: of this mode alone.
        is_measured: whether the device has measured the mode.
    """

    name: str
    front: Front
    is_measured: bool

    def __post_init__(self) -> None:
        if not self.name.isprintable() or not 0 < len(self.name) <= _MAX_NAME:
            raise InvalidInputError(f"a preset's name has 1 to {_MAX_NAME} printable characters")
        if len(self.front) != 1:
            raise InvalidInputError(f"the preset {self.name} is one mode, not {len(self.front)}")
