"""The states of a device and of its grant, as the agent, the coordinator and its store know them."""

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


class GrantPhase(str, Enum):
    """How far a device is with the training that its grant allows."""

    WAITING = "waiting"
    """The training may begin."""
    TRAINING = "training"
    OVER = "over"
    """The training has ended, or may not begin any more."""
