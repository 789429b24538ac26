"""What a board's sensors said at one moment, as agents report it with their leases."""

from __future__ import annotations

from dataclasses import dataclass

from wattfleet.modes import PowerMode


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
