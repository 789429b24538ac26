"""What a store keeps about grants, so that a coordinator that restarts frees no watts too early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GivenUpTraining:
    """A device whose round or run has ended, but not its grant.

    Attributes:
        device_id: the device.
        plan_id: the plan of the grant; None once the grant is over.
    """

    device_id: str
    plan_id: str | None


@dataclass(frozen=True)
class GrantLifetime:
    """The longest lifetime that a device may still rely on.

    Attributes:
        lifetime_s: in seconds.
    """

    lifetime_s: float


@dataclass(frozen=True)
class StoredGrants:
    """What an earlier coordinator has stored.

    Attributes:
        lifetime_s: the longest lifetime that a device may still rely on, in seconds; 0 if none is stored.
        given_up: device id -> plan id of each training that was given up and may go on.
    """

    lifetime_s: float = 0.0
    given_up: Mapping[str, str] = field(default_factory=dict)
