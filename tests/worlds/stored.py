"""The records that survive a coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.state.records import DeviceOverrides, DeviceRecord, RoundRecord, RunRecord


@dataclass
class Stored:
    """What a store holds."""

    devices: dict[str, DeviceRecord] = field(default_factory=dict)
    runs: dict[str, RunRecord] = field(default_factory=dict)
    rounds: dict[str, RoundRecord] = field(default_factory=dict)
    overrides: dict[str, DeviceOverrides] = field(default_factory=dict)
