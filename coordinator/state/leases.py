"""Leases of the agents' sessions: a pure state machine, to which the time is passed."""

from __future__ import annotations

import math
from collections.abc import Collection, Set
from dataclasses import dataclass, replace

from coordinator.errors import DuplicateSessionError
from coordinator.settings import SessionSettings
from wattfleet_proto.limits import LEASE_S

MISSED_LEASES = 3
"""A session ends after this many leases without a message."""

RECONNECTS_PER_S = 400.0
"""Reconnections per second after a restart; agents spread them."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often agents have to send messages.

    Attributes:
        lease_s: the most seconds between two messages.
        reconnect_s: after losing a session, an agent reconnects at a random moment within this many seconds.
    """

    lease_s: float
    reconnect_s: float


def pace_of(devices: int, settings: SessionSettings = SessionSettings()) -> Pace:
    """The pace for a fleet of this size: leases of a large fleet are stretched to limit the renewals, as in Nomad."""
    return Pace(
        min(max(settings.lease_s, devices / settings.renewals_per_s), LEASE_S[1]),
        devices / RECONNECTS_PER_S,
    )


@dataclass(eq=False, slots=True)
class Lease:
    """The lease of one device's session.

    Attributes:
        device_id: the device.
        installation: name of the agent's installation; empty for agents that do not send one.
        expires_s: when it expires, in seconds of the clock that is passed in.
        is_reconnecting: the coordinator is ending the session so that the device reconnects.
    """

    device_id: str
    installation: str
    expires_s: float
    is_reconnecting: bool = False


class Leases:
    """The leases of all sessions."""

    def __init__(
        self,
        started_s: float,
        expected: Collection[str] = (),
        settings: SessionSettings = SessionSettings(),
        longest_s: float = math.inf,
    ) -> None:
        """Start without any session.

        Args:
            started_s: the time now.
            expected: devices that had a session when the previous coordinator ended.
            settings: the pace of leases and reconnections.
            longest_s: the longest lease in a fleet of any size; grants have to outlast several leases.
        """
        self._settings = settings
        self._longest_s = longest_s
        self._held: dict[str, Lease] = {}
        self._expected = set(expected)
        self._grace_ends_s = started_s + settings.return_grace_s

    def __len__(self) -> int:
        return len(self._held)

    @property
    def pace(self) -> Pace:
        """The pace for the fleet's size now, including devices that are expected to reconnect."""
        pace = pace_of(len(self._held) + len(self._expected), self._settings)
        return replace(pace, lease_s=min(pace.lease_s, self._longest_s))

    def begin(
        self, device_id: str, installation: str, now_s: float, is_proven: bool = False
    ) -> tuple[Lease, Lease | None]:
        """Begin a session.

        Args:
            device_id: the device.
            installation: the installation of its agent.
            now_s: the time now.
            is_proven: a certificate proves the device's identity, so that it replaces any other session with its id.

        Returns:
            The new lease, and the lease that it replaces, if any. An agent that restarts, or whose connection broke,
            may return before its old lease expires.

        Raises:
            DuplicateSessionError: another installation has a session for this device.
        """
        if not is_proven:
            self.require_free(device_id, installation)
        held = self._held.get(device_id)
        lease = Lease(device_id, installation, now_s + MISSED_LEASES * self.pace.lease_s)
        self._held[device_id] = lease
        self._expected.discard(device_id)
        return lease, held

    def require_free(self, device_id: str, installation: str) -> None:
        """Check that a device may begin a session.

        Raises:
            DuplicateSessionError: another installation has a session for this device.
        """
        held = self._held.get(device_id)
        if held is not None and not (installation and held.installation == installation):
            raise DuplicateSessionError(
                f"{device_id} is already connected from another installation: give each device its own id"
            )

    def renew(self, lease: Lease, now_s: float) -> Pace:
        """Renew a lease because its device sent a message, and return the new pace."""
        pace = self.pace
        lease.expires_s = now_s + MISSED_LEASES * pace.lease_s
        return pace

    def end(self, lease: Lease) -> bool:
        """End a session; return False if another session has replaced it."""
        if self._held.get(lease.device_id) is not lease:
            return False
        del self._held[lease.device_id]
        if lease.is_reconnecting:
            self._expected.add(lease.device_id)
        return True

    def expect_reconnect(self, lease: Lease, now_s: float) -> None:
        """Expect a device to reconnect after its session is ended."""
        lease.is_reconnecting = True
        self._grace_ends_s = now_s + self._settings.return_grace_s

    def forget(self, device_ids: Collection[str]) -> None:
        """Stop expecting the given devices, because they were removed."""
        self._expected.difference_update(device_ids)

    def expired(self, now_s: float) -> list[Lease]:
        """The leases that were not renewed in time; their devices count as connected until the sessions end."""
        return [lease for lease in self._held.values() if lease.expires_s <= now_s]

    def expected_back(self, among: Set[str], now_s: float) -> tuple[int, float]:
        """How many of the given devices are still expected to reconnect, and for how many more seconds.

        Args:
            among: ids of the devices.
            now_s: the time now.
        """
        count = len(self._expected & among) if now_s < self._grace_ends_s else 0
        return count, self._grace_ends_s - now_s if count else 0.0

    def take_missing(self, now_s: float) -> list[str]:
        """Return the devices that did not reconnect within the grace period, and stop expecting them."""
        if now_s < self._grace_ends_s:
            return []
        missing, self._expected = sorted(self._expected), set()
        return missing
