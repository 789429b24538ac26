"""Who has a session, and for how long it is believed without a word: a pure state machine, which is told the time."""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass

from coordinator.errors import DuplicateSessionError
from coordinator.settings import SessionSettings


@dataclass(frozen=True, slots=True)
class Pace:
    """How often agents are to be heard of.

    Attributes:
        lease_s: say something at least this often.
        reconnect_s: when the session is gone, come back at a random moment within.
    """

    lease_s: float
    reconnect_s: float


def pace_of(devices: int, settings: SessionSettings = SessionSettings()) -> Pace:
    """The pace of a fleet of some size.

    Leases of a large fleet are stretched to keep the number of renewals per second, as in Nomad.
    """
    return Pace(
        max(settings.lease_s, devices / settings.renewals_per_s),
        devices / settings.reconnects_per_s,
    )


@dataclass(eq=False, slots=True)
class Lease:
    """One device's session, for as long as it is renewed.

    Attributes:
        device_id: the device.
        installation: name of the agent's installation; empty for agents that tell none.
        lapses_s: when it is believed no more, in seconds of the clock that the leases are told.
        is_called_back: it is ended for the device to come back at once.
    """

    device_id: str
    installation: str
    lapses_s: float
    is_called_back: bool = False


class Leases:
    """The sessions of a fleet."""

    def __init__(
        self, started_s: float, expected: Collection[str] = (), settings: SessionSettings = SessionSettings()
    ) -> None:
        """Begin with no session.

        Args:
            started_s: now.
            expected: devices that had a session when the coordinator ended.
            settings: the pace of leases and reconnections.
        """
        self._settings = settings
        self._held: dict[str, Lease] = {}
        self._expected = set(expected)
        self._grace_ends_s = started_s + settings.return_grace_s

    def __len__(self) -> int:
        return len(self._held)

    @property
    def pace(self) -> Pace:
        """What agents are asked for, at the size that the fleet has now; those that are expected back included."""
        return pace_of(len(self._held) + len(self._expected), self._settings)

    def begin(self, device_id: str, installation: str, now_s: float) -> tuple[Lease, Lease | None]:
        """A session begins.

        Returns:
            Its lease, and that of the session which it takes the place of: an agent that restarts, or whose connection
            broke, may be back before its old session has lapsed.

        Raises:
            DuplicateSessionError: another installation has a session for this device.
        """
        self.require_free(device_id, installation)
        held = self._held.get(device_id)
        lease = Lease(device_id, installation, now_s + self._settings.missed_leases * self.pace.lease_s)
        self._held[device_id] = lease
        self._expected.discard(device_id)
        return lease, held

    def require_free(self, device_id: str, installation: str) -> None:
        """Make sure that a session may begin.

        Raises:
            DuplicateSessionError: another installation has a session for this device.
        """
        held = self._held.get(device_id)
        if held is not None and not (installation and held.installation == installation):
            raise DuplicateSessionError(f"{device_id} is connected already: give each device an id of its own")

    def renew(self, lease: Lease, now_s: float) -> Pace:
        """A device was heard of; the pace from now on."""
        pace = self.pace
        lease.lapses_s = now_s + self._settings.missed_leases * pace.lease_s
        return pace

    def end(self, lease: Lease) -> bool:
        """A session is over; False where another has taken its place."""
        if self._held.get(lease.device_id) is not lease:
            return False
        del self._held[lease.device_id]
        if lease.is_called_back:
            self._expected.add(lease.device_id)
        return True

    def call_back(self, lease: Lease, now_s: float) -> None:
        """A session is about to be ended so that its device comes back: from its end on that is waited for."""
        lease.is_called_back = True
        self._grace_ends_s = now_s + self._settings.return_grace_s

    def lapsed(self, now_s: float) -> list[Lease]:
        """Leases that were not renewed in time; the devices count as connected until their sessions end."""
        return [lease for lease in self._held.values() if lease.lapses_s <= now_s]

    def awaited(self, among: Set[str], now_s: float) -> tuple[int, float]:
        """How many of some devices are still expected back, and for how many seconds.

        Args:
            among: ids of devices.
            now_s: now.
        """
        count = len(self._expected & among) if now_s < self._grace_ends_s else 0
        return count, self._grace_ends_s - now_s if count else 0.0

    def missing(self, now_s: float) -> list[str]:
        """Devices that were not back within the grace: they are told once, and not expected any more."""
        if now_s < self._grace_ends_s:
            return []
        missing, self._expected = sorted(self._expected), set()
        return missing
