"""The states of a device, as the agent, the coordinator and its store know them."""

from __future__ import annotations

from enum import Enum


class DeviceState(str, Enum):
    """What a device is doing. The coordinator alone sets `OFFLINE`; an agent cannot report it."""

    ENROLLED = "enrolled"
    PROFILING = "profiling"
    READY = "ready"
    TRAINING = "training"
    DEGRADED = "degraded"
    OFFLINE = "offline"
