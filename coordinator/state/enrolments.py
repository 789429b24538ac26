"""How many new devices each connection has enrolled: a limit, since every device stays known until it is forgotten."""

from __future__ import annotations

from coordinator.errors import TooManyDevicesError

_MAX_REMEMBERED = 20_000
"""Connections whose enrolments are counted; beyond it the oldest are dropped."""


class Enrolments:
    """The new devices of each connection."""

    def __init__(self, limit: int) -> None:
        """Start without any.

        Args:
            limit: new devices per connection.
        """
        self._limit = limit
        self._counts: dict[str, int] = {}  # by connection, oldest first

    def require_room(self, connection: str, device_id: str) -> None:
        """Make sure that a connection may enrol another device.

        Args:
            connection: the peer's address and port.
            device_id: the new device.

        Raises:
            TooManyDevicesError: it has enrolled as many as it may.
        """
        if self._counts.get(connection, 0) >= self._limit:
            raise TooManyDevicesError(
                f"{device_id}: this connection has reached its limit of {self._limit:,} new devices: give each agent"
                " its own connection, or raise the coordinator's setting sessions.max_new_devices_per_connection"
            )

    def add(self, connection: str) -> None:
        """Count a new device."""
        self._counts[connection] = self._counts.get(connection, 0) + 1
        if len(self._counts) > _MAX_REMEMBERED:
            del self._counts[next(iter(self._counts))]
