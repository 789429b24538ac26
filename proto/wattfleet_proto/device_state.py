"""What a device reports of itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from wattfleet.core.errors import InvalidInputError

if TYPE_CHECKING:
    from wattfleet.core.choosing import Front
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
#
# A value is declared once, here. It is checked, shown, exported as a table and served as a metric by this declaration,
# by agents and by the coordinator. A new one needs a field of the same name in `v1/session.proto`, a board that reads
# it (`edge_agent.devices.device.Device.conditions`), rows in `docs/metrics.md` and a panel in `deploy/grafana`.


@dataclass(frozen=True)
class SensorReading:
    """One value of a sample.

    Attributes:
        text: what it is, as the help text of its metrics.
        metric: the end of its metrics' names, with the unit.
        words: shows it in a line, as a format string; empty if no line shows it.
        at_least: the smallest plausible value.
        at_most: the largest plausible value.
        is_count: it only grows until the board or the agent starts again, so its metrics are counters.
        flag: what is shown beside a device's state while a truth value is true, such as "weak supply".
        is_trouble: somebody should look at a device that has the flag.
    """

    text: str
    metric: str
    words: str = ""
    at_least: float = 0.0
    at_most: float = 1.0
    is_count: bool = False
    flag: str = ""
    is_trouble: bool = False

    def is_plausible(self, value: float) -> bool:
        """Whether a board can have the value."""
        return math.isfinite(value) and self.at_least <= value <= self.at_most


def _reading(text: str, metric: str, words: str = "", **others: Any) -> Any:
    return field(default=None, metadata={"reading": SensorReading(text, metric, words, **others)})


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
        battery_share: charge of its battery, 0 to 1.
    """

    power_w: float | None = _reading("Power of the board now, in watts", "power_watts", "{:.1f} W", at_most=10_000.0)
    temperature_c: float | None = _reading(
        "Temperature of the hottest part of the chip",
        "temperature_celsius",
        "{:.0f} °C",
        at_least=-100.0,
        at_most=200.0,
    )
    mode: PowerMode | None = None
    throttle_events: int | None = _reading(
        "Times the board has throttled itself since it booted", "throttle_events", at_most=2.0**53, is_count=True
    )
    fan_share: float | None = _reading("Speed of the fan, 0 to 1", "fan_ratio", "fan {:.0%}")
    gpu_use_share: float | None = _reading(
        "Use of the GPU in the last moments, 0 to 1", "gpu_use_ratio", "GPU {:.0%} used"
    )
    energy_j: float | None = _reading(
        "Joules that the board has drawn since its agent started", "energy_joules", at_most=1e15, is_count=True
    )
    battery_share: float | None = _reading("Charge of the board's battery, 0 to 1", "battery_ratio", "battery {:.0%}")


READINGS: Mapping[str, SensorReading] = {
    each.name: each.metadata["reading"] for each in fields(BoardSample) if "reading" in each.metadata
}
"""The readings of a sample by name, in the order in which they are shown; the mode is none."""


def _of_mode(knob: Callable[[PowerMode], float]) -> Callable[[BoardSample], float | None]:
    return lambda sample: None if sample.mode is None else knob(sample.mode)


FIGURES: tuple[tuple[SensorReading, Callable[[BoardSample], float | None]], ...] = (
    (
        SensorReading("1 while the board's power can be read, else 0", "power_readable"),
        lambda sample: sample.power_w is not None,
    ),
    (SensorReading("Number of CPU cores that are online", "online_cores"), _of_mode(lambda mode: mode.cores)),
    (SensorReading("CPU clock of the mode in force", "cpu_clock_hertz"), _of_mode(lambda mode: mode.cpu_khz * 1e3)),
    (SensorReading("GPU clock of the mode in force", "gpu_clock_hertz"), _of_mode(lambda mode: mode.gpu_hz)),
    (SensorReading("Memory clock of the mode in force", "memory_clock_hertz"), _of_mode(lambda mode: mode.mem_hz)),
    *((reading, attrgetter(name)) for name, reading in READINGS.items()),
)
"""What is exported as metrics, and how a sample says it; None is not exported."""


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
