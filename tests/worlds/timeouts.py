"""The time-outs of all worlds. Events prefer the moments just before, at and just after them."""

from __future__ import annotations

import random

TICK_S = 1.0
"""Between two looks of the coordinator at what devices may draw."""

CONFIRM_TIMEOUT_S = 8.0
"""For a connected device to confirm a new limit."""

LEASE_S = 5.0
"""Between two messages of a device."""

MISSED_LEASES = 3
"""A session ends after this many leases without a message; an agent ends it after as many without an answer."""

GRANT_TIMEOUT_S = 10.0
"""For which an app waits for its grant."""

RETURN_GRACE_S = 20.0
"""For which a restarted coordinator waits for its devices before it plans without them."""

LIFETIMES_S = (20.0, 30.0)
"""For which a device may act on its grant without contact."""

MARGIN_S = 5.0
"""For a device to park once its grant has lapsed."""

DRIFT = 0.01
"""Relative error of a device's clock that the coordinator allows for."""

_ALL_S = (
    TICK_S,
    CONFIRM_TIMEOUT_S,
    LEASE_S,
    MISSED_LEASES * LEASE_S,
    GRANT_TIMEOUT_S,
    RETURN_GRACE_S,
    *LIFETIMES_S,
    *(lifetime_s * (1 + DRIFT) + MARGIN_S for lifetime_s in LIFETIMES_S),
)
_NEAR_S = (-0.3, -0.1, -0.01, 0.0, 0.01, 0.1, 0.3)


def near_timeout_s(rng: random.Random) -> float:
    """Seconds of a random time-out, or slightly fewer or more."""
    return rng.choice(_ALL_S) + near_s(rng)


def near_s(rng: random.Random) -> float:
    """A little time before or after a moment, or none."""
    return rng.choice(_NEAR_S)
